"""The training loop, and the contract of what hooks into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pretrain.config.schema import Config
from pretrain.data.loader import TrainLoader
from pretrain.errors import TrainingError
from pretrain.parallel.megatron import Layout
from pretrain.parallel.zero import ZeroEngine
from pretrain.train.state import TrainState
from pretrain.train.step import StepReport, StepRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one step on this rank."""

    wait_sec: float
    """Waiting for the loader."""
    step_sec: float
    """The whole step, the wait included; validation and checkpoints are not part of it."""


class Callback:
    """Hooks of a run. Every rank calls every callback, in the same order, so hooks may be collective.

    An exception in a hook ends the run; no hook is called after one.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Once, before the first step, with weights and state in place."""

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        """After every step; `trainer.state` counts it."""

    def on_validation(self, trainer: Trainer, losses: dict[int, float]) -> None:
        """After a validation: mean loss per token in nats by loop count."""

    def on_end(self, trainer: Trainer) -> None:
        """Once, after the last step or a stop; not after an exception."""


@dataclass
class Trainer:
    """A run in progress. `fit` drives it to `cfg.last_step`."""

    cfg: Config
    layout: Layout
    engine: ZeroEngine
    loader: TrainLoader
    runner: StepRunner
    state: TrainState
    callbacks: Sequence[Callback]
    stop_requested: Callable[[], str | None] = lambda: None
    """Polled on every rank after each step; a reason on any rank stops all after the same step."""
    stop_reason: str | None = None
    started_at: float = field(default_factory=time.monotonic)

    def fit(self) -> None:
        """Trains until the last step, a stop request, or too many non-finite steps in a row (TrainingError)."""
        for callback in self.callbacks:
            callback.on_start(self)
        while self.state.step < self.cfg.last_step and self.stop_reason is None:
            report, timing = self._step()
            for callback in self.callbacks:
                callback.on_step(self, report, timing)
        for callback in self.callbacks:
            callback.on_end(self)

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows."""
        return self.state.step >= self.cfg.last_step or self.stop_reason is not None

    def report_validation(self, losses: dict[int, float]) -> None:
        """Hands validation losses to every callback."""
        for callback in self.callbacks:
            callback.on_validation(self, losses)

    def _step(self) -> tuple[StepReport, Timing]:
        begin = time.perf_counter()
        rank_batch = next(self.loader)
        wait = time.perf_counter() - begin
        own_reason = self._own_stop_reason()
        step = self.state.step
        report = self.runner.run(
            step, rank_batch, train=step + 1 not in self.cfg.train.skip_steps, stop_vote=own_reason is not None
        )
        self.state.advance(self.cfg.tokens_per_step, skipped=report.skipped)
        if report.stop_votes:
            self.stop_reason = own_reason or "asked for by another rank"
        self._guard(report)
        return report, Timing(wait, time.perf_counter() - begin)

    def _own_stop_reason(self) -> str | None:
        limit = self.cfg.train.max_hours
        if limit is not None and time.monotonic() - self.started_at >= limit * 3600:
            return f"train.max_hours={limit} reached"
        return self.stop_requested()

    def _guard(self, report: StepReport) -> None:
        if report.skipped:
            log.warning("step %d: a loss or gradient is not finite; no rank updated its weights", report.step)
        in_a_row = self.state.skipped_in_a_row
        if in_a_row >= self.cfg.train.max_skipped_in_a_row:
            raise TrainingError(
                f"{in_a_row} steps in a row (the last is {report.step}) had a loss or gradient that is "
                "not finite (train.max_skipped_in_a_row): lower optimizer.lr, or look at the data and state norms of "
                "these steps, and resume from the last checkpoint"
            )
