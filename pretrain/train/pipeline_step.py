"""Steps and evaluations of layouts with a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import cast

import torch
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.documents import IGNORED_LABEL
from pretrain.model.attention_mask import Context
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.parallel.megatron import Layout
from pretrain.parallel.pipeline import CircularPipeline, Part
from pretrain.parallel.zero import ZeroEngine
from pretrain.sampling import DepthSampler, LoopStep
from pretrain.train.inputs import Inputs
from pretrain.train.step import RowShares, StepRunner, Work


class PipelineRunner(StepRunner):
    """The micro-batches of a step go round the ring of pipeline ranks together."""

    def __init__(
        self, cfg: Config, engine: ZeroEngine, layout: Layout, sampler: DepthSampler, loader: RowShares
    ) -> None:
        super().__init__(cfg, engine, layout, sampler, loader)
        self.pipeline = CircularPipeline(cast(LoopedLM, engine.module), layout)

    def _accumulate(self, work: list[Work], step: int, totals: Totals) -> dict[str, Tensor]:
        if not work:
            return {}
        seed = self.cfg.train.seed
        parts = [Part(item.batch, item.loops, StateKey(seed, step, item.batch.rows)) for item in work]
        return self.pipeline.train(parts, self.cfg.loss, totals, self.engine.scale_loss)

    def loop_losses(self, items: list[Inputs], num_loops: Sequence[int]) -> Iterator[Tensor]:
        # The ring takes a multiple of its size: the last items are filled up with rows that count nothing.
        missing = -len(items) % self.layout.pipeline_size
        idle = items[0]._replace(labels=torch.full_like(items[0].labels, IGNORED_LABEL))
        parts = [_evaluated(item, max(num_loops)) for item in [*items, *repeat(idle, missing)]]
        losses = self.pipeline.loop_losses(parts, num_loops)
        yield from [] if losses is None else losses[: len(items)]

    def observe(self, item: Inputs, num_loops: int, see: Callable[[int, Tensor, Context], None]) -> None:
        parts = [_evaluated(item, num_loops) for _ in range(self.layout.pipeline_size)]

        def see_first(part: Part, t: int, h: Tensor) -> None:
            if part is parts[0]:
                see(t, h, part.invariants["ctx"])

        self.pipeline.evaluate(parts, num_loops, see_first)


def _evaluated(item: Inputs, num_loops: int) -> Part:
    """All rows run the same number of loops, without gradient."""
    rows = len(item.tokens)
    steps = tuple(LoopStep(first=0 if t == 0 else rows, active=rows, computed=rows) for t in range(num_loops))
    numbers = torch.arange(rows, device=item.tokens.device)
    return Part(MicroBatch(item.tokens, item.labels, numbers, *item[2:]), Loops(steps, (), ()), key=None)


def make_runner(
    cfg: Config, engine: ZeroEngine, layout: Layout, sampler: DepthSampler, loader: RowShares
) -> StepRunner:
    """The runner of this layout."""
    runner = PipelineRunner if layout.pipeline_size > 1 else StepRunner
    return runner(cfg, engine, layout, sampler, loader)
