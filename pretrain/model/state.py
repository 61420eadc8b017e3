"""Initial recurrent states from a counter hash: the same numbers on every device and under every layout.

Each value is a function of (seed, step, row, position, channel) in 32-bit integer arithmetic, mapped to a normal or
truncated normal variate by a table of quantiles, so no device's generator or transcendental functions take part. In
evaluation step and row are 0: a state depends on the seed, the position and the channel only, never on neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig

_BITS = 16  # of the table index; 65,536 quantiles give a standard deviation exact to 1e-4
_TRUNCATION = 3.0  # of like_init, in standard deviations (Parcae's and Huginn's code)


@dataclass(frozen=True)
class StateKey:
    """What a training state is drawn from: run seed, step, and each row's position in the global batch [B]."""

    seed: int
    step: int
    rows: Tensor


def _mix(x: Tensor) -> Tensor:
    """A bijective mix of 32-bit counters ("lowbias32" by C. Wellons), in int64 tensors holding 32 bits."""
    mask = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def hash_bits(key: StateKey | None, seed: int, positions: Tensor, width: int) -> Tensor:
    """32 bits per value, int64: positions [B or 1, S] -> [B, S, width]. `key` None is evaluation, with `seed`."""
    device = positions.device
    if key is None:
        base = torch.zeros(1, dtype=torch.int64, device=device)
        seed_word, step = seed, 0
    else:
        base = key.rows.to(device=device, dtype=torch.int64) + 1
        seed_word, step = key.seed, key.step + 1
    # Python integers are mixed on the host with the same function, so seed and step cost no kernel.
    mixed_seed = _mix(torch.tensor((seed_word & 0xFFFFFFFF) ^ 0x9E3779B9, dtype=torch.int64))
    word = int(_mix((mixed_seed + step) & 0xFFFFFFFF))
    rows = _mix((base + word) & 0xFFFFFFFF)[:, None]
    places = _mix((rows + positions.to(torch.int64) + 1) & 0xFFFFFFFF)[..., None]
    channels = torch.arange(1, width + 1, device=device, dtype=torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    return _mix((places + channels) & 0xFFFFFFFF)


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
    bits = hash_bits(key, cfg.recurrence.state_seed, positions, width) >> (32 - _BITS)
    truncation = _TRUNCATION if kind == "like_init" else None
    state = _quantiles(truncation, e.device)[bits]
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
