"""A small looped model and its plain-torch training: what the engine is compared with.

Embedding, a block that is looped (first loops without gradient), head. Sizes are odd on purpose, so that no partition
boundary of ZeRO falls between parameters. Tensor parallelism shards the block's matrices along the hidden dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config.schema import Config, OptimizerConfig, ScheduleConfig, TrainConfig, ZeroConfig
from pretrain.parallel.muon import muon_direction
from pretrain.parallel.schedule import hyperparameters

VOCABULARY, WIDTH, HIDDEN, SEQUENCE, ROWS = 37, 15, 22, 9, 8
TOTAL_STEPS = 8


def config(optimizer: str, stage: int = 1, *, overlap_comm: bool = False, **optimizer_keys: Any) -> Config:
    """A configuration for the toy. A bucket holds its largest matrix, but not all its parameters."""
    defaults = {"lr": 1e-3, "muon_lr": 1e-3, "eps": 1e-8, "muon_momentum_warmup_steps": 4, "clip_norm": 0.5}
    return Config(
        optimizer=OptimizerConfig(name=optimizer, **{**defaults, **optimizer_keys}),
        schedule=ScheduleConfig(name="trapezoid"),
        train=TrainConfig(max_steps=TOTAL_STEPS, precision="fp32"),
        zero=ZeroConfig(stage=stage, overlap_comm=overlap_comm, bucket_elements=700),
    )


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Regions:
    """What surrounds the tensor-parallel products (enter, leave) and, under sequence parallelism, the loop."""

    tensor_size: int = 1
    tensor_rank: int = 0
    enter: Callable[[Tensor], Tensor] = _identity
    leave: Callable[[Tensor], Tensor] = _identity
    split: Callable[[Tensor], Tensor] = _identity
    join: Callable[[Tensor], Tensor] = _identity


class Block(nn.Module):
    """Pre-norm MLP with a residual and a decay per channel."""

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.A_log = nn.Parameter(torch.zeros(WIDTH))
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) * 0.3)
        self.regions = regions

    def forward(self, h: Tensor, injected: Tensor) -> Tensor:
        x = self.regions.enter(F.rms_norm(h, (WIDTH,), self.norm))
        y = self.regions.leave(F.linear(F.silu(F.linear(x, self.up)), self.down))
        return h * torch.exp(-torch.exp(self.A_log)) + y + injected


class Toy(nn.Module):
    """ids [B, S], labels [B, S] (-1: not counted) -> sum of the cross entropy over valid tokens.

    Sequence parallelism splits the first dimension, as megatron-core's mappings do: here that is B.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.regions = regions or Regions()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block(self.regions)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            parameter.use_muon, parameter.tensor_partition_dim = False, None
            parameter.tensor_model_parallel, parameter.sequence_parallel = False, False
        for parameter in (self.block.norm, self.block.A_log):
            parameter.sequence_parallel = True
        for parameter, dim in ((self.block.up, 0), (self.block.down, 1)):
            parameter.use_muon = True
            if self.regions.tensor_size > 1:
                parameter.tensor_partition_dim, parameter.tensor_model_parallel = dim, True
                shard = parameter.data.chunk(self.regions.tensor_size, dim)[self.regions.tensor_rank]
                parameter.data = shard.clone()

    def forward(self, ids: Tensor, labels: Tensor, num_loops: int, no_grad_loops: int = 1) -> Tensor:
        injected = self.regions.split(self.embedding(ids))
        h = torch.zeros_like(injected)
        with torch.no_grad():
            for _ in range(no_grad_loops):
                h = self.block(h, injected)
        for _ in range(num_loops - no_grad_loops):
            h = self.block(h, injected)
        logits = self.head(self.regions.join(h))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")


def batch(step: int, valid_tokens: dict[int, int] | None = None) -> tuple[Tensor, Tensor, int]:
    """ids, labels [ROWS, SEQUENCE] and loop count of a step; `valid_tokens` leaves that many labels in a row."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    ids, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for row, count in (valid_tokens or {}).items():
        labels[row, count:] = -1
    return ids, labels, 2 + step % 3


@dataclass
class Trace:
    """Losses and raw gradient norms by step, final weights, and the gradient of the last step, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def plain_training(run: Config, num_steps: int, valid_tokens: dict[int, int] | None = None) -> Trace:
    """The reference: torch.optim.AdamW and Muon written out, one process, one batch per step."""
    model = Toy()
    named = dict(model.named_parameters())
    muon = {n: p for n, p in named.items() if p.use_muon and run.optimizer.name == "muon"}
    rest = [p for n, p in named.items() if n not in muon]
    adamw = torch.optim.AdamW(rest, betas=run.optimizer.betas, eps=run.optimizer.eps, weight_decay=0.0)
    momenta = {n: torch.zeros_like(p) for n, p in muon.items()}
    trace = Trace([], [], {}, {})
    for step in range(num_steps):
        values = hyperparameters(run.optimizer, run.schedule, step, run.total_steps)
        ids, labels, num_loops = batch(step, valid_tokens)
        model.zero_grad()
        loss = model(ids, labels, num_loops) / (labels >= 0).sum()
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients = {n: p.grad.clone() for n, p in named.items()}
        norm = torch.stack([g.double().norm() for g in trace.gradients.values()]).norm()
        trace.norms.append(norm.item())
        clip = min(1.0, run.optimizer.clip_norm / (norm.item() + 1e-6))
        for parameter in rest:
            parameter.grad.mul_(clip)
        adamw.param_groups[0]["lr"] = values.lr
        adamw.step()
        with torch.no_grad():
            for name, p in muon.items():
                momenta[name] = values.muon_momentum * momenta[name] + (1 - values.muon_momentum) * p.grad
                ahead = (1 - values.muon_momentum) * p.grad + values.muon_momentum * momenta[name]
                update = muon_direction(ahead, run.optimizer.muon_steps, torch.float32, None, None)
                decay = values.muon_weight_decay * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                p -= values.muon_lr * (update + decay * p * (update * p >= 0))
    trace.weights = {n: p.detach().clone() for n, p in named.items()}
    return trace
