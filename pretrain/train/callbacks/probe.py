"""A probe of the recurrent state: norms, updates, radial gradient and loss of each loop, and the gradient's parts."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.data.validation import ValidationRows
from pretrain.diagnostics.gradients import radial, readout_gradient
from pretrain.diagnostics.states import norm_stats, update
from pretrain.diagnostics.training import WINDOW_STEPS, gradient_oscillation
from pretrain.model.attention_mask import Context
from pretrain.model.looped import LoopedLM
from pretrain.train.inputs import Inputs
from pretrain.train.metrics import METRICS_NAME, read_metrics
from pretrain.train.step import StepReport
from pretrain.train.trainer import Callback, Timing, Trainer

log = logging.getLogger(__name__)

NAMES = (
    "loss", "norm", "norm_p50", "norm_p99", "norm_max", "state_rms", "relative_residual", "angle", "radial_velocity",
    "radial_fraction",
)  # fmt: skip
"""What is logged of each loop, as probe_<name>: {"1": ..., "2": ...}. Quantiles are means of the ranks' quantiles."""


def gradient_parts(cfg: ModelConfig) -> list[str]:
    """What gradient norms are logged of: each layer, and everything else by the first part of its name."""
    layers = {"prelude": cfg.prelude_layers, "core": cfg.core_layers, "coda": cfg.coda_layers}
    others = (
        "embedding", "position_embedding", "prelude_norm", "injection", "output_projection", "final_norm", "head",
        "auxiliary",
    )  # fmt: skip
    return [*(f"{part}.{i}" for part, count in layers.items() for i in range(count)), *others]


