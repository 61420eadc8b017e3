"""One optimizer step of a rank: its rows, cut into micro-batches by depth, forward and backward, one update.

Shapes: N rows of the global batch, R rows of this rank, B rows of a micro-batch, S sequence.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pretrain.accounting import StepWork, auxiliary_flops
from pretrain.config.loss import LOSS_TERMS
from pretrain.config.schema import Config
from pretrain.data.loader import RankBatch
from pretrain.errors import DistributedError
from pretrain.model.attention_mask import Context
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.loss import Totals
from pretrain.parallel.megatron import Layout
from pretrain.parallel.schedule import Hyperparameters, hyperparameters
from pretrain.parallel.zero import ZeroEngine
from pretrain.sampling import Depths, DepthSampler, LoopPlan, form_micro_batches, lockstep_loops
from pretrain.train.inputs import Inputs

TERMS = ("loss", "cross_entropy", *LOSS_TERMS)


@dataclass(frozen=True)
class Work:
    """One micro-batch and how it runs."""

    batch: MicroBatch
    loops: Loops
    plan: LoopPlan


class Votes(NamedTuple):
    """What ranks want once the step is done; over all ranks, how many want it."""

    stop: int = 0
    """End the run after this step."""
    save_failed: int = 0
    """A save in the background has failed: it is to be looked at."""


@dataclass(frozen=True)
class StepReport:
    """What a step did, the same on all ranks."""

    step: int
    """Steps done, this one included."""
    terms: dict[str, float]
    """Terms of the loss over the global batch; `loss` is their weighted sum. Empty if the batch was not trained on."""
    grad_norm: float | None
    trained: bool
    """False where the batch was only read."""
    skipped: bool
    """A loss or gradient was not finite: no update."""
    spike: bool
    """The loss was finite and not accepted: no update."""
    hyperparameters: Hyperparameters
    work: StepWork
    """Loops of all rows, for the accounting."""
    num_loops_mean: float
    no_grad_loops_mean: float
    grad_loops_mean: float
    executed_row_passes: float
    """Rows sent through the core, over all ranks."""
    needed_row_passes: float
    votes: Votes


class RowShares(Protocol):
    """What a runner has to know of the loader."""

    all_positions: NDArray[np.int64]
    """[data ranks, R] positions of every rank's rows in the global batch."""
    bos_id: int


