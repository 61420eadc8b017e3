"""One aligned line per interval, and a progress bar on a terminal. Main rank only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from tqdm import tqdm

from pretrain.train.rates import Rates
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer

log = logging.getLogger(__name__)


class Console(Callback):
    """step/total, loss, grad norm, lr, loops (no-grad + grad), tokens/s, wait for data, MFU, memory, time left."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.bar: tqdm | None = None
        self.interval_sec = self.interval_wait = 0.0
        self.interval_steps = 0

    def on_start(self, trainer: Trainer) -> None:
        if trainer.cfg.logging.progress_bar and sys.stderr.isatty():
            self.bar = tqdm(total=trainer.cfg.last_step, initial=trainer.state.step, unit="step", dynamic_ncols=True)

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        self.interval_sec += timing.step_sec
        self.interval_wait += timing.wait_sec
        self.interval_steps += 1
        if self.bar is not None:
            self.bar.update()
        if report.step % trainer.cfg.logging.every_steps == 0 or trainer.is_last_step or report.step == 1:
            self._say(self._line(trainer, report))
            self.interval_sec = self.interval_wait = 0.0
            self.interval_steps = 0

    def on_validation(self, trainer: Trainer, losses: dict[int, float]) -> None:
        shown = "  ".join(f"{t} loops {loss:.4f}" for t, loss in losses.items())
        self._say(f"step {trainer.state.step:>{len(str(trainer.cfg.total_steps))}} | validation loss: {shown}")

    def on_end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.close()
        hours = timedelta(seconds=round(time.monotonic() - trainer.started_at))
        reason = f" ({trainer.stop_reason})" if trainer.stop_reason else ""
        log.info("stopped after step %d of %d in %s%s", trainer.state.step, trainer.cfg.total_steps, hours, reason)

    def _say(self, line: str) -> None:
        if self.bar is not None:
            with tqdm.external_write_mode():
                log.info(line)
        else:
            log.info(line)

    def _line(self, trainer: Trainer, report: StepReport) -> str:
        cfg, sec = trainer.cfg, self.interval_sec / self.interval_steps
        rate = self.rates.of(report.work, sec)
        columns: list[tuple[str, float | None, Callable[[float], str]]] = [
            ("loss", report.terms.get("loss"), lambda x: f"{x:8.4f}"),
            ("grad norm", report.grad_norm, lambda x: f"{x:9.3e}"),
            ("lr", report.hyperparameters.lr, lambda x: f"{x:8.2e}"),
            ("tokens/s", cfg.tokens_per_step / sec, lambda x: f"{x:9,.0f}"),
            ("wait", self.interval_wait / self.interval_sec, lambda x: f"{x:4.0%}"),
            ("MFU", rate.mfu, lambda x: f"{x:5.1%}"),
        ]
        width = len(str(cfg.total_steps))
        parts = [f"step {report.step:>{width}}/{cfg.total_steps}"]
        parts += [f"{name} {form(value) if value is not None else '-'}" for name, value, form in columns]
        parts.insert(4, f"loops {report.no_grad_loops_mean:4.1f} + {report.grad_loops_mean:4.1f}")
        if torch.cuda.is_available():
            parts.append(f"memory {torch.cuda.max_memory_allocated() / 2**30:5.1f} GiB")
        parts.append(f"left {timedelta(seconds=round((cfg.last_step - report.step) * sec))}")
        return " | ".join(parts)
