"""Loss on the validation split at several loop counts, from one pass over each batch."""

from __future__ import annotations

import time

import torch

from pretrain.config.model import ModelConfig
from pretrain.config.schema import Config
from pretrain.data.documents import IGNORED_LABEL
from pretrain.data.validation import ValidationRows
from pretrain.train.inputs import Inputs
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer


def validation_loops(cfg: Config) -> list[int]:
    """The loop counts to report: as set, or `usual_loops`."""
    return cfg.validation.num_loops or usual_loops(cfg.model)


def usual_loops(model: ModelConfig) -> list[int]:
    """1, 2, 4 and mu; 1 for a gpt."""
    return [1] if model.family == "gpt" else sorted({1, 2, 4, model.recurrence.default_loops})


class Validation(Callback):
    """Every `validation.every_steps` steps and at the schedule's end. Collective over all ranks.

    Not where a run only stops: the resumed run would then have measured once more than an uninterrupted one. The loss
    is the sum over valid labels divided by their number, over all data-parallel ranks.
    """

    def __init__(self, rows: ValidationRows, bos_id: int) -> None:
        self.rows, self.bos_id = rows, bos_id

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        every = trainer.cfg.validation.every_steps
        if (every is not None and report.step % every == 0) or report.step == trainer.cfg.total_steps:
            trainer.watchdog.expect(f"the validation after step {report.step}")
            begin = time.perf_counter()
            losses = self.measure(trainer)
            trainer.report_validation(losses, time.perf_counter() - begin)

    @torch.no_grad()
    def measure(self, trainer: Trainer) -> dict[int, float]:
        """Mean loss in nats by loop count, the same on all ranks."""
        loops, device = validation_loops(trainer.cfg), trainer.layout.device
        sums = torch.zeros(len(loops) + 1, device=device, dtype=torch.float64)
        items = []
        for batch in self.rows.batches(trainer.cfg.train.micro_batch_size):
            inputs = Inputs.of(batch.tokens, trainer.cfg, self.bos_id, device)
            filler = batch.weights.to(device)[:, None] == 0
            items.append(inputs._replace(labels=inputs.labels.masked_fill(filler, IGNORED_LABEL)))
        module = trainer.engine.module
        module.eval()
        for losses in trainer.runner.loop_losses(items, loops):
            sums[:-1] += losses.sum((1, 2), dtype=torch.float64)
        sums[-1] = sum((item.labels >= 0).sum() for item in items)
        module.train()
        *totals, count = trainer.runner.reduce(sums)
        return {t: total / count for t, total in zip(loops, totals, strict=True)}
