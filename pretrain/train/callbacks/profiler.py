"""A torch.profiler trace of some steps, in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer


class Profiler(Callback):
    """Traces steps first..last of `logging.profile_steps` on the main rank: RUN/trace_FIRST_LAST.json (chrome://tracing)."""

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        (self.first, self.last), self.folder = steps, folder
        self.profile: profile | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._begin(trainer.state.step)

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        if self.profile is not None and (report.step == self.last or trainer.is_last_step):
            self.profile.__exit__(None, None, None)
            self.profile.export_chrome_trace(str(self.folder / f"trace_{self.first}_{report.step}.json"))
            self.profile = None
        self._begin(report.step)

    def _begin(self, steps_done: int) -> None:
        if steps_done + 1 == self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities)
            self.profile.__enter__()
