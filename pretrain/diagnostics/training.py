"""Signs of trouble in the records of a run, and in what it generates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

WINDOW_STEPS = 100
SPIKE_FACTOR = 3.0


def gradient_oscillation(grad_norms: Sequence[float], window: int = WINDOW_STEPS) -> float | None:
    """Standard deviation of log(gradient norm) over the last `window` steps; None below two usable values.

    Norms that are 0 or not finite belong to skipped steps and are left out.
    """
    logs = [math.log(norm) for norm in grad_norms[-window:] if math.isfinite(norm) and norm > 0]
    return float(np.std(logs)) if len(logs) > 1 else None


def loss_spikes(losses: Sequence[float], window: int = WINDOW_STEPS, factor: float = SPIKE_FACTOR) -> list[int]:
    """Indices of losses above the median of the `window` before them by `factor` times their interquartile range.

    A loss that is not finite is a spike. The first 20 have too few before them.
    """
    spikes = []
    for i, loss in enumerate(losses):
        before = [x for x in losses[max(0, i - window) : i] if math.isfinite(x)]
        if not math.isfinite(loss):
            spikes.append(i)
        elif len(before) >= 20:
            low, middle, high = np.quantile(before, (0.25, 0.5, 0.75))
            if loss > middle + factor * max(high - low, 1e-3):
                spikes.append(i)
    return spikes


def repetition_rate(tokens: Tensor, length: int = 4) -> float:
    """Share of `length`-grams that occurred before in their row: int64 [B, S], S >= length."""
    repeated = total = 0
    for row in tokens.tolist():
        grams = [tuple(row[i : i + length]) for i in range(len(row) - length + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total
