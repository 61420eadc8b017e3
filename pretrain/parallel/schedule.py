"""Learning rates, Muon's momentum and weight decay as pure functions of the step.

`step` counts from 0: it is the number of optimizer steps before the one that uses the value. Nothing here has state, so
a resumed run follows the same curve by knowing its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pretrain.config.schema import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True)
class Hyperparameters:
    """What the optimizer uses in one step."""

    lr: float
    muon_lr: float
    muon_momentum: float
    muon_weight_decay: float


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Learning rate of `step` over its peak: linear warm-up, then the schedule's curve, never below min_lr_ratio.

    The last step, total_steps - 1, still moves: its factor is one decay step above min_lr_ratio.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    left = max(0, total_steps - step)
    if schedule.name == "constant":
        share = 1.0
    elif schedule.name == "trapezoid":
        decay_steps = schedule.decay_fraction * total_steps
        share = min(1.0, left / decay_steps) if decay_steps > 0 else 1.0
    else:
        curve_steps = max(1, total_steps - schedule.warmup_steps)
        share = 0.5 * (1.0 - math.cos(math.pi * min(1.0, left / curve_steps)))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share


def hyperparameters(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, step: int, total_steps: int
) -> Hyperparameters:
    """Everything that varies with the step. Muon's momentum warms up linearly; its weight decay falls linearly to 0."""
    factor = lr_factor(schedule, step, total_steps)
    warmup_steps = optimizer.muon_momentum_warmup_steps
    warmed = min(1.0, step / warmup_steps) if warmup_steps > 0 else 1.0
    start = optimizer.muon_momentum_start
    return Hyperparameters(
        lr=optimizer.lr * factor,
        muon_lr=optimizer.muon_lr * factor,
        muon_momentum=start + (optimizer.muon_momentum - start) * warmed,
        muon_weight_decay=optimizer.muon_weight_decay * max(0.0, 1.0 - step / total_steps),
    )
