"""Which recurrences train at which learning rate: families x learning rates at tiny scale on the demo corpus.

    python -m tools.stability [--data cache/demo] [--out docs/img] [--steps 300]

Each run is one process, one thread, about a minute. Its record goes into OUT/stability.json when it ends, and a run
that stands there is not repeated. Then two plots and a table are made from the records:

    OUT/stability_loss.png   last training loss by learning rate
    OUT/stability_norms.png  RMS of the state after each loop, up to twice the trained mean

Every family keeps its published layers and state (pretrain/config/families.py); sizes, data and optimizer are common.
Loop counts are Poisson with mean 12 per row, the last 6 loops get a gradient. A run is

    diverged   with a non-finite loss or gradient, where it ends, or if the mean loss of its last 20 steps is
               `DIVERGED_NATS` above its lowest mean over 20 steps
    stuck      where it has learned nothing beyond token frequencies: that last mean is not below the unigram model's
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.arguments import integer, pathname
from pretrain.config.families import make_model_config
from pretrain.config.model import ModelConfig
from pretrain.config.schema import LossConfig, OptimizerConfig, ScheduleConfig
from pretrain.data.manifest import read_manifest
from pretrain.errors import PretrainError
from pretrain.folder_lock import FolderLock
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.parallel.schedule import hyperparameters
from pretrain.sampling import DepthSampler
from tools.baselines import Rows, Unigram, split_rows
from tools.one_process import make_micro_batch, make_model

VARIANTS: dict[str, dict[str, Any]] = {
    "add": {"family": "add"},
    "rdm pre-norm": {"family": "rdm", "block": "pre"},
    "rdm sandwich": {"family": "rdm"},
    "parcae": {"family": "parcae"},
    "flt": {"family": "flt"},
    "parcae_flt": {"family": "parcae_flt"},
}
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MEAN_LOOPS, BATCH_ROWS, CONTEXT, WARMUP_STEPS, SEED = 12, 8, 32, 20, 0
VALIDATION_ROWS, VALIDATION_LOOPS = 32, (1, 4, 12, 24)
DIVERGED_NATS = 0.5
AVERAGED_STEPS = 20


@dataclass(frozen=True)
class Record:
    """One run."""

    variant: str
    lr: float
    steps: int
    outcome: str
    """trained, stuck (not below the unigram model) or diverged."""
    last_loss: float | None
    """Mean training loss of the last 20 steps; None if the run ended with a non-finite number."""
    losses: list[float]
    """Training loss, mean of each 10 steps."""
    validation: dict[str, float | None]
    """Loss on validation rows by number of loops."""
    state_rms: list[float | None]
    """RMS of the state after loops 1, 2, ..., over validation rows."""
    spectral_radius: list[float | None]
    """rho of the linear part h -> u, every 10 steps; None where the state does not enter the stream linearly."""
    sec: float


def model_config(variant: str, vocab_size: int) -> ModelConfig:
    """The variant at the common size: width 48, one layer around two looped ones where its family has those."""
    settings = dict(VARIANTS[variant])
    family = settings.pop("family")
    layers = {} if family == "flt" else {"prelude_layers": 1, "coda_layers": 1}
    return make_model_config(
        family, {"mean_loops": MEAN_LOOPS}, vocab_size=vocab_size, context_length=CONTEXT, width=48, num_heads=2,
        ffn_width=128, core_layers=2, **layers, **settings,
    )  # fmt: skip


class Run:
    """One variant at one learning rate, trained by AdamW with the default betas, clipping, and a constant rate."""

    def __init__(self, variant: str, lr: float, vocab_size: int, train: Rows) -> None:
        self.cfg = model_config(variant, vocab_size)
        self.model = make_model(self.cfg, SEED)
        self.rows = torch.from_numpy(train[:, : CONTEXT + 1])
        self.settings = OptimizerConfig(lr=lr)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr, self.settings.betas, self.settings.eps, weight_decay=0.0, fused=True
        )
        self.sampler = DepthSampler.from_config(self.cfg.recurrence, seed=SEED, global_batch_size=BATCH_ROWS)
        self.totals = Totals(float(BATCH_ROWS * CONTEXT), float(BATCH_ROWS))

    def step(self, step: int, num_steps: int) -> float:
        """The loss of step `step`; not finite if the loss or the gradient is, and then the weights are as before."""
        schedule = ScheduleConfig(name="constant", warmup_steps=WARMUP_STEPS)
        lr = hyperparameters(self.settings, schedule, step, num_steps).lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        chosen = np.random.default_rng((SEED, step)).choice(len(self.rows), BATCH_ROWS, replace=False)
        batch, loops = make_micro_batch(self.rows[chosen], self.sampler.draw(step))
        key = StateKey(SEED, step, batch.rows)
        loss = self.model.training_loss(batch, loops, key, LossConfig(), self.totals).loss
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm or math.inf)
        if not (loss.isfinite() and norm.isfinite()):
            return math.nan
        self.optimizer.step()
        return float(loss.detach())

    def train(self, num_steps: int) -> tuple[list[float], list[float | None]]:
        """(loss of each step up to the first that is not finite, spectral radius every 10 steps)."""
        losses: list[float] = []
        radii: list[float | None] = []
        for step in range(num_steps):
            if step % 10 == 0:
                radii.append(self.model.injection.spectral_radius())
            losses.append(self.step(step, num_steps))
            if not math.isfinite(losses[-1]):
                break
        return losses, [*radii, self.model.injection.spectral_radius()]


@torch.no_grad()
def state_rms(model: LoopedLM, tokens: Tensor, num_loops: int) -> list[float | None]:
    """RMS of the state after each of `num_loops` loops, over all positions; None where it is not finite."""
    return [_finite(h.double().square().mean().sqrt()) for h, _ in model.states(tokens, num_loops)]


def outcome(losses: list[float], unigram: float) -> str:
    """trained, stuck or diverged, by the rules of the module's docstring."""
    if not math.isfinite(losses[-1]):
        return "diverged"
    width = min(AVERAGED_STEPS, len(losses))
    means = np.convolve(losses, np.full(width, 1 / width), "valid")
    if means[-1] > means.min() + DIVERGED_NATS:
        return "diverged"
    return "trained" if means[-1] < unigram else "stuck"