class Probe(Callback):
    """Every `probe.every_steps` steps, on the first validation rows of each data-parallel rank. Collective.

    Changes are from the loop before (none for loop 1). The radial fraction is that of each loop's own readout, in the
    training's precision: below 1e-6 it is rounding. Besides: the spectral radius of the injection's linear part, the
    gradient norms of each layer and of the other parts in the step before, the oscillation of the gradient norm over
    100 steps, and the seconds that it took. Under ZeRO-3, whose hooks gather parameters for whole passes, the radial
    fraction and the spectral radius are not measured.
    """

    def __init__(self, rows: ValidationRows, bos_id: int, metrics_folder: Path) -> None:
        self.rows, self.bos_id, self.metrics_path = rows, bos_id, metrics_folder / METRICS_NAME
        self.grad_norms: list[float] = []
        self.reference_norm: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.layout.is_main:
            earlier = read_metrics(self.metrics_path)
            self.grad_norms = [row["grad_norm"] for row in earlier if row.get("grad_norm")][-WINDOW_STEPS:]
            for norm in (list(row["probe_norm"].values())[-1] for row in earlier if "probe_norm" in row):
                if norm is not None:  # it was not finite
                    self._grown(trainer, norm)
        self._prepare(trainer)

    def on_step(self, trainer: Trainer, report: StepReport, timing: Timing) -> None:
        if report.grad_norm is not None:
            self.grad_norms = [*self.grad_norms, report.grad_norm][-WINDOW_STEPS:]
        every = trainer.cfg.probe.every_steps
        if every is not None and report.step % every == 0:
            self._probe(trainer)
        self._prepare(trainer)

    def _prepare(self, trainer: Trainer) -> None:
        """The step before a probe leaves the norms of its gradient."""
        every = trainer.cfg.probe.every_steps
        trainer.engine.measure_gradients(every is not None and (trainer.state.step + 1) % every == 0)

    def _probe(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        table = self.measure(trainer)
        row: dict[str, Any] = {"step": trainer.state.step}
        for name, values in zip(NAMES, table.tolist(), strict=True):
            loops = {str(t): value for t, value in enumerate(values, 1) if value == value}
            row |= {f"probe_{name}": loops} if loops else {}
        model = trainer.engine.module
        assert isinstance(model, LoopedLM)
        if trainer.layout.is_main and trainer.engine.stage < 3 and model.injection is not None:
            row["spectral_radius"] = model.injection.spectral_radius()
        row["grad_norm_parts"] = trainer.engine.gradient_norms(gradient_parts(trainer.cfg.model))
        row["grad_oscillation"] = gradient_oscillation(self.grad_norms)
        row["probe_sec"] = time.perf_counter() - begin
        trainer.report_probe(row)
        if trainer.layout.is_main:
            norms = table[NAMES.index("norm")].tolist()
            self._warn(trainer, len(norms), norms[-1])

    def _warn(self, trainer: Trainer, num_loops: int, norm: float) -> None:
        """Logs a warning where the norm of the last state has grown by `probe.growth_warning` or is not finite."""
        before, mend = self.reference_norm, (
            "docs/readout_blind_spot.md: loss.norm_penalty, a raw or final-only readout or an inter-loop norm hold it"
        )  # fmt: skip
        if not math.isfinite(norm):
            log.warning(
                "step %d: the mean norm of the state after loop %d is %s. See %s",
                trainer.state.step, num_loops, norm, mend,
            )  # fmt: skip
        elif self._grown(trainer, norm):
            log.warning(
                "step %d: the mean norm of the state after loop %d has grown from %.3g to %.3g (probe.growth_warning="
                "%g). If the loss at more loops does not fall with it, see %s",
                trainer.state.step, num_loops, before, norm, trainer.cfg.probe.growth_warning, mend,
            )  # fmt: skip

    def _grown(self, trainer: Trainer, norm: float) -> bool:
        """Whether the norm is above the reference by the factor; it then becomes the reference, as does the first."""
        if self.reference_norm is None:
            self.reference_norm = norm
            return False
        if norm < self.reference_norm * trainer.cfg.probe.growth_warning:
            return False
        self.reference_norm = norm
        return True

    def measure(self, trainer: Trainer) -> Tensor:
        """fp64 [len(NAMES), T] on the CPU, the same on all ranks; NaN for what is not measured. Collective."""
        cfg, layout = trainer.cfg, trainer.layout
        num_loops = cfg.probe.num_loops or cfg.model.recurrence.default_loops
        batch = next(iter(self.rows.batches(cfg.probe.rows)))
        item = Inputs.of(batch.tokens, cfg, self.bos_id, layout.device)
        module = trainer.engine.module
        assert isinstance(module, LoopedLM)
        watcher = _Watcher(module, item, num_loops, gradients=trainer.engine.stage < 3)
        module.eval()
        trainer.runner.observe(item, num_loops, watcher)
        module.train()
        return _gathered(trainer, watcher.table)


class _Watcher:
    """Fills [len(NAMES), T] as the loops go by, on a rank that has the readout."""

    def __init__(self, model: LoopedLM, item: Inputs, num_loops: int, gradients: bool) -> None:
        self.model, self.item, self.num_loops, self.gradients = model, item, num_loops, gradients
        self.table = torch.full((len(NAMES), num_loops), torch.nan, dtype=torch.float64)
        self.before: Tensor | None = None

    def __call__(self, t: int, h: Tensor, ctx: Context) -> None:
        tokens, labels = self.item.tokens, self.item.labels
        total = self.model.readout_losses(h, ctx, self.model.look_up_values("coda", tokens), labels).sum()
        fraction = torch.nan
        if self.gradients:
            _, gradient = readout_gradient(self.model, h, ctx, tokens, labels, last=t == self.num_loops)
            fraction = radial(gradient, h).fraction
        norms = norm_stats(h)
        changes = [torch.nan] * 3
        if self.before is not None:
            change = update(self.before, h)
            changes = [float(x.mean()) for x in (change.relative_residual, change.angle, change.radial_velocity)]
        loss = float(total) / max(1, int((labels >= 0).sum()))
        values = (loss, norms.mean, norms.p50, norms.p99, norms.max, norms.rms, *changes, fraction)
        self.table[:, t - 1] = torch.tensor(values, dtype=torch.float64)
        self.before = h


def _gathered(trainer: Trainer, table: Tensor) -> Tensor:
    """Means (the maximum for norm_max) over the ranks that hold a share of the tokens."""
    layout = trainer.layout
    shares = layout.tensor_size if layout.sequence_parallel else 1
    everyone = table.new_zeros(layout.data_size * shares, *table.shape).to(layout.device)
    if layout.pipeline_rank == layout.pipeline_size - 1 and layout.tensor_rank < shares:
        everyone[layout.data_rank * shares + layout.tensor_rank] = table.to(layout.device)
    dist.all_reduce(everyone, group=layout.world_group)
    means, index = everyone.mean(0), NAMES.index("norm_max")
    means[index] = everyone[:, index].amax(0)
    return means.cpu()
