"""What a training forward takes: rows of tokens, and which of them run in which loop.

Shapes: B rows, S sequence, s local share of it, d_h core width, T loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pretrain.model.attention_mask import Segments

if TYPE_CHECKING:
    from pretrain.sampling.plan import LoopPlan, LoopStep
    from pretrain.sampling.sampler import Depths


class MicroBatch(NamedTuple):
    """Rows of one forward, in descending order of loop counts."""

    tokens: Tensor
    """int64 [B, S]"""
    labels: Tensor
    """int64 [B, S], next tokens; below 0 where no loss counts."""
    rows: Tensor
    """int64 [B]: each row's position in the global batch."""
    document_ids: Tensor | None = None
    """int64 [B, S] where attention keeps within documents."""
    positions: Tensor | None = None
    """int64 [B, S]: positions within documents."""
    segments: Segments | None = None
    """Host-side form of document_ids."""
    initial_state: Tensor | None = None
    """h_0 [B, s, d_h] in place of a drawn one."""


class TokenLoops(NamedTuple):
    """Loop counts of tokens, int64; a row runs to its deepest token.

    In either phase a token has its updates in the row's first loops of that phase, and then keeps its state, from which
    it still serves keys and values (per-token depths of Parcae's code, arXiv 2604.12946). In loops without gradient,
    tokens that have none wait with h_0.
    """

    no_grad: Tensor
    """n of each token [B, s]."""
    grad: Tensor
    """k of each token [B, s]."""
    no_grad_start: Tensor
    """Loop of the phase in which the row joins [B, 1]."""
    grad_start: Tensor
    """[B, 1]"""

    def local(self, positions: slice) -> TokenLoops:
        """Of a share of the positions."""
        return self._replace(no_grad=self.no_grad[:, positions], grad=self.grad[:, positions])

    def updates_before(self, loop: int, grad: bool, rows: int) -> Tensor:
        """Updates that the tokens of the first `rows` rows have had before a loop of either phase: [rows, s]."""
        own, start = (self.grad, self.grad_start) if grad else (self.no_grad, self.no_grad_start)
        updates = torch.minimum((loop - start[:rows]).clamp(min=0), own[:rows])
        return self.no_grad[:rows] + updates if grad else updates

    def waiting(self, loop: int, grad: bool, rows: int) -> Tensor:
        """Which tokens of the first `rows` rows keep their state in a loop of either phase: bool [rows, s]."""
        own, start = (self.grad, self.grad_start) if grad else (self.no_grad, self.no_grad_start)
        index = loop - start[:rows]
        return (index < 0) | (index >= own[:rows])


class Loops(NamedTuple):
    """Which rows pass through the core in each loop: prefixes of the rows, never shrinking."""

    no_grad: tuple[LoopStep, ...]
    grad: tuple[LoopStep, ...]
    grad_loops: tuple[int, ...]
    """Gradient loops of each row [B]."""
    tokens: TokenLoops | None = None
    """Where loop counts belong to tokens."""

    @staticmethod
    def of(plan: LoopPlan, depths: Depths, device: torch.device | str = "cpu") -> Loops:
        """The loops of rows put in the order of `plan`; `depths`, per row [B] or token [B, S], are still in the old."""
        no_grad, grad = depths.no_grad_loops[plan.order], depths.grad_loops[plan.order]
        if grad.ndim == 1:
            return Loops(plan.no_grad, plan.grad, tuple(grad.tolist()))
        n, k = torch.from_numpy(no_grad).to(device), torch.from_numpy(grad).to(device)
        starts = (len(steps) - own.amax(1, keepdim=True) for steps, own in ((plan.no_grad, n), (plan.grad, k)))
        return Loops(plan.no_grad, plan.grad, tuple(grad.max(1).tolist()), TokenLoops(n, k, *starts))

    def number(self, loop: int, grad: bool) -> int:
        """Of loop `loop` of a phase, by the loops that are left: the same for a row among whatever others it runs."""
        return 2 * (len(self.grad if grad else self.no_grad) - loop) + grad

    def local(self, positions: slice) -> Loops:
        """The same with the per-token counts of a share of the positions."""
        return self if self.tokens is None else self._replace(tokens=self.tokens.local(positions))