def run_one(variant: str, lr: float, num_steps: int, vocab_size: int, train: Rows, validation: Rows) -> Record:
    """Trains and measures one variant at one learning rate."""
    started = time.monotonic()
    run = Run(variant, lr, vocab_size, train)
    losses, radii = run.train(num_steps)
    held_out = torch.from_numpy(validation[:VALIDATION_ROWS, : CONTEXT + 1])
    tokens, labels = held_out[:, :-1], held_out[:, 1:]
    measured = run.model.loop_losses(tokens, labels, VALIDATION_LOOPS).mean((1, 2))
    unigram = Unigram(train, vocab_size).loss(validation)
    ended = math.isfinite(losses[-1])
    return Record(
        variant=variant, lr=lr, steps=len(losses), outcome=outcome(losses, unigram),
        last_loss=round(float(np.mean(losses[-AVERAGED_STEPS:])), 4) if ended else None,
        losses=[round(float(np.nanmean(losses[i : i + 10])), 4) for i in range(0, len(losses) - (not ended), 10)],
        validation={str(t): _finite(loss) for t, loss in zip(VALIDATION_LOOPS, measured, strict=True)},
        state_rms=state_rms(run.model, tokens, 2 * MEAN_LOOPS), spectral_radius=[_finite(r) for r in radii],
        sec=round(time.monotonic() - started, 1),
    )  # fmt: skip