class StepRunner:
    """Runs optimizer steps and evaluations where each rank holds the whole depth of the model (pipeline = 1)."""

    def __init__(
        self,
        cfg: Config,
        engine: ZeroEngine,
        layout: Layout,
        sampler: DepthSampler,
        loader: RowShares,
    ) -> None:
        self.cfg, self.engine, self.layout, self.sampler = cfg, engine, layout, sampler
        self.rank_positions, self.bos_id = list(loader.all_positions), loader.bos_id
        # Of stage 3 each module call is collective; of stage 2 the order of the gradients, in which those of parameters
        # that some loops use alone come earlier or later by the number of loops.
        self.lockstep = engine.stage == 3 or (engine.stage == 2 and cfg.model.auxiliary.has_parameters)

    def run(
        self,
        step: int,
        rank_batch: RankBatch,
        *,
        train: bool = True,
        accepts: Callable[[float], bool] = lambda loss: True,
        votes: Callable[[], Votes] = Votes,
    ) -> StepReport:
        """Step `step` (0-based: the optimizer steps done before) on this rank's rows. Collective over all ranks.

        `train` False leaves the weights alone. So does `accepts`, asked about a finite loss of the global batch before
        the update; it must answer alike on all ranks. `votes`, asked as late as possible, are summed over ranks in the
        same collective as the loss.
        """
        values = hyperparameters(self.cfg.optimizer, self.cfg.schedule, step, self.cfg.total_steps)
        depths, row_depths = self._depths(step)
        self._agree(step, row_depths)
        work = self._work(rank_batch, depths, row_depths) if train else []
        totals = Totals(self._global_tokens(rank_batch), self.cfg.train.global_batch_size)
        sums = torch.zeros(len(TERMS) + 4, device=self.layout.device, dtype=torch.float64)
        for name, value in self._accumulate(work, step, totals).items():
            sums[TERMS.index(name)] = value
        sums[-4] = sum(item.plan.executed_row_passes for item in work)
        sums[-3] = sum(item.plan.needed_row_passes for item in work)
        sums[-2], sums[-1] = votes()
        reduced = self.reduce(sums, num_votes=2)
        spike = train and math.isfinite(reduced[0]) and not accepts(reduced[0])
        result = self.engine.step(values, discard=spike) if train else None
        counted = row_depths if train else row_depths.rows([])
        return StepReport(
            step=step + 1,
            terms=dict(zip(TERMS, reduced, strict=False)) if train else {},
            grad_norm=None if result is None else result.grad_norm,
            trained=train,
            skipped=result is not None and result.skipped,
            spike=spike,
            hyperparameters=values,
            work=StepWork.of(
                counted.no_grad_loops, counted.grad_loops, self.cfg.loss.objective,
                auxiliary_flops(self.cfg, counted.grad_loops), per_token=self.cfg.model.recurrence.per_token,
            ),
            num_loops_mean=float(row_depths.num_loops.mean()),
            no_grad_loops_mean=float(row_depths.no_grad_loops.mean()),
            grad_loops_mean=float(row_depths.grad_loops.mean()),
            executed_row_passes=reduced[-4],
            needed_row_passes=reduced[-3],
            votes=Votes(round(reduced[-2]), round(reduced[-1])),
        )

    def loop_losses(self, items: list[Inputs], num_loops: Sequence[int]) -> Iterator[Tensor]:
        """Cross entropy of each token of each item, fp32 [len(num_loops), B, S], where this rank has it. Collective."""
        for item in items:
            yield self.engine(
                "loop_losses", item.tokens, item.labels, num_loops,
                document_ids=item.document_ids, positions=item.positions, segments=item.segments,
            )  # fmt: skip

    def observe(self, item: Inputs, num_loops: int, see: Callable[[int, Tensor, Context], None]) -> None:
        """see(t, h_t, context) after each loop of an evaluation, on the ranks that hold the readout. Collective."""
        self.engine(
            "observe", see, item.tokens, num_loops,
            document_ids=item.document_ids, positions=item.positions, segments=item.segments,
        )  # fmt: skip

    def reduce(self, sums: Tensor, num_votes: int = 0) -> list[float]:
        """Sums over data-parallel ranks of what the last pipeline stage has; the last `num_votes` over all ranks."""
        layout = self.layout
        if layout.tensor_rank or layout.pipeline_rank < layout.pipeline_size - 1:
            sums[: len(sums) - num_votes] = 0.0
        dist.all_reduce(sums, group=layout.world_group)
        values: list[float] = sums.tolist()
        return values

    def _accumulate(self, work: list[Work], step: int, totals: Totals) -> dict[str, Tensor]:
        """Forward and backward of the micro-batches; this rank's share of the loss's terms."""
        terms: dict[str, Tensor] = {}
        for item in work:
            key = StateKey(self.cfg.train.seed, step, item.batch.rows)
            output = self.engine("training_loss", item.batch, item.loops, key, self.cfg.loss, totals)
            self.engine.backward(output.loss)
            for name, value in output.metrics.items():
                terms[name] = terms[name] + value if name in terms else value
        return terms

    def _agree(self, step: int, row_depths: Depths) -> None:
        """DistributedError on every rank where ranks have drawn other loop counts, before one waits for another."""
        layout = self.layout
        if layout.world_size == 1:
            return
        digest = zlib.crc32(row_depths.no_grad_loops.tobytes() + row_depths.grad_loops.tobytes(), step)
        own = torch.tensor([digest], dtype=torch.int64, device=layout.device)
        gathered = [torch.empty_like(own) for _ in range(layout.world_size)]
        dist.all_gather(gathered, own, group=layout.world_group)
        digests = torch.cat(gathered).tolist()
        usual = max(set(digests), key=digests.count)
        others = [rank for rank, found in enumerate(digests) if found != usual]
        if others:
            named = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
            raise DistributedError(
                f"step {step + 1}: {len(others)} of {layout.world_size} ranks ({named}) have drawn other loop counts "
                "than the rest: they run another configuration, code or numpy version. Start all ranks from one "
                "installation and one config.yaml"
            )

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
        if self.lockstep:
            minimum = lockstep_loops(row_depths, self.rank_positions, size)
        work = []
        for rows, (no_grad, grad) in zip(groups, minimum, strict=True):
            plan = LoopPlan.from_depths(own.rows(rows), min_no_grad_loops=no_grad, min_grad_loops=grad)
            order = rows[plan.order]
            loops = Loops.of(plan, depths.rows(positions[rows]), self.layout.device)
            work.append(Work(self._micro_batch(rank_batch, order), loops, plan))
        return work

    def _micro_batch(self, rank_batch: RankBatch, order: NDArray[np.int64]) -> MicroBatch:
        index = torch.from_numpy(order)
        rows = rank_batch.tokens
        if rows is None:  # a pipeline stage that looks at neither tokens nor labels
            rows = torch.zeros(1, self.cfg.model.context_length + 1, dtype=torch.int64).expand(len(order), -1)
        else:
            rows = rows[index]
        inputs = Inputs.of(rows, self.cfg, self.bos_id, self.layout.device)
        positions = rank_batch.positions[index].to(self.layout.device, non_blocking=True)
        return MicroBatch(inputs.tokens, inputs.labels, positions, *inputs[2:])

    def _global_tokens(self, rank_batch: RankBatch) -> float:
        """Labels that count in the global batch."""
        rows, length = self.cfg.train.global_batch_size, self.cfg.model.context_length
        if not self.cfg.data.mask_document_boundaries:
            return float(rows * length)
        assert rank_batch.tokens is not None
        valid = (rank_batch.tokens[:, 1:] != self.bos_id).sum().double().to(self.layout.device)
        dist.all_reduce(valid, group=self.layout.data_group)
        return max(1.0, float(valid))
