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


class Loops(NamedTuple):
    """Which rows pass through the core in each loop: prefixes of the rows, never shrinking."""

    no_grad: tuple[LoopStep, ...]
    grad: tuple[LoopStep, ...]
    grad_loops: tuple[int, ...]
    """Gradient loops of each row [B]."""
    token_no_grad: Tensor | None = None
    """Per-token loop counts int64 [B, S] (n and k of each token); rows then run to their deepest token."""
    token_grad: Tensor | None = None

    @staticmethod
    def of(plan: LoopPlan, depths: Depths, device: torch.device | str = "cpu") -> Loops:
        """The loops of rows put in the order of `plan`; `depths`, per row [B] or token [B, S], are still in the old."""
        no_grad, grad = depths.no_grad_loops[plan.order], depths.grad_loops[plan.order]
        if grad.ndim == 1:
            return Loops(plan.no_grad, plan.grad, tuple(grad.tolist()))
        tokens = torch.from_numpy(no_grad).to(device), torch.from_numpy(grad).to(device)
        return Loops(plan.no_grad, plan.grad, tuple(grad.max(1).tolist()), *tokens)

    def number(self, loop: int, grad: bool) -> int:
        """Of loop `loop` of a phase, by the loops that are left: the same for a row among whatever others it runs."""
        return 2 * (len(self.grad if grad else self.no_grad) - loop) + grad

    def local(self, positions: slice) -> Loops:
        """The same with the per-token counts of a share of the positions."""
        if self.token_no_grad is None or self.token_grad is None:
            return self
        return self._replace(token_no_grad=self.token_no_grad[:, positions], token_grad=self.token_grad[:, positions])
