"""torch.compile of the core's step, with the loop outside.

The number of active rows differs from loop to loop and from step to step, so no graph may depend on it: axis 0 of every
tensor of rows is marked unbacked, a size that tracing cannot look at (`mark_dynamic` makes special cases of 0 and 1).
What else graphs are guarded on is made the same in every call: strides, and which inputs require a gradient. So there
is one graph with gradient and one without, whatever the loop counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

if TYPE_CHECKING:
    from pretrain.model.looped import LoopInputs

_ROW_TABLES = ("cos", "sin", "full_mask", "window_mask")

Maybe = TypeVar("Maybe", Tensor, Tensor | None)


class CompiledStep:
    """`LoopedLM.core_step` without a cache, compiled. Its result equals the eager one up to rounding.

    A graph break and the limit of recompilations are errors: nothing falls back to eager.
    """

    def __init__(self, step: Callable[..., Tensor], **options: Any) -> None:
        """`options` are torch.compile's."""
        self._step = torch.compile(step, fullgraph=True, **options)

    def __call__(self, h: Tensor, inputs: LoopInputs, first: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and not h.requires_grad:
            # The first gradient loop: a gradient that nobody reads instead of a second graph.
            h = h.detach().requires_grad_()
        ctx, count = inputs.ctx, h.shape[0]
        tables = {name: getattr(ctx, name) for name in _ROW_TABLES} if ctx.per_row else {}
        tables = {name: _rows(x) if x is not None and x.shape[0] == count else x for name, x in tables.items()}
        if ctx.boundaries is not None:
            mark_unbacked(ctx.boundaries, 0)
        uniform = inputs._replace(
            drive=inputs.drive._replace(drive=_rows(inputs.drive.drive), decay=_as_used(inputs.drive.decay)),
            # row_ends are host integers that the layers do not read; each would be a guard.
            ctx=ctx._replace(row_ends=(), noise=_rows(ctx.noise), **tables),
            values=tuple(_rows(value) for value in inputs.values),
        )
        return self._step(_rows(h), uniform, _rows(first))


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
