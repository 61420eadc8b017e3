"""Trains the demo model and reports what it learned; `make demo`.

    python -m tools.demo [--short] [section.key=value ...]

Runs the commands that a user would type (tokenizer, shards, training with configs/tiny.yaml), shows each, and then
measures the result. What is done already is not done again: a data set that is there is used, and an interrupted
training goes on from its last checkpoint. Overrides go to the training. Exit code 0: the model is at least
`MARGIN_NATS` below an interpolated bigram model; 1: it is not; others: of the command that failed. `--short`, which is
for continuous integration, trains a fifth of the steps and compares with the unigram model.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain import processes
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.validate import require_validation
from pretrain.data.manifest import MANIFEST_NAME, read_manifest
from pretrain.errors import STOPPED_EXIT_CODE, PretrainError, TrainingError
from pretrain.folder_lock import FolderLock
from pretrain.messages import keep_console
from pretrain.train.metrics import METRICS_NAME, read_metrics
from tools.baselines import Bigram, Unigram, split_rows

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/tiny.yaml"
VALIDATION_FRACTION = 0.05
MARGIN_NATS = 0.2
SHORT = ("run.name=tiny_short", "train.max_steps=130")
PROMPTS = ("", "The river", "In 1912", "She was an American")
NEW_TOKENS = 48
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Losses:
    """Validation losses in nats per token, all over the same targets."""

    unigram: float
    bigram: float
    by_loops: dict[int, float]
    mean_loops: int
    """The loop count of the verdict."""

    @property
    def model(self) -> float:
        """The trained model's at `mean_loops`."""
        return self.by_loops[self.mean_loops]

    def table(self) -> str:
        """A line for each loss."""
        lines = [("unigram", self.unigram), ("bigram, interpolated", self.bigram)]
        lines += [(f"model, loops: {loops}", loss) for loops, loss in sorted(self.by_loops.items())]
        return "\n".join(f"  {name:<22} {loss:.4f}" for name, loss in lines)


def main(arguments: list[str]) -> int:
    """Prepares, trains, reports; returns the exit code."""
    started, short = time.monotonic(), "--short" in arguments
    overrides = [*(SHORT if short else ()), *(argument for argument in arguments if argument != "--short")]
    try:
        cfg = load_config(ROOT / CONFIG, overrides)
        require_validation(cfg, "the demo")
        prepare(cfg)
        run("pretrain/main.py", "--config", CONFIG, *overrides)
        losses = report(cfg)
    except PretrainError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        stopped = error.returncode == STOPPED_EXIT_CODE
        what = "was stopped" if stopped else f"failed with exit code {error.returncode}"
        goes_on = "; the same command goes on where it stopped" if stopped else ""
        print(f"demo: the command above {what}{goes_on}", file=sys.stderr)
        return error.returncode
    except KeyboardInterrupt:
        print("demo: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    print(f"\n{time.monotonic() - started:.0f} s in all")
    return verdict(losses, short)


def prepare(cfg: Config) -> None:
    """Makes the data set of `cfg` from the Wikipedia leads, unless there is one."""
    data = Path(cfg.data.all_sources[0].path)
    if (ROOT / data / MANIFEST_NAME).is_file():
        return
    tokenizer = data.with_name(f"{data.name}_tokenizer")
    if not (ROOT / tokenizer).is_dir():
        run("data_prep/train_tokenizer.py", "demo", "--vocab-size", str(cfg.model.vocab_size), "--out", str(tokenizer))
    run(
        "data_prep/build_shards.py", "demo", "--tokenizer", str(tokenizer), "--out", str(data),
        "--row-tokens", str(cfg.model.context_length + 1), "--validation-fraction", str(VALIDATION_FRACTION),
    )  # fmt: skip


def run(*command: str) -> None:
    """Shows and runs one of the project's scripts with this interpreter; CalledProcessError where it fails."""
    print(f"\n$ python {shlex.join(command)}", flush=True)
    if code := processes.run([sys.executable, *command], cwd=ROOT):
        raise subprocess.CalledProcessError(code, command)


def report(cfg: Config) -> Losses:
    """Prints losses beside the baselines and sampled text; leaves loss.png in the run's folder.

    Errors: TrainingError where the run has no validation at its last step.
    """
    folder = ROOT / cfg.run.dir / cfg.run.name
    losses = measure(cfg, folder)
    with FolderLock(folder):
        plot(folder, losses, folder / "loss.png")
    print(f"\nValidation loss, nats per token over {cfg.validation.rows} rows:\n{losses.table()}")
    print(f"\nLoss curve: {os.path.relpath(folder / 'loss.png')}\n\nSamples at temperature {TEMPERATURE}:")
    for text in samples(folder):
        print(f"  {text!r}")
    return losses


def measure(cfg: Config, folder: Path) -> Losses:
    """The run's last validation beside baselines made from the same data set's training rows."""
    data = ROOT / cfg.data.all_sources[0].path
    train, validation = split_rows(data, "train"), split_rows(data, "validation")[: cfg.validation.rows]
    vocab_size = read_manifest(data).tokenizer.vocab_size
    rows = [row for row in read_metrics(folder / METRICS_NAME) if "val_loss" in row]
    if not rows or rows[-1]["step"] != cfg.last_step:
        raise TrainingError(f"{folder / METRICS_NAME}: no validation at step {cfg.last_step}, the run's last")
    return Losses(
        unigram=Unigram(train, vocab_size).loss(validation),
        bigram=Bigram.tuned(train, vocab_size).loss(validation),
        by_loops={int(loops): loss for loops, loss in rows[-1]["val_loss"].items()},
        mean_loops=cfg.model.recurrence.default_loops,
    )


def plot(folder: Path, losses: Losses, path: Path) -> None:
    """Draws training and validation loss over steps, with the baselines as lines."""
    from matplotlib.figure import Figure

    rows = read_metrics(folder / METRICS_NAME)
    training = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
    axes.plot(*zip(*training, strict=True), color="0.75", linewidth=0.8, label="training, sampled depths")
    for loops in sorted(losses.by_loops):
        points = [(row["step"], row["val_loss"][str(loops)]) for row in rows if "val_loss" in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"validation, loops: {loops}")
    for name, loss, style in (("unigram", losses.unigram, ":"), ("bigram", losses.bigram, "--")):
        axes.axhline(loss, color="black", linestyle=style, linewidth=1, label=name)
    axes.legend()
    figure.savefig(path, dpi=150)


def samples(folder: Path) -> list[str]:
    """A continuation of each prompt by the run's newest checkpoint; the same on every call."""
    from tools.generate import continue_text  # imports torch and transformers
    from tools.loading import load_model

    trained = load_model(folder)
    return [
        continue_text(trained, prompt, NEW_TOKENS, temperature=TEMPERATURE, seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]


def verdict(losses: Losses, short: bool = False) -> int:
    """Says whether the model beats the bigram (`short`: the unigram) by the margin; 0 if so, else 1."""
    name, baseline = ("unigram", losses.unigram) if short else ("bigram", losses.bigram)
    passed = baseline - losses.model >= MARGIN_NATS
    print(
        f"{'passed' if passed else 'FAILED'}: at {losses.mean_loops} loops the model is {baseline - losses.model:.2f} "
        f"nats below the {name} model (at least {MARGIN_NATS} expected)"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    keep_console()
    sys.exit(main(sys.argv[1:]))
