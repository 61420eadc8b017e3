"""Initial recurrent states from a counter hash: the same numbers on every device and under every layout.

Each value is 32 bits of (seed, step, row, position, channel), mapped to a normal or truncated normal variate by a table
of quantiles, so no device's generator or transcendental functions take part. In
evaluation step and row are 0: a state depends on the seed, the position and the channel only, never on neighbours.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.model.counter import StateKey, numbered, token_bits

_BITS = 16  # of the table index; 65,536 quantiles give a standard deviation exact to 1e-4
_TRUNCATION = 3.0  # of like_init, in standard deviations (Parcae's and Huginn's code)


@lru_cache(maxsize=8)
def _quantiles(truncation: float | None, device: torch.device) -> Tensor:
    """Quantiles of N(0, 1), cut at +-truncation, at the midpoints of 2^16 equal slices: fp32 [65536]."""
    u = (torch.arange(1 << _BITS, dtype=torch.float64) + 0.5) / (1 << _BITS)
    if truncation is not None:
        low = 0.5 * math.erfc(truncation / math.sqrt(2))
        u = low + u * (1 - 2 * low)
    return torch.special.ndtri(u).float().to(device)


def initial_state(cfg: ModelConfig, e: Tensor, key: StateKey | None, positions: Tensor) -> Tensor:
    """h_0 of every row: [B, s, d_h] in the type of `e`, by `cfg.recurrence.state_init`.

    `positions` [1 or B, s] number the tokens that `e` [B, s, D] holds.
    """
    kind, width = cfg.recurrence.state_init, cfg.width_of("core")
    if kind == "input":
        return e
    if kind == "zero":
        return e.new_zeros(*e.shape[:2], width)
    bits = numbered(token_bits(key, cfg.recurrence.state_seed, positions), width)
    index = (bits >> (32 - _BITS)) & ((1 << _BITS) - 1)
    truncation = _TRUNCATION if kind == "like_init" else None
    state = _quantiles(truncation, e.device)[index]
    if kind == "like_init":
        state = state * state_std(cfg)
    elif kind == "embed":
        state = state / math.sqrt(width)
    elif kind == "unit":
        state = (state - state.mean(-1, keepdim=True)) / state.std(-1, keepdim=True)
    return state.to(e.dtype).expand(e.shape[0], -1, -1)


def embedding_std(cfg: ModelConfig) -> float:
    """Standard deviation of the token embedding at the start."""
    if cfg.embedding_std is not None:
        return cfg.embedding_std
    by_init = {"normal": 0.02, "uniform": 1.0}
    return by_init.get(cfg.init, math.sqrt(2 / (5 * cfg.width)))


def state_std(cfg: ModelConfig) -> float:
    """Standard deviation before the cut of like_init: that of the scaled embedding."""
    return embedding_std(cfg) * (math.sqrt(cfg.width) if cfg.scale_embeddings else 1.0)
