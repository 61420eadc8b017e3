"""guards.on_spike=rewind: back to the weights of an earlier checkpoint, and on with the batches after the spike."""

from __future__ import annotations

import logging
from pathlib import Path

from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError, TrainingError
from pretrain.train.checkpoint.find import agreed_steps, find_checkpoint
from pretrain.train.checkpoint.folders import checkpoints_folder
from pretrain.train.checkpoint.placement import Placement
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer

log = logging.getLogger(__name__)


class Rewind(Callback):
    """Collective over all ranks, and the first in the list: the others see the state after it.

    The step count does not go back, so the batches from the checkpoint to the spike are left out as those of
    `train.skip_steps` are. Which checkpoint is taken follows from the step and the state alone: a run that was killed
    before it saved again meets the same spike, and does the same.
    """

    def __init__(self, run_folder: Path, ranks: Ranks, writer: CheckpointWriter, placement: Placement) -> None:
        self.run_folder, self.ranks = run_folder, ranks
        self.writer, self.placement = writer, placement

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        if not report.spike or trainer.cfg.guards.on_spike != "rewind":
            return
        state, guards = trainer.state, trainer.cfg.guards
        if len(state.rewinds) >= guards.max_rewinds:
            raise TrainingError(
                f"step {state.step}: its loss of {report.terms['loss']:.4f} is a spike, and the run has gone back "
                f"{len(state.rewinds)} times (guards.max_rewinds={guards.max_rewinds}): lower optimizer.lr, leave out "
                "batches with train.skip_steps, or raise guards.max_rewinds; then start again"
            )
        trainer.watchdog.expect(f"the rewind after step {state.step}")
        self.writer.join()  # one that failed is left to Checkpointing, which saves once more
        reader = self._find(trainer)
        if reader is None:
            log.info("step %d: no checkpoint to go back to (guards.rewind_steps=%d)", state.step, guards.rewind_steps)
            return
        with reader:
            saved = reader.state()
            trainer.engine.load_tensors(self.placement.read_from(reader), adamw_steps=saved.adamw_steps)
        state.go_on_from(saved)
        log.info(
            "step %d: loss %.4f is a spike: weights and optimizer go back to step %d, and the batches of steps %d to "
            "%d are left out (rewind %d of guards.max_rewinds=%d)",
            state.step, report.terms["loss"], saved.step, saved.step + 1, state.step, len(state.rewinds),
            guards.max_rewinds,
        )  # fmt: skip

    def _find(self, trainer: Trainer) -> CheckpointReader | None:
        """The newest complete checkpoint that is old enough, regular, and not of steps that a rewind has undone.

        Those of a stop on request do not count, so that a stop changes nothing.
        """
        every, latest = trainer.cfg.checkpoint.every_steps, trainer.state.step - trainer.cfg.guards.rewind_steps
        assert every is not None
        for step in reversed(agreed_steps(checkpoints_folder(self.run_folder), self.ranks)):
            undone = any(first < step < last for first, last in trainer.state.rewinds)
            if step > latest or step % every or undone:
                continue
            try:
                return find_checkpoint(self.run_folder, RunConfig(resume="step", resume_step=step), self.ranks)
            except CheckpointError as error:
                log.info("a rewind passes over the checkpoint of step %d: %s", step, error)
        return None
