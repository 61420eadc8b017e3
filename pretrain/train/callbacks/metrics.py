"""One row of numbers per step and per validation, handed to metrics.jsonl and other observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pretrain.evaluation.run import TaskResult
from pretrain.train.rates import Rates
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer


class Observer(Protocol):
    """Takes rows on the main rank."""

    def write(self, row: dict[str, Any]) -> None:
        """One row; its `step` never falls."""

    def close(self) -> None:
        """After the last row."""


class Metrics(Callback):
    """Makes the rows. Main rank only; no collective.

    A step's row has step, loss, grad_norm, lr, tokens, tokens_per_sec, mfu, hfu, num_loops_mean, grad_loops_mean,
    skipped_steps, step_sec, wait_sec, waste (row passes executed over needed), and where the configuration has them the
    terms of the loss, Muon's settings and rewinds; save_failed where a save in the background is found to have failed.
    A validation's row has step, val_loss by loop count and val_sec, which is not part of any step_sec; that of an
    evaluation on tasks has step, evaluation by task/metric/loops and evaluation_sec.
    """

    def __init__(self, observers: Sequence[Observer], rates: Rates) -> None:
        self.observers, self.rates = observers, rates

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        cfg, rate = trainer.cfg, self.rates.of(report.work, timing.step_sec)
        values = report.hyperparameters
        row: dict[str, Any] = {
            "step": report.step,
            "loss": report.terms.get("loss"),
            "grad_norm": report.grad_norm,
            "lr": values.lr,
            "tokens": trainer.state.tokens,
            "tokens_per_sec": cfg.tokens_per_step / timing.step_sec,
            "mfu": rate.mfu,
            "hfu": rate.hfu,
            "num_loops_mean": report.num_loops_mean,
            "grad_loops_mean": report.grad_loops_mean,
            "skipped_steps": trainer.state.skipped_steps,
            "step_sec": timing.step_sec,
            "wait_sec": timing.wait_sec,
        }
        if cfg.optimizer.name == "muon":
            row |= {"muon_lr": values.muon_lr, "muon_momentum": values.muon_momentum}
        if cfg.guards.on_spike == "rewind":
            row["rewinds"] = len(trainer.state.rewinds)
        if report.votes.save_failed:
            row["save_failed"] = True
        if report.needed_row_passes:
            row["waste"] = report.executed_row_passes / report.needed_row_passes
        row |= {name: value for name, value in report.terms.items() if name != "loss" and value != 0.0}
        self._write(row)

    def on_validation(self, trainer: Trainer, losses: dict[int, float], sec: float) -> None:
        val_loss = {str(t): loss for t, loss in losses.items()}
        self._write({"step": trainer.state.step, "val_loss": val_loss, "val_sec": sec})

    def on_evaluation(self, trainer: Trainer, results: Sequence[TaskResult], sec: float) -> None:
        values = {
            f"{result.task}/{metric}/{loops}": value
            for result in results
            for loops, metrics in result.by_loops.items()
            for metric, value in metrics.items()
        }
        self._write({"step": trainer.state.step, "evaluation": values, "evaluation_sec": sec})

    def on_probe(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._write(row)

    def on_end(self, trainer: Trainer) -> None:
        for observer in self.observers:
            observer.close()

    def _write(self, row: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.write(row)
