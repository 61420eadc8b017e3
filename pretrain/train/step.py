"""One optimizer step of a rank: its rows, cut into micro-batches by depth, forward and backward, one update.

Shapes: N rows of the global batch, R rows of this rank, B rows of a micro-batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pretrain.accounting import StepWork
from pretrain.config.schema import Config
from pretrain.data.loader import RankBatch, TrainLoader
from pretrain.model.looped import Loops, MicroBatch
from pretrain.model.loss import Totals
from pretrain.model.state import StateKey
from pretrain.parallel.megatron import Layout
from pretrain.parallel.schedule import Hyperparameters, hyperparameters
from pretrain.parallel.zero import ZeroEngine
from pretrain.sampling import Depths, DepthSampler, LoopPlan, form_micro_batches, lockstep_loops
from pretrain.train.inputs import Inputs

TERMS = ("loss", "cross_entropy", "z_loss", "norm_penalty", "scale_anchor")


@dataclass(frozen=True)
class Work:
    """One micro-batch and how it runs."""

    batch: MicroBatch
    loops: Loops
    plan: LoopPlan


@dataclass(frozen=True)
class StepReport:
    """What a step did, the same on all ranks."""

    step: int
    """Steps done, this one included."""
    terms: dict[str, float]
    """Terms of the loss over the global batch; `loss` is their weighted sum. Empty if the batch was not trained on."""
    grad_norm: float | None
    skipped: bool
    """A loss or gradient was not finite: no update."""
    hyperparameters: Hyperparameters
    work: StepWork
    """Loops of all rows, for the accounting."""
    num_loops_mean: float
    no_grad_loops_mean: float
    grad_loops_mean: float
    executed_row_passes: float
    """Rows sent through the core, over all ranks."""
    needed_row_passes: float
    stop_votes: int
    """Ranks that asked to stop after this step."""


class StepRunner:
    """Runs optimizer steps on the data-parallel layouts (pipeline = 1)."""

    def __init__(
        self,
        cfg: Config,
        engine: ZeroEngine,
        layout: Layout,
        sampler: DepthSampler,
        loader: TrainLoader,
    ) -> None:
        self.cfg, self.engine, self.layout, self.sampler = cfg, engine, layout, sampler
        self.rank_positions, self.bos_id = list(loader.all_positions), loader.bos_id

    def run(self, step: int, rank_batch: RankBatch, *, train: bool, stop_vote: bool) -> StepReport:
        """Step `step` (0-based: the optimizer steps done before) on this rank's rows. Collective over all ranks.

        `train` False reads the rows and leaves the weights alone. `stop_vote` is summed over ranks, in the same
        collective as the loss.
        """
        values = hyperparameters(self.cfg.optimizer, self.cfg.schedule, step, self.cfg.total_steps)
        depths, row_depths = self._depths(step)
        work = self._work(rank_batch, depths, row_depths) if train else []
        totals = Totals(self._global_tokens(rank_batch), self.cfg.train.global_batch_size)
        sums = torch.zeros(len(TERMS) + 3, device=self.layout.device, dtype=torch.float64)
        sums[-1] = float(stop_vote)
        for item in work:
            key = StateKey(self.cfg.train.seed, step, item.batch.rows)
            output = self.engine("training_loss", item.batch, item.loops, key, self.cfg.loss, totals)
            self.engine.backward(output.loss)
            for i, term in enumerate(TERMS):
                sums[i] += output.metrics.get(term, 0.0)
            sums[-3] += item.plan.executed_row_passes
            sums[-2] += item.plan.needed_row_passes
        result = self.engine.step(values) if train else None
        reduced = self._reduce(sums)
        counted = row_depths if train else row_depths.rows([])
        return StepReport(
            step=step + 1,
            terms=dict(zip(TERMS, reduced, strict=False)) if train else {},
            grad_norm=None if result is None else result.grad_norm,
            skipped=result is not None and result.skipped,
            hyperparameters=values,
            work=StepWork.of(counted.no_grad_loops, counted.grad_loops, self.cfg.loss.objective),
            num_loops_mean=float(row_depths.num_loops.mean()),
            no_grad_loops_mean=float(row_depths.no_grad_loops.mean()),
            grad_loops_mean=float(row_depths.grad_loops.mean()),
            executed_row_passes=reduced[-3],
            needed_row_passes=reduced[-2],
            stop_votes=round(reduced[-1]),
        )

    def _reduce(self, sums: Tensor) -> list[float]:
        """Sums over data-parallel ranks; tensor-parallel ranks hold the same values."""
        dist.all_reduce(sums, group=self.layout.data_group)
        values: list[float] = sums.tolist()
        return values

    def _depths(self, step: int) -> tuple[Depths, Depths]:
        """Loop counts of the draw's units (rows or tokens) and of whole rows, for all N positions."""
        if self.sampler.granularity != "token":
            depths = self.sampler.draw(step)
            return depths, depths
        depths = self.sampler.draw_tokens(step, self.cfg.model.context_length)
        return depths, depths.of_deepest_token()

    def _work(self, rank_batch: RankBatch, depths: Depths, row_depths: Depths) -> list[Work]:
        positions = rank_batch.positions.numpy()
        own = row_depths.rows(positions)
        size = self.cfg.train.micro_batch_size
        groups = form_micro_batches(own, size)
        minimum = [(0, 0)] * len(groups)
        if self.engine.stage == 3:
            minimum = lockstep_loops(row_depths, self.rank_positions, size)
        work = []
        for rows, (no_grad, grad) in zip(groups, minimum, strict=True):
            plan = LoopPlan.from_depths(own.rows(rows), min_no_grad_loops=no_grad, min_grad_loops=grad)
            order = rows[plan.order]
            loops = Loops.of(plan, depths.rows(positions[rows]), self.layout.device)
            work.append(Work(self._micro_batch(rank_batch, order), loops, plan))
        return work

    def _micro_batch(self, rank_batch: RankBatch, order: NDArray[np.int64]) -> MicroBatch:
        assert rank_batch.tokens is not None
        index = torch.from_numpy(order)
        inputs = Inputs.of(rank_batch.tokens[index], self.cfg, self.bos_id, self.layout.device)
        rows = rank_batch.positions[index].to(self.layout.device, non_blocking=True)
        return MicroBatch(inputs.tokens, inputs.labels, rows, *inputs[2:])

    def _global_tokens(self, rank_batch: RankBatch) -> float:
        """Labels that count in the global batch."""
        rows, length = self.cfg.train.global_batch_size, self.cfg.model.context_length
        if not self.cfg.data.mask_document_boundaries:
            return float(rows * length)
        assert rank_batch.tokens is not None
        valid = (rank_batch.tokens[:, 1:] != self.bos_id).sum().double().to(self.layout.device)
        dist.all_reduce(valid, group=self.layout.data_group)
        return max(1.0, float(valid))
