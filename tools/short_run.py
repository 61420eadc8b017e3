"""Training of a configuration in this process: no launcher, checkpoints or resume. For runs of minutes.

The model, losses, depths, schedule and AdamW are those of pretrain/main.py; rows are drawn from the data set by
(seed, step) instead of read by the streaming loader, and the whole global batch is one micro-batch.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pretrain.config.schema import Config
from pretrain.errors import ConfigError, TrainingError
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.parallel.schedule import hyperparameters
from pretrain.sampling import DepthSampler
from tools.baselines import Rows, split_rows
from tools.one_process import make_micro_batch, make_model


class Finished(NamedTuple):
    """A trained model, and what its training showed."""

    model: LoopedLM
    """In evaluation mode."""
    norm_by_step: list[tuple[int, float]]
    """Mean norm of the last state on `probe.rows` validation rows, every `probe.every_steps` steps."""
    step_sec: float
    """Median."""


@lru_cache(maxsize=2)
def _rows(data: Path, split: str) -> Rows:
    return split_rows(data, split)


def train_short(cfg: Config, data: Path) -> Finished:
    """The configuration trained to `cfg.last_step` on one device, on the first context_length + 1 tokens of rows.

    Errors: TrainingError where loss or gradient are not finite, ConfigError for what only a real run can do.
    """
    if cfg.optimizer.name != "adamw" or cfg.model.recurrence.granularity == "token":
        raise ConfigError("a run in this process takes optimizer.name=adamw and depths per sequence or batch")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, settings, batch_rows = (
        make_model(cfg.model, cfg.train.seed, device),
        cfg.optimizer,
        cfg.train.global_batch_size,
    )
    model.compute_dtype = torch.bfloat16 if cfg.train.precision == "bf16" else torch.float32
    matrices = [p for p in model.parameters() if getattr(p, "use_muon", False)]
    others = [p for p in model.parameters() if not getattr(p, "use_muon", False)]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, settings.lr, settings.betas, settings.eps, fused=True)
    sampler = DepthSampler.from_config(cfg.model.recurrence, seed=cfg.train.seed, global_batch_size=batch_rows)
    length, train = cfg.model.context_length, _rows(data, "train")
    totals = Totals(float(batch_rows * length), float(batch_rows))
    norms, seconds = [], []
    for step in range(cfg.last_step):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = hyperparameters(settings, cfg.schedule, step, cfg.total_steps).lr
        chosen = np.random.default_rng((cfg.train.seed, step)).choice(len(train), batch_rows, replace=False)
        rows = torch.from_numpy(train[chosen, : length + 1]).to(device)
        batch, loops = make_micro_batch(rows, sampler.draw(step))
        output = model.training_loss(batch, loops, StateKey(cfg.train.seed, step, batch.rows), cfg.loss, totals)
        optimizer.zero_grad()
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or math.inf)
        if not (output.loss.isfinite() and norm.isfinite()):
            raise TrainingError(f"step {step + 1}: loss {output.loss.item()}, gradient norm {float(norm)}: not finite")
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        if cfg.probe.every_steps and (step + 1) % cfg.probe.every_steps == 0:
            norms.append((step + 1, _state_norm(model, cfg, data)))
    return Finished(model.eval(), norms, statistics.median(seconds))


def _state_norm(model: LoopedLM, cfg: Config, data: Path) -> float:
    """Mean norm of the state after the probe's loops, on the first validation rows."""
    rows = torch.from_numpy(_rows(data, "validation")[: cfg.probe.rows, : cfg.model.context_length])
    tokens = rows.to(next(model.parameters()).device)
    *_, (h, _) = model.eval().states(tokens, cfg.probe.num_loops or cfg.model.recurrence.default_loops)
    model.train()
    return float(h.double().norm(dim=-1).mean())
