"""The linear maps around the loop: how strongly the injection contracts, drives and projects the state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretrain.diagnostics.states import TINY
from pretrain.model.looped import LoopedLM


class LinearParts(NamedTuple):
    """Spectral quantities of the injection; None where the family has no such part."""

    spectral_radius: float | None
    """rho of the linear part h -> u. Below 1 it bounds the linear surrogate only."""
    drive_norm: float | None
    """Spectral norm of Bbar (diagonal) or of W_e (concat)."""
    projection_norm: float | None
    """Spectral norm of C."""


@torch.no_grad()
def linear_parts(model: LoopedLM) -> LinearParts:
    """Of a whole model's injection and output projection."""
    drive = None
    if model.injection.kind == "diagonal":
        _, scale = model.injection.input.step_sizes()
        drive = _norm(scale.double()[:, None] * model.injection.input.B.weight.double())
    elif model.injection.kind == "concat":
        drive = _norm(model.injection.input.weight.double())
    projection = model.output_projection
    c = None if isinstance(projection, nn.Identity) else _norm(projection.weight.double())
    return LinearParts(model.injection.spectral_radius(), drive, c)


@torch.no_grad()
def expansion(model: LoopedLM, h: Tensor) -> float:
    """Mean over tokens of ||C h|| / ||h||; 1 without an output projection."""
    projected = model.output_projection(h).double().norm(dim=-1)
    return float((projected / h.double().norm(dim=-1).clamp(min=TINY)).mean())


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
