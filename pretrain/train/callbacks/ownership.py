"""The run's folder stays this run's."""

from __future__ import annotations

from pretrain.folder_lock import FolderLock
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer


class Ownership(Callback):
    """Ends the run before it writes what belongs to a step, where it has lost its folder. Main rank only."""

    def __init__(self, lock: FolderLock) -> None:
        self.lock = lock

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        self.lock.check()
