"""Saving: every `checkpoint.every_steps` steps, at the end, and when a run is asked to stop."""

from __future__ import annotations

from collections.abc import Callable

from pretrain.train.checkpoint.placement import Placement
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer


class Checkpointing(Callback):
    """Collective over all ranks. Metrics are made durable before the checkpoint that counts on them."""

    def __init__(self, writer: CheckpointWriter, placement: Placement, sync_metrics: Callable[[], None]) -> None:
        self.writer, self.placement, self.sync_metrics = writer, placement, sync_metrics

    def on_start(self, trainer: Trainer) -> None:
        self.writer.start_from(trainer.state.step)

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        every = trainer.cfg.checkpoint.every_steps
        if trainer.is_last_step or (every is not None and report.step % every == 0):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves the state after the last step."""
        self.sync_metrics()
        state = trainer.state
        state.adamw_steps = trainer.engine.adamw_steps
        state.sampler = trainer.runner.sampler.state_dict()
        state.data = trainer.loader.state_dict()
        self.writer.save(self.placement.slices(trainer.engine.saved_tensors()), state)

    def on_end(self, trainer: Trainer) -> None:
        self.writer.wait()
