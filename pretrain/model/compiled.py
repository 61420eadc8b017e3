"""torch.compile of the core's step, with the loop outside.

The number of active rows differs from loop to loop and from step to step, so no graph may depend on it: axis 0 of every
tensor of rows is marked unbacked, a size that tracing cannot look at (`mark_dynamic` makes special cases of 0 and 1).
Training has rows of one length, the context's, and its graphs know it. Evaluation has others: one graph is for all that
are shorter, one for all that are longer, and one for single tokens, which `mark_dynamic` cannot do without. Tracing may
look at such a length, so nothing in the step may decide by it: a decision would be a graph of its own.

What else graphs are guarded on is made the same in every call: strides, which inputs require a gradient, and which
tables have a row for each sequence. So there is one graph with gradient and one without for each class of lengths,
whatever the loop counts, of rows or of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_dynamic, mark_unbacked

if TYPE_CHECKING:
    from pretrain.model.looped import LoopedLM, LoopInputs

_SEQUENCE_AXES = {"cos": (1,), "sin": (1,), "full_mask": (2, 3), "window_mask": (2, 3)}

_MOST = 2**31 - 1
"""Of tokens in a row: `mark_dynamic` takes both bounds or none."""

Maybe = TypeVar("Maybe", Tensor, Tensor | None)


class CompiledStep:
    """`LoopedLM.core_step` without a cache, compiled. Its result equals the eager one up to rounding.

    A graph break and the limit of recompilations are errors: nothing falls back to eager.
    """

    def __init__(self, model: LoopedLM, **options: Any) -> None:
        """`options` are torch.compile's."""
        self._context_length = model.cfg.context_length
        # Without `dynamic` a second length would take the length out of the training's next graph too.
        self._step = torch.compile(model.core_step, fullgraph=True, dynamic=False, **options)

    def __call__(self, h: Tensor, inputs: LoopInputs, first: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and not h.requires_grad:
            # The first gradient loop: a gradient that nobody reads instead of a second graph.
            h = h.detach().requires_grad_()
        ctx, (count, length) = inputs.ctx, h.shape[:2]
        tables = {}
        for name, axes in _SEQUENCE_AXES.items():
            x = getattr(ctx, name)
            if ctx.per_row and x is not None:
                x = _rows(x.expand(count, *x.shape[1:]))
            tables[name] = self._any_length(x, axes)
        if ctx.boundaries is not None:
            mark_unbacked(ctx.boundaries, 0)
        first = first if first is None else first.expand(-1, length, -1)
        uniform = inputs._replace(
            drive=inputs.drive._replace(
                drive=self._states(inputs.drive.drive), decay=_as_used(inputs.drive.decay)
            ),
            # row_ends are host integers that the layers do not read; each would be a guard.
            ctx=ctx._replace(row_ends=(), noise=self._states(ctx.noise), **tables),
            values=tuple(self._states(value) for value in inputs.values),
        )
        return self._step(self._states(h), uniform, self._states(first))

    def _states(self, x: Maybe) -> Maybe:
        """x [b, s, ...] as the graphs take it."""
        return self._any_length(_rows(x), (1,))

    def _any_length(self, x: Maybe, axes: tuple[int, ...]) -> Maybe:
        """x with the length of its sequence hidden from tracing, unless it is the context's."""
        if x is None or (length := x.shape[axes[0]]) in (1, self._context_length):
            return x
        # The bounds keep training's rows out of these graphs: dynamo tries first what it used last.
        context = self._context_length
        low, high = (2, context - 1) if length < context else (context + 1, _MOST)
        if low < high:
            for axis in axes:
                mark_dynamic(x, axis, min=low, max=high)
        return x


def _as_used(x: Maybe) -> Maybe:
    """x without the mark of a gradient where none is recorded."""
    return x if x is None or torch.is_grad_enabled() else x.detach()


def _rows(x: Maybe) -> Maybe:
    """x [b, ...] contiguous, with its number of rows hidden from tracing."""
    if x is None:
        return x
    x = _as_used(x).contiguous()
    mark_unbacked(x, 0, shape_id="rows")
    return x
