"""Benchmark tasks at chosen steps, at several loop counts from one pass over each batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.sources import tokenizer_folder
from pretrain.data.tokenizer_files import load_tokenizer
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.depth_task import fit_depths
from pretrain.evaluation.requests import Encoder
from pretrain.evaluation.run import evaluate
from pretrain.train.callbacks.validation import validation_loops
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer

log = logging.getLogger(__name__)


class Evaluation(Callback):
    """Every `evaluation.every_steps` steps and at the schedule's end. Collective; data-parallel ranks share batches."""

    def __init__(self, cfg: Config) -> None:
        settings = cfg.evaluation
        tokenizer = load_tokenizer(tokenizer_folder(cfg))
        self.encoder = Encoder(tokenizer, cfg.model.context_length)
        tasks = open_tasks(settings.tasks, settings.task_data, settings.core_bundle, settings.limit, settings.depths)
        self.tasks, notes = fit_depths(tasks, self.encoder)
        for note in notes:
            log.info("%s", note)
        self.num_loops = settings.num_loops or validation_loops(cfg)

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        every = trainer.cfg.evaluation.every_steps
        if (every is not None and report.step % every == 0) or report.step == trainer.cfg.total_steps:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        begin, engine, layout = time.perf_counter(), trainer.engine, trainer.layout

        def score_tokens(
            tokens: Tensor, labels: Tensor, num_loops: Sequence[int], candidates: Sequence[int]
        ) -> Tensor:
            scores: Tensor = engine("loop_scores", tokens, labels, num_loops, candidates)
            return scores

        engine.module.eval()
        results = []
        for task in self.tasks:
            trainer.watchdog.expect(f"the evaluation on {task.name}")
            results += evaluate(
                score_tokens, [task], self.encoder, self.num_loops,
                batch_tokens=trainer.cfg.evaluation.batch_tokens, device=layout.device, group=layout.data_group,
                multiple=layout.tensor_size,
            )  # fmt: skip
        engine.module.train()
        trainer.report_evaluation(results, time.perf_counter() - begin)
