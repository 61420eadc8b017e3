"""Training steps of one process without a launcher, engine or loader: what measurements in tools/ are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.init import init_parameters
from pretrain.model.looped import LoopedLM
from pretrain.model.ops import TensorOps
from pretrain.sampling import Depths, LoopPlan


def make_model(cfg: ModelConfig, seed: int, device: torch.device | str = "cpu") -> LoopedLM:
    """The whole model with the initial weights of a run of that seed."""
    model = LoopedLM(cfg)
    init_parameters(model, cfg, seed, TensorOps())
    return model.to(device)


def make_micro_batch(rows: Tensor, depths: Depths, bucket: int = 1) -> tuple[MicroBatch, Loops]:
    """All of `rows` (int64 [B, S + 1], at positions 0..B-1 of the global batch) as one micro-batch.

    `bucket` as of LoopPlan.from_depths: B sends every row through every loop.
    """
    plan = LoopPlan.from_depths(depths, bucket=bucket)
    order = torch.from_numpy(plan.order).to(rows.device)
    ordered = rows[order]
    return MicroBatch(ordered[:, :-1], ordered[:, 1:], order), Loops.of(plan, depths, rows.device)