def _finite(value: Tensor | float | None) -> float | None:
    number = math.nan if value is None else float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def table(records: list[Record]) -> str:
    """Markdown: one line for each variant, one column for each learning rate."""
    lines = [
        "| | " + " | ".join(f"lr {lr:g}" for lr in LEARNING_RATES) + " |",
        "|---" * (len(LEARNING_RATES) + 1) + "|",
    ]
    by_key = {(r.variant, r.lr): r for r in records}
    for variant in VARIANTS:
        cells = [_cell(by_key[variant, lr]) if (variant, lr) in by_key else "" for lr in LEARNING_RATES]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(record: Record) -> str:
    loss = f"stopped at step {record.steps}" if record.last_loss is None else f"{record.last_loss:.2f}"
    rms, radius = record.state_rms[MEAN_LOOPS - 1], record.spectral_radius[-1]
    rho = "" if radius is None else f", rho {radius:.2f}"
    mark = "" if record.outcome == "trained" else f"**{record.outcome}** "
    return f"{mark}{loss}, rms {'inf' if rms is None else f'{rms:.2g}'}{rho}"


def plot(records: list[Record], folder: Path) -> None:
    """Writes the two plots of the module's docstring."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="peak learning rate", ylabel="training loss, last 20 steps", xscale="log")
    for index, variant in enumerate(VARIANTS):
        own = [(r, r.last_loss) for r in records if r.variant == variant and r.last_loss is not None]
        axes.plot([r.lr for r, _ in own], [loss for _, loss in own], color=f"C{index}", marker="o", label=variant)
        bad = [(r.lr, loss) for r, loss in own if r.outcome == "diverged"]
        axes.plot([lr for lr, _ in bad], [loss for _, loss in bad], "x", color="black", markersize=10)
    axes.set_title("x: diverged")
    axes.legend()
    figure.savefig(folder / "stability_loss.png", dpi=100)
    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).flat
    for axes, variant in zip(panels, VARIANTS, strict=True):
        axes.set(title=variant, xlabel="loop", ylabel="RMS of the state", yscale="log")
        axes.axvline(MEAN_LOOPS, color="0.8")
        for record in (r for r in records if r.variant == variant):
            loops = range(1, len(record.state_rms) + 1)
            values = [math.nan if rms is None else rms for rms in record.state_rms]
            axes.plot(loops, values, label=f"{record.lr:g}", linestyle="--" if record.outcome == "diverged" else "-")
        axes.legend(title="lr (dashed: diverged)", fontsize=7, title_fontsize=7)
    figure.savefig(folder / "stability_norms.png", dpi=80)


def read_records(path: Path) -> list[Record]:
    """Records of earlier runs; empty if there are none."""
    return [Record(**record) for record in json.loads(path.read_text())] if path.is_file() else []


def write_records(path: Path, records: list[Record]) -> None:
    """Replaces the file, one record a line."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(asdict(record)) for record in records) + "\n]\n")
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing, then plots and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=pathname, default=Path("cache/demo"),
        help="data set with rows of at least 33 tokens (make demo)",
    )  # fmt: skip
    parser.add_argument("--out", type=pathname, default=Path("docs/img"))
    parser.add_argument("--steps", type=integer(1, 10**6), default=300)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        vocab_size = read_manifest(args.data).tokenizer.vocab_size
        train, validation = split_rows(args.data, "train"), split_rows(args.data, "validation")
        with FolderLock(args.out):
            path = args.out / "stability.json"
            records = read_records(path)
            done = {(r.variant, r.lr) for r in records}
            for lr in reversed(LEARNING_RATES):
                for variant in VARIANTS:
                    if (variant, lr) in done:
                        continue
                    records.append(run_one(variant, lr, args.steps, vocab_size, train, validation))
                    write_records(path, records)
                    print(f"{variant:<13} lr {lr:<6g} {records[-1].sec:5.0f} s  {_cell(records[-1])}", flush=True)
            plot(records, args.out)
    except PretrainError as error:
        print(f"stability: error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n" + table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
