"""The training loop, and the contract of what hooks into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.config.schema import Config
from pretrain.data.loader import TrainLoader
from pretrain.errors import TrainingError
from pretrain.evaluation.run import TaskResult
from pretrain.parallel.megatron import Layout
from pretrain.parallel.zero import ZeroEngine
from pretrain.train.spikes import is_spike
from pretrain.train.state import TrainState
from pretrain.train.step import StepReport, StepRunner, Votes
from pretrain.train.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one step on this rank."""

    wait_sec: float
    """Waiting for the loader."""
    step_sec: float
    """The whole step, the wait included; validation and checkpoints are not part of it."""


class Callback:
    """Hooks of a run, called in the order of the trainer's list.

    A callback whose hooks are collective is in the list of every rank; those that only report are on the main rank
    alone. An exception in a hook ends the run; no hook is called after one. `on_end` is called in reverse order.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Once, before the first step, with weights and state in place."""

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        """After every step; `trainer.state` counts it."""

    def on_validation(self, trainer: Trainer, losses: dict[int, float], sec: float) -> None:
        """After a validation that took `sec` seconds: mean loss per token in nats by loop count."""

    def on_evaluation(self, trainer: Trainer, results: Sequence[TaskResult], sec: float) -> None:
        """After an evaluation on tasks that took `sec` seconds."""

    def on_probe(self, trainer: Trainer, row: dict[str, Any]) -> None:
        """After a probe of the recurrent state: its row of metrics."""

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
    started_at: float
    """time.monotonic() of the start of the process: train.max_hours counts from there."""
    watchdog: Watchdog
    save_failed: Callable[[], bool]
    """Polled on every rank in each step: whether a save in the background is known to have failed there."""
    stop_requested: Callable[[], str | None] = lambda: None
    """Polled on every rank in each step; a reason on any rank stops all after that step."""
    stop_reason: str | None = None
    _own_reason: str | None = None

    def fit(self) -> None:
        """Trains until the last step, a stop request, or too many non-finite steps in a row (TrainingError).

        An exception leaves at once, noting the step, without any collective: the other ranks may be gone.
        """
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            first = self.state.step + 1
            while not self.is_last_step:
                number = self.state.step + 1
                self.watchdog.expect(f"step {number}", "first_step_sec" if number == first else "step_sec")
                report, timing = self._step()
                for callback in self.callbacks:
                    callback.on_step(self, report, timing)
                self._guard(report)
            self.watchdog.expect("the end of the run")
            for callback in reversed(self.callbacks):
                callback.on_end(self)
        except Exception as error:
            error.add_note(f"after step {self.state.step}")
            raise

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows."""
        return self.state.step >= self.cfg.last_step or self.stop_reason is not None

    def report_evaluation(self, results: Sequence[TaskResult], sec: float) -> None:
        """Hands the results of tasks to every callback."""
        self._expect_reports()
        for callback in self.callbacks:
            callback.on_evaluation(self, results, sec)

    def report_probe(self, row: dict[str, Any]) -> None:
        """Hands a probe's row to every callback."""
        self._expect_reports()
        for callback in self.callbacks:
            callback.on_probe(self, row)

    def report_validation(self, losses: dict[int, float], sec: float) -> None:
        """Hands validation losses to every callback."""
        self._expect_reports()
        for callback in self.callbacks:
            callback.on_validation(self, losses, sec)

    def _expect_reports(self) -> None:
        """The main rank's reports have a step's limit: the others wait for it in the next step, with that limit."""
        self.watchdog.expect(f"reporting after step {self.state.step}", "step_sec")

    def _step(self) -> tuple[StepReport, Timing]:
        begin = time.perf_counter()
        rank_batch = next(self.loader)
        wait = time.perf_counter() - begin
        step, guards = self.state.step, self.cfg.guards
        train = step + 1 not in self.cfg.train.skip_steps
        report = self.runner.run(step, rank_batch, train=train, accepts=self._accepts, votes=self._votes)
        updated = report.trained and not (report.skipped or report.spike)
        self.state.advance(self.cfg.tokens_per_step, skipped=report.trained and not updated)
        if updated and guards.on_spike != "none":
            losses = [*self.state.recent_losses, report.terms["loss"]]
            self.state.recent_losses = losses[-guards.spike_window_steps :]
        if report.votes.stop:
            self.stop_reason = self._own_reason or "asked for by another rank"
        return report, Timing(wait, time.perf_counter() - begin)

    def _accepts(self, loss: float) -> bool:
        return self.cfg.guards.on_spike == "none" or not is_spike(loss, self.state.recent_losses, self.cfg.guards)

    def _votes(self) -> Votes:
        self._own_reason = self._stop_reason_here()
        return Votes(stop=self._own_reason is not None, save_failed=self.save_failed())

    def _stop_reason_here(self) -> str | None:
        limit = self.cfg.train.max_hours
        if limit is not None and time.monotonic() - self.started_at >= limit * 3600:
            return f"train.max_hours={limit:g} is over"
        return self.stop_requested()

    def _guard(self, report: StepReport) -> None:
        if not report.trained:
            log.info("step %d: its batch was read and not trained on (train.skip_steps)", report.step)
        in_a_row, limit = self.state.skipped_in_a_row, self.cfg.train.max_skipped_in_a_row
        if in_a_row and report.trained and self.layout.is_main:
            log.warning(
                "step %d: loss %s, gradient norm %s: %s, so no rank updates its weights (%d in a row, "
                "train.max_skipped_in_a_row=%d)",
                report.step, report.terms["loss"], report.grad_norm, "not finite" if report.skipped else "a spike",
                in_a_row, limit,
            )  # fmt: skip
        if in_a_row >= limit:
            raise TrainingError(
                f"{in_a_row} steps in a row had a loss or gradient that is not finite, or a loss that is a spike "
                f"(train.max_skipped_in_a_row={limit}): lower optimizer.lr, or look at the data and at the gradient "
                "norms before them in metrics.jsonl, and resume from the last checkpoint"
            )
