"""Saving: every `checkpoint.every_steps` steps, at the end, and when a run is asked to stop."""

from __future__ import annotations

import logging

from pretrain.errors import CheckpointError
from pretrain.train.checkpoint.placement import Placement
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.metrics import MetricsWriter
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer

log = logging.getLogger(__name__)


class Checkpointing(Callback):
    """Collective over all ranks. The main rank's `metrics` become durable before the checkpoint that counts on them.

    A save in the background that fails is followed by another one at the next step, or at the end; CheckpointError
    where that fails too.
    """

    def __init__(self, writer: CheckpointWriter, placement: Placement, metrics: MetricsWriter | None) -> None:
        self.writer, self.placement, self.metrics = writer, placement, metrics
        self.has_failed = False

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        every = trainer.cfg.checkpoint.every_steps
        due = trainer.is_last_step or (every is not None and report.step % every == 0)
        if due or report.votes.save_failed:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves the state after the last step."""
        trainer.watchdog.expect(f"the checkpoint of step {trainer.state.step}")
        self._settle()
        if self.metrics is not None:
            self.metrics.sync()
        state = trainer.state
        state.adamw_steps = trainer.engine.adamw_steps
        state.sampler = trainer.runner.sampler.state_dict()
        state.data = trainer.loader.state_dict()
        self.writer.save(self.placement.slices(trainer.engine.saved_tensors()), state)

    def on_end(self, trainer: Trainer) -> None:
        self._settle()
        if self.has_failed:
            self.save(trainer)
            self.writer.wait()

    def _settle(self) -> None:
        """Waits for the save before; one failure is warned about, and CheckpointError after the second in a row."""
        try:
            self.writer.wait()
            self.has_failed = False
        except CheckpointError as error:
            if self.has_failed:
                raise
            self.has_failed = True
            log.warning("%s; saving once more", error)
