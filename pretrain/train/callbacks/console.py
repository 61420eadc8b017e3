"""One aligned line per interval, and a progress bar on a terminal. Main rank only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from tqdm import tqdm

from pretrain.evaluation.run import TaskResult
from pretrain.train.rates import Rates
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer

log = logging.getLogger(__name__)


class Console(Callback):
    """step/total, loss, grad norm, lr, loops (no-grad + grad), tokens/s, wait for data, MFU, memory, time left.

    Speed, wait and MFU are means of the steps since the last line; validation and checkpoints are not part of them.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.bar: tqdm | None = None
        self.interval_sec = self.interval_wait = 0.0
        self.interval_steps = 0
        self.has_begun = False

    def on_start(self, trainer: Trainer) -> None:
        if trainer.cfg.logging.progress_bar and sys.stderr.isatty():
            self.bar = tqdm(total=trainer.cfg.last_step, initial=trainer.state.step, unit="step", dynamic_ncols=True)

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        self.interval_sec += timing.step_sec
        self.interval_wait += timing.wait_sec
        self.interval_steps += 1
        if self.bar is not None:
            self.bar.update()
        if report.step % trainer.cfg.logging.every_steps == 0 or trainer.is_last_step or not self.has_begun:
            self._say(self._line(trainer, report))
            self.interval_sec = self.interval_wait = 0.0
            self.interval_steps = 0
        if not self.has_begun:
            self.has_begun = True
            self._say(f"the first step was done {time.monotonic() - trainer.started_at:.1f} s after the start")

    def on_validation(self, trainer: Trainer, losses: dict[int, float], sec: float) -> None:
        shown = "  ".join(f"{t} loops {loss:.4f}" for t, loss in losses.items())
        self._say(f"{_step(trainer)} | validation loss: {shown}  ({sec:.1f} s)")

    def on_evaluation(self, trainer: Trainer, results: Sequence[TaskResult], sec: float) -> None:
        for result in results:
            shown = "  ".join(f"{t} loops {metrics[result.headline]:.4f}" for t, metrics in result.by_loops.items())
            self._say(f"{_step(trainer)} | {result.task} {result.headline}: {shown}")
        self._say(f"{_step(trainer)} | evaluation of {len(results)} tasks in {sec:.1f} s")

    def on_end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.close()
        spent = timedelta(seconds=round(time.monotonic() - trainer.started_at))
        reason = f" ({trainer.stop_reason})" if trainer.stop_reason else ""
        log.info("stopped after step %d of %d in %s%s", trainer.state.step, trainer.cfg.total_steps, spent, reason)

    def _say(self, line: str) -> None:
        if self.bar is not None:
            with tqdm.external_write_mode():
                log.info("%s", line)
        else:
            log.info("%s", line)

    def _line(self, trainer: Trainer, report: StepReport) -> str:
        cfg, sec = trainer.cfg, self.interval_sec / self.interval_steps
        cells = [
            _step(trainer),
            _cell("loss", report.terms.get("loss"), ".4f", 8),
            _cell("grad norm", report.grad_norm, ".3e", 9),
            _cell("lr", report.hyperparameters.lr, ".2e", 8),
            f"loops {report.no_grad_loops_mean:4.1f} + {report.grad_loops_mean:4.1f}",
            _cell("tokens/s", cfg.tokens_per_step / sec, ",.0f", 9),
            _cell("wait", self.interval_wait / self.interval_sec, ".0%", 4),
            _cell("MFU", self.rates.of(report.work, sec).mfu, ".1%", 5),
        ]
        if torch.cuda.is_available():
            cells.append(_cell("memory", torch.cuda.max_memory_allocated() / 2**30, ".1f", 5) + " GiB")
        left = timedelta(seconds=round((cfg.last_step - report.step) * sec))
        return " | ".join([*cells, f"left {left}"])


def _step(trainer: Trainer) -> str:
    total = trainer.cfg.total_steps
    return f"step {trainer.state.step:>{len(str(total))}}/{total}"


def _cell(name: str, value: float | None, form: str, width: int) -> str:
    return f"{name} {'-' if value is None else format(value, form):>{width}}"
