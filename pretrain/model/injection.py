"""How the encoded input e enters a loop: u = linear part of h + drive(e).

The drive does not depend on the loop, so it is computed once per forward (4.2% of the core's matrix products at two
core layers). Parcae (arXiv 2604.12946, eq. 3) constrains the linear part of the diagonal injection to a contraction:

    a = exp(A_log), dt = softplus(dt_bias), Abar = exp(-dt a) in (0, 1)
    u = Abar h + Bbar e;   Bbar = dt B (euler)   or   (1 - exp(-dt a)) / a B (zoh, exact)

rho = max Abar < 1 bounds the linear surrogate only: for the whole non-linear map it is neither necessary nor
sufficient, so the norm of the state is worth watching too.

Shapes: B rows, s local sequence, D width of e, d_h width of the state.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.model.layers import Linear, RMSNorm, mark
from pretrain.model.ops import TensorOps

INITIAL_DT = 0.5 * math.log(5)  # with A_log = 0: Abar = sqrt(1/5)
SQUARINGS = 24
TINY = 1e-300


class Drive(NamedTuple):
    """The loop-invariant part of an injection."""

    drive: Tensor
    """[B, s, d_h]"""
    decay: Tensor | None
    """Abar, fp32 [d_h]; None where the injection has no diagonal part."""


class DiagonalDrive(nn.Module):
    """e -> (Bbar e, Abar), with A_log and dt_bias in fp32 whatever the stream's type."""

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        width = cfg.width_of("core")
        self.zoh = cfg.recurrence.discretization == "zoh"
        self.A_log = mark(nn.Parameter(torch.zeros(width)), ops)
        self.dt_bias = mark(nn.Parameter(torch.full((width,), math.log(math.expm1(INITIAL_DT)))), ops)
        self.B = Linear(cfg.width, width, ops)

    def step_sizes(self) -> tuple[Tensor, Tensor]:
        """(Abar, factor of B), both [d_h] in the parameters' type."""
        a, dt = self.A_log.exp(), F.softplus(self.dt_bias)
        # expm1 keeps the exact factor accurate where dt a is small.
        return torch.exp(-dt * a), -torch.expm1(-dt * a) / a if self.zoh else dt

    def forward(self, e: Tensor) -> Drive:
        decay, scale = self.step_sizes()
        return Drive((scale * self.B(e)).to(e.dtype), decay)


class LinearDrive(nn.Module):
    """e -> W_e e: the input's half of W [h; e] (RDM)."""

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        self.weight = Linear(cfg.width, cfg.width_of("core"), ops).weight

    def forward(self, e: Tensor) -> Drive:
        return Drive(F.linear(e, self.weight.to(e.dtype)), None)


class IdentityDrive(nn.Module):
    """e -> e, for injections without parameters."""

    def forward(self, e: Tensor) -> Drive:
        return Drive(e, None)


class Injection(nn.Module):
    """u = inject(h, drive), and the norm between loops that a family may put before it.

    forward(h [B, s, d_h], drive, first) -> (u, h) with h normalised if `interloop_norm` (rows in their first loop are
    left as they are); the returned h is what feedback into the layers sees.
    """

    # None where the kind of injection has no use for it.
    input: Any
    state: Any
    norm: Any

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        width = cfg.width_of("core")
        self.kind = cfg.recurrence.injection
        drives = {"diagonal": DiagonalDrive, "concat": LinearDrive}
        self.input = drives[self.kind](cfg, ops) if self.kind in drives else IdentityDrive()
        self.state = Linear(width, width, ops) if self.kind == "concat" else None
        self.norm = RMSNorm(width, cfg, ops) if self.kind == "input" else None
        self.interloop_norm = RMSNorm(width, cfg, ops) if cfg.recurrence.interloop_norm else None

    def forward(self, h: Tensor, inputs: Drive, first: Tensor | None) -> tuple[Tensor, Tensor]:
        drive, decay = inputs
        if self.interloop_norm is not None:
            assert first is not None
            h = torch.where(first, h, self.interloop_norm(h))
        if self.kind == "diagonal":
            assert decay is not None
            # fp32 for the recurrence itself: Abar is fp32 and promotes the product.
            u = (decay * h + drive).to(h.dtype)
        elif self.kind == "concat":
            u = self.state(h) + drive
        elif self.kind == "add":
            u = h + drive
        elif self.kind == "input":
            u = self.norm(h + drive)
        elif self.kind == "restart":
            u = drive
        else:
            u = h
        return u, h

    @torch.no_grad()
    def spectral_radius(self) -> float | None:
        """rho of the linear part h -> u: max Abar, max |eig(W_h)|, 1 for add and none, None where h does not enter."""
        if self.kind == "diagonal":
            return float(self.input.step_sizes()[0].max())
        if self.kind == "concat":
            return largest_eigenvalue(self.state.weight)
        return {"add": 1.0, "none": 1.0}.get(self.kind)


def largest_eigenvalue(matrix: Tensor) -> float:
    """max |eigenvalue| of a square matrix by Gelfand's formula, ||W^n||^(1/n) at n = 2^24, in fp64; NaN if W has any.

    The relative error is at most log(sqrt(d) cond(V)) / n, V the eigenvectors. 24 products on the matrix's device:
    LAPACK takes more than ten times as long for all eigenvalues, on the CPU, while training would wait.
    """
    power, log_scale = matrix.double(), matrix.new_zeros((), dtype=torch.float64)
    for _ in range(SQUARINGS):
        norm = power.norm().clamp(min=TINY)
        power, log_scale = (power / norm) @ (power / norm), 2 * (log_scale + norm.log())
    return float(((log_scale + power.norm().clamp(min=TINY).log()) / 2**SQUARINGS).exp())
