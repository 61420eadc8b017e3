"""Measurements of a whole model on rows of tokens, each from one pass over them.

Shapes: B rows, S sequence, N tokens of all rows together, d_h state width, T loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.diagnostics.gradients import Radial, Supervision, radial, readout_gradient, supervision
from pretrain.diagnostics.linear import expansion
from pretrain.diagnostics.states import NormStats, summarise_norms, update, variance_share
from pretrain.model.looped import Edit, LoopedLM

Rows = tuple[Tensor, Tensor]
"""tokens and labels, int64 [B, S] each."""


class Trace(NamedTuple):
    """Per token, for each loop; in fp64 on the CPU."""

    loss: Tensor
    """[T, N] cross entropy of a run that ends with loop t, in nats."""
    norm: Tensor
    """[T, N] ||h_t||"""
    angle: Tensor
    """[T-1, N] between h_t and h_{t+1}, radians; as the next three."""
    step_norm: Tensor
    relative_residual: Tensor
    radial_velocity: Tensor

    def norms(self, width: int) -> list[NormStats]:
        """Summaries by loop."""
        return [summarise_norms(norms, width) for norms in self.norm]


@torch.no_grad()
def trace_loops(model: LoopedLM, batches: Iterable[Rows], num_loops: int, edit: Edit | None = None) -> Trace:
    """Losses, norms and updates of `num_loops` loops from one pass of the core over all batches.

    Labels must all count (>= 0). Losses at t are exactly those of a separate evaluation with t loops.
    """
    columns: list[Tensor] = []
    for tokens, labels in batches:
        values = model.look_up_values("coda", tokens)
        previous, rows = None, []
        for h, ctx in model.states(tokens, num_loops, edit=edit):
            changes = [torch.zeros_like(h[..., 0], dtype=torch.float64)] * 4
            if previous is not None:
                changes = list(update(previous, h))
            loss = model.readout_losses(h, ctx, values, labels)
            rows.append(torch.stack([x.double().flatten() for x in (loss, h.double().norm(dim=-1), *changes)]))
            previous = h
        columns.append(torch.stack(rows, 1).cpu())
    loss, norm, *changes = torch.cat(columns, -1)
    return Trace(loss, norm, *(x[1:] for x in changes))


class LoopGradient(NamedTuple):
    """What one loop's own readout supervises."""

    radial: Radial
    supervision: Supervision
    expansion: float
    """||C h|| / ||h||"""


def readout_gradients(model: LoopedLM, rows: Rows, num_loops: int, basis: Tensor) -> list[LoopGradient]:
    """By loop, the gradient of its own cross entropy through its own readout; `basis` [d_h, k]: a subspace to look at.

    As the training reads out a run of `num_loops` loops: `final_norm` normalises at the last one only. Give the model
    in fp64: for a normalised readout the radial part is below fp32's rounding.
    """
    results = []
    for t, (h, ctx) in enumerate(model.states(rows[0], num_loops), start=1):
        _, gradient = readout_gradient(model, h, ctx, *rows, last=t == num_loops)
        shares = supervision(gradient, h, basis)
        results.append(LoopGradient(radial(gradient, h), shares, expansion(model, h)))
    return results


@torch.no_grad()
def scale_sensitivity(
    model: LoopedLM, batches: Iterable[Rows], num_loops: int, factors: Sequence[float]
) -> list[float]:
    """Mean cross entropy where the state that is read out after `num_loops` loops is multiplied by each factor."""
    sums, count = [0.0] * len(factors), 0
    for tokens, labels in batches:
        values = model.look_up_values("coda", tokens)
        *_, (h, ctx) = model.states(tokens, num_loops)
        for i, factor in enumerate(factors):
            sums[i] += float(model.readout_losses(h * factor, ctx, values, labels).sum(dtype=torch.float64))
        count += labels.numel()
    return [total / count for total in sums]


@torch.no_grad()
def logit_change(model: LoopedLM, tokens: Tensor, num_loops: int, edit: Edit) -> float:
    """Norm of an edit's change of the logits, relative to the logits; both centred, as a softmax ignores a constant."""
    plain, edited = (model.logits(tokens, num_loops, edit=e).double() for e in (None, edit))
    plain, edited = (x - x.mean(-1, keepdim=True) for x in (plain, edited))
    return float((edited - plain).norm() / plain.norm())


@torch.no_grad()
def variance_shares(model: LoopedLM, tokens: Tensor, num_loops: int, bases: Sequence[Tensor | None]) -> list[float]:
    """Share of the states' variance over the loops within each subspace [d_h, k]; None: the radial direction."""
    states = torch.stack([h.flatten(0, 1).double() for h, _ in model.states(tokens, num_loops)])
    return [variance_share(states, basis) for basis in bases]
