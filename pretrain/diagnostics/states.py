"""Norms of recurrent states, and how much a loop changes them. All in fp64.

Shapes: h [..., d], one state per token; results are per token [...] or summaries over all tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-30
QUANTILES = (0.5, 0.9, 0.99, 0.999)


class NormStats(NamedTuple):
    """Of ||h||_2 over tokens; `rms` is the root mean square of the entries."""

    mean: float
    rms: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Update(NamedTuple):
    """From a state h to the next one h', per token [...]."""

    angle: Tensor
    """Angle between h and h' in radians."""
    step_norm: Tensor
    """||h' - h||"""
    relative_residual: Tensor
    """||h' - h|| / ||h||"""
    radial_velocity: Tensor
    """<u, h' - h> with u = h / ||h||: how fast the radius grows, to first order."""


def norm_stats(h: Tensor) -> NormStats:
    """Norms of states [..., d]."""
    return summarise_norms(h.double().norm(dim=-1), h.shape[-1])


def summarise_norms(norms: Tensor, width: int) -> NormStats:
    """The same from the norms [...] of states of `width` channels."""
    ordered = norms.double().flatten().sort().values
    # torch.quantile refuses more than 2^24 values; this is its linear interpolation.
    places = torch.tensor(QUANTILES, dtype=torch.float64, device=norms.device) * (len(ordered) - 1)
    low, high = ordered[places.floor().long()], ordered[places.ceil().long()]
    p50, p90, p99, p999 = (low + (high - low) * places.frac()).tolist()
    rms = float((ordered.square().mean() / width).sqrt())
    return NormStats(float(ordered.mean()), rms, p50, p90, p99, p999, max=float(ordered[-1]))


def angle_between(a: Tensor, b: Tensor) -> Tensor:
    """Angle in radians between vectors [..., d]; accurate for small angles too (Kahan's formula)."""
    a, b = unit(a), unit(b)
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


def update(h: Tensor, following: Tensor) -> Update:
    """How one loop changes the states h [..., d]."""
    h, following = h.double(), following.double()
    step = following - h
    length = step.norm(dim=-1)
    return Update(
        angle=angle_between(h, following),
        step_norm=length,
        relative_residual=length / h.norm(dim=-1).clamp(min=TINY),
        radial_velocity=(unit(h) * step).sum(-1),
    )


def unit(h: Tensor) -> Tensor:
    """h / ||h|| in fp64; 0 where h is 0."""
    h = h.double()
    return h / h.norm(dim=-1, keepdim=True).clamp(min=TINY)


def variance_share(h: Tensor, basis: Tensor | None) -> float:
    """Share of the states' variance over loops that lies in a subspace: h [T, N, d], orthonormal basis [d, k].

    `basis` None is the radial direction: that of each token's mean over the loops.
    """
    mean = h.double().mean(0)
    deviation = h.double() - mean
    inside = (deviation * unit(mean)).sum(-1) if basis is None else deviation @ basis.double()
    total = float(deviation.square().sum())
    return float(inside.square().sum()) / total if total else 0.0
