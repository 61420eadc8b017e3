"""What counts as a spike of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pretrain.config.schema import GuardsConfig


def is_spike(loss: float, recent: Sequence[float], guards: GuardsConfig) -> bool:
    """Whether `loss` is more than `spike_sigma` standard deviations above the mean of the last `spike_window_steps`.

    False while `recent` holds fewer losses. Sums are exact, so that the answer depends on the losses alone.
    """
    window = recent[-guards.spike_window_steps :]
    if len(window) < guards.spike_window_steps:
        return False
    mean = math.fsum(window) / len(window)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in window) / len(window))
    return loss > mean + guards.spike_sigma * deviation
