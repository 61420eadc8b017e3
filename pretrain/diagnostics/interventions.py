"""Edits of the state after each loop, for evaluation: LoopedLM.states(edit=...) and loop_losses(edit=...).

An edit takes (t, before, after): the loop's number from 1, the state [B, s, d] that it started from and the one that it
left, and returns what takes the latter's place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.diagnostics.states import TINY


class Clamp:
    """Each token's state keeps its magnitude of loop 1: the direction goes on, the scale does not."""

    def __init__(self) -> None:
        self.norm: Tensor | None = None

    def __call__(self, t: int, before: Tensor, after: Tensor) -> Tensor:
        norm = after.norm(dim=-1, keepdim=True)
        if t == 1 or self.norm is None:
            self.norm = norm
            return after
        return after * (self.norm / norm.clamp(min=TINY))


class RemoveRadial:
    """From loop 2 on, an update loses its part along the state: h + (I - u u^T) (h' - h)."""

    def __call__(self, t: int, before: Tensor, after: Tensor) -> Tensor:
        if t == 1:
            return after
        u = before / before.norm(dim=-1, keepdim=True).clamp(min=TINY)
        step = after - before
        return before + step - (step * u).sum(-1, keepdim=True) * u


class ZeroSubspace:
    """Nothing of the state in the span of an orthonormal basis [d, k]."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis

    def __call__(self, t: int, before: Tensor, after: Tensor) -> Tensor:
        basis = self.basis.to(after.dtype)
        return after - (after @ basis) @ basis.T


class Noise:
    """Noise of relative size `eps` = ||noise|| / ||h|| for each token, within the span of a basis [d, k].

    `basis` None takes the radial direction: h (1 +- eps) with random signs. The draws are those of `seed`.
    """

    def __init__(self, basis: Tensor | None, eps: float, seed: int = 0) -> None:
        self.basis, self.eps, self.generator = basis, eps, torch.Generator().manual_seed(seed)

    def __call__(self, t: int, before: Tensor, after: Tensor) -> Tensor:
        width = 1 if self.basis is None else self.basis.shape[1]
        draw = torch.randn(*after.shape[:-1], width, generator=self.generator).to(after)
        direction = draw / draw.norm(dim=-1, keepdim=True).clamp(min=TINY)
        if self.basis is None:
            return after * (1 + self.eps * direction)
        return after + self.eps * after.norm(dim=-1, keepdim=True) * (direction @ self.basis.to(after.dtype).T)
