"""Micro-batches in order of depth, and the exact schedule of the rows of one micro-batch.

Rows join late so that all finish together. n and k are both monotone in T, so with the rows in
descending order of depth the rows that need a loop are a prefix, in both phases, and nothing else
has to be computed. A row that has not joined keeps its initial state, so its result is that of the
row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.sampling.sampler import GRAD_LOOP_COST, Depths


class LoopStep(NamedTuple):
    """One pass through the core. Rows are counted in the plan's order, deepest first."""

    first: int
    """Rows [first, active) are in their first loop: their state before it is h_0."""
    active: int
    """Rows [0, active) receive an update."""
    computed: int
    """Rows [0, computed) pass through the core; what it gives for rows [active, computed) is
    discarded and they keep their state. At least 1: in a lockstep step with active = 0 the first
    row passes with weight zero, so that the rank takes part in that core call's collectives."""


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """Which rows of one micro-batch pass through the core in each loop: `no_grad`, then `grad`."""

    order: NDArray[np.int64]
    """[rows] local row at each place of the plan: descending depth, ties in the given order."""
    no_grad: tuple[LoopStep, ...]
    grad: tuple[LoopStep, ...]

    @classmethod
    def from_depths(
        cls,
        depths: Depths,
        *,
        bucket: int = 1,
        min_no_grad_loops: int = 0,
        min_grad_loops: int = 0,
    ) -> LoopPlan:
        """The plan in which each row receives exactly its n + k updates.

        `bucket` rounds the computed rows of a step up to a multiple (at most all rows), for kernels
        that want few shapes; 1 computes nothing that is not needed. Measured for Poisson depths of
        mean 8 and 32 rows: waste 1.03 with bucket 2, 1.11 with 4. A bucket of at most 1/16 of the
        rows keeps it under 1.05.

        `min_no_grad_loops` and `min_grad_loops` come from `lockstep_loops`, where all ranks must
        make the same core calls (ZeRO-3). The steps that this rank lacks come first in their phase,
        with active = 0.

        ValueError if there are no rows, or n and k are not those of a common mu_b: both must
        descend together, and a row with n > 0 must have a part in every gradient step.
        """
        if len(depths) == 0:
            raise ValueError("a micro-batch of 0 rows: expected at least 1")
        order = _descending(depths)
        no_grad, grad = depths.no_grad_loops[order], depths.grad_loops[order]
        num_grad_loops = max(int(grad.max()), min_grad_loops)
        if (np.diff(no_grad) > 0).any() or (grad[no_grad > 0] != num_grad_loops).any():
            raise ValueError(
                f"no_grad_loops={no_grad.tolist()}, grad_loops={grad.tolist()}: expected rows of "
                f"one backprop_loops, so that those with no-grad loops have {num_grad_loops} "
                "gradient loops each"
            )
        num_no_grad_loops = max(int(no_grad[0]), min_no_grad_loops)
        return cls(
            order,
            _phase(no_grad, num_no_grad_loops, bucket, joined=0),
            _phase(grad, num_grad_loops, bucket, joined=int(np.count_nonzero(no_grad))),
        )

    @property
    def inverse(self) -> NDArray[np.int64]:
        """[rows] place of each local row in the plan: `planned[inverse]` is in the given order."""
        return np.argsort(self.order)

    @property
    def needed_row_passes(self) -> int:
        """Row updates asked for: the sum of n + k over rows."""
        return sum(step.active for step in self.no_grad + self.grad)

    @property
    def executed_row_passes(self) -> int:
        """Rows sent through the core: the needed ones, and what buckets and lockstep add."""
        return sum(step.computed for step in self.no_grad + self.grad)

    @property
    def core_cost(self) -> int:
        """Executed row passes, those with gradient counted three times."""
        grad = sum(step.computed for step in self.grad)
        return self.executed_row_passes + (GRAD_LOOP_COST - 1) * grad

    @property
    def waste(self) -> float:
        """Executed / needed row passes, at least 1."""
        return self.executed_row_passes / self.needed_row_passes


def form_micro_batches(depths: Depths, micro_batch_size: int) -> list[NDArray[np.int64]]:
    """Local rows of each micro-batch, deepest first, ties in the given order.

    Rows of similar depth share a micro-batch, which keeps its steps full and its core calls few.
    The last micro-batch is smaller where `micro_batch_size` does not divide the rows.
    """
    order = _descending(depths)
    starts = range(0, len(order), micro_batch_size)
    return [order[start : start + micro_batch_size] for start in starts]


def lockstep_loops(
    depths: Depths, positions_of_ranks: Sequence[NDArray[np.int64]], micro_batch_size: int
) -> list[tuple[int, int]]:
    """(n, k) of each micro-batch, the largest over all ranks: how far each runs it under ZeRO-3.

    `depths` is the draw of the global batch, `positions_of_ranks` the positions that each rank
    holds. Every rank knows both, so all compute the same without communication. Only the partition
    into shares matters, not which rank holds which share: with mosaicml-streaming the shares are
    the classes p mod R. ValueError if the ranks form different numbers of micro-batches.
    """
    deepest = []  # per rank: the first row of each micro-batch, which has its largest n and k
    for positions in positions_of_ranks:
        share = depths.rows(positions)
        first_rows = [rows[0] for rows in form_micro_batches(share, micro_batch_size)]
        deepest.append(share.rows(first_rows))
    counts = [len(rows) for rows in deepest]
    if len(set(counts)) != 1:
        raise ValueError(f"micro-batches by rank: {counts}: expected the same number on every rank")
    no_grad = np.max([rows.no_grad_loops for rows in deepest], axis=0)
    grad = np.max([rows.grad_loops for rows in deepest], axis=0)
    return list(zip(no_grad.tolist(), grad.tolist(), strict=True))


def straggler_loss(depths: Depths, positions_of_ranks: Sequence[NDArray[np.int64]]) -> float:
    """1 - mean / max of the ranks' core cost: the share of time spent waiting for the slowest."""
    cost = depths.core_cost
    of_ranks = [cost[positions].sum() for positions in positions_of_ranks]
    return float(1 - np.mean(of_ranks) / np.max(of_ranks))


def _descending(depths: Depths) -> NDArray[np.int64]:
    """Rows by descending T, ties in the given order."""
    return np.argsort(-depths.num_loops, kind="stable")


def _phase(loops: NDArray[np.int64], num_steps: int, bucket: int, joined: int) -> tuple[LoopStep, ...]:
    """Steps of one phase for rows that need `loops` (descending) and end it together.

    Rows [0, joined) have had a loop before this phase.
    """
    steps = []
    for remaining in range(num_steps, 0, -1):
        active = int(np.count_nonzero(loops >= remaining))
        computed = min(len(loops), max(1, -(-active // bucket) * bucket))
        steps.append(LoopStep(joined, active, computed))
        joined = active
    return tuple(steps)
