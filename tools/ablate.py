"""An experiment: variants x seeds of one configuration, trained one after the other, measured and compared.

    python -m tools.ablate configs/ablations/readout.yaml --out runs/readout [--minutes 5] [section.key=value ...]

Overrides go to every run. What is done is not done again, and a run that was interrupted goes on from its checkpoint;
with --minutes the command stops after that time with exit code 85. With --in-process runs are trained in this process,
one after the other, without launcher and checkpoints: for many short ones. OUT gets the runs, measured/NAME.json of
each, summary.json and report.html (tools.blindspot). On a cluster the same runs are a sweep:

    python -m tools.ablate configs/ablations/readout.yaml --out runs/readout --list readout_sweep.yaml
    python launchers/slurm.py --config configs/ablations/blindspot_base.yaml --array readout_sweep.yaml ...

and the first command then finds them done. The file says what varies:

    config: blindspot_base.yaml        # beside it
    reference: per_loop_norm           # the variant that ratios refer to
    seeds: [0, 1, 2]
    loops: 4                           # K_max of the measurement
    variants:
      per_loop_norm: []
      per_loop_raw: [model.recurrence.readout=raw]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from launchers.slurm import is_finished
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.errors import STOPPED_EXIT_CODE, ConfigError, PretrainError, TrainingError
from pretrain.files import write_text
from pretrain.train.metrics import METRICS_NAME, read_metrics
from tools.blindspot import Measurement, Opened, Settings, finite, measure, read_rows
from tools.report import Section, Table, axes_of, line_figure, markdown, new_figure, write_page
from tools.short_run import train_short

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What a file in configs/ablations/ says."""

    config: Path
    reference: str
    seeds: list[int]
    loops: int
    variants: dict[str, list[str]]


@dataclass(frozen=True)
class Trial:
    """One run."""

    variant: str
    seed: int
    overrides: list[str]
    """With run.name and run.dir."""

    @property
    def name(self) -> str:
        """Folder of the run."""
        return f"{self.variant}_s{self.seed}"


def read_experiment(path: Path) -> Experiment:
    """The experiment in a file; ConfigError naming the file and the key that is wrong."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected an experiment such as configs/ablations/readout.yaml")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    keys = {"config": str, "reference": str, "seeds": list, "loops": int, "variants": dict}
    if not isinstance(tree, dict) or set(tree) != set(keys):
        raise ConfigError(f"{path}: expected exactly the keys {', '.join(keys)}")
    for key, kind in keys.items():
        if not isinstance(tree[key], kind) or not tree[key]:
            raise ConfigError(f"{path}: {key}={tree[key]!r}: expected a {kind.__name__} that is not empty")
    variants: dict[str, list[str]] = tree["variants"]
    for name, overrides in variants.items():
        if not isinstance(overrides, list) or not all(isinstance(text, str) and "=" in text for text in overrides):
            raise ConfigError(f"{path}: variants.{name}={overrides!r}: expected a list such as [optimizer.lr=1e-3]")
    if tree["reference"] not in variants:
        raise ConfigError(f"{path}: reference={tree['reference']!r}: expected one of {', '.join(variants)}")
    if not all(isinstance(seed, int) for seed in tree["seeds"]) or len(set(tree["seeds"])) != len(tree["seeds"]):
        raise ConfigError(f"{path}: seeds={tree['seeds']!r}: expected different integers")
    return Experiment(path.parent / tree["config"], tree["reference"], tree["seeds"], tree["loops"], variants)


def restricted(experiment: Experiment, only: Sequence[str] | None) -> Experiment:
    """The experiment with the variants of `only`, and the reference; all of them for None."""
    if only is None:
        return experiment
    if unknown := [name for name in only if name not in experiment.variants]:
        raise ConfigError(f"--only {unknown[0]}: expected one of {', '.join(experiment.variants)}")
    kept = {k: v for k, v in experiment.variants.items() if k in only or k == experiment.reference}
    return replace(experiment, variants=kept)


def trials_of(experiment: Experiment, out: Path, extra: Sequence[str]) -> list[Trial]:
    """Every variant with the first seed, then with the next; each variant is checked as a configuration."""
    trials = []
    for seed in experiment.seeds:
        for variant, overrides in experiment.variants.items():
            place = [f"train.seed={seed}", f"run.name={variant}_s{seed}", f"run.dir={(out / 'runs').resolve()}"]
            trials.append(Trial(variant, seed, [*overrides, *extra, *place]))
            if seed == experiment.seeds[0]:
                load_config(experiment.config, trials[-1].overrides)
    return trials


def train(experiment: Experiment, trial: Trial, minutes: float | None) -> bool:
    """Runs or resumes a trial; False where it stopped before its end. Errors: TrainingError if it failed."""
    if is_finished(load_config(experiment.config, trial.overrides)):
        return True
    limit = [] if minutes is None else [f"train.max_hours={max(minutes, 0.1) / 60:.5f}"]
    config = str(experiment.config.resolve())
    command = [sys.executable, "pretrain/main.py", "--config", config, *trial.overrides, *limit]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code not in (0, STOPPED_EXIT_CODE):
        raise TrainingError(f"run {trial.name} ended with exit code {code}; its output is above")
    return code == 0


def measured(
    experiment: Experiment, trial: Trial, out: Path, *, may_measure: bool, in_process: bool = False
) -> Record | None:
    """The trial's record: the one of an earlier call, else measured now; None where it is not trained yet.

    Errors: ConfigError where the record is of other settings.
    """
    path = out / "measured" / f"{trial.name}.json"
    if path.is_file():
        record: Record = json.loads(path.read_text())
        if record["overrides"] != trial.overrides:
            raise ConfigError(
                f"{path}: measured with {' '.join(record['overrides'])}, now asked for {' '.join(trial.overrides)}: "
                "choose another --out"
            )
        return record
    if not may_measure:
        return None
    record = (_short if in_process else _of_run)(experiment, trial, out)
    record |= {"overrides": trial.overrides, "variant": trial.variant, "seed": trial.seed, "training": {}}
    write_text(path, json.dumps(finite(record), allow_nan=False) + "\n")
    return record


def _of_run(experiment: Experiment, trial: Trial, out: Path) -> Record:
    """Measured on the run's last checkpoint, with the norms and times in its metrics."""
    cfg = load_config(experiment.config, trial.overrides)
    run = out / "runs" / trial.name
    record = measure(run, trial.name, ROOT / cfg.data.all_sources[0].path, _settings(experiment, cfg))
    rows = read_metrics(run / METRICS_NAME)
    return record | {
        "step_sec": statistics.median(row["step_sec"] for row in rows if "step_sec" in row),
        "norm_by_step": [(r["step"], list(r["probe_norm"].values())[-1]) for r in rows if "probe_norm" in r],
    }


def _short(experiment: Experiment, trial: Trial, out: Path) -> Record:
    """Trained in this process and measured."""
    cfg = load_config(experiment.config, trial.overrides)
    data, settings = ROOT / cfg.data.all_sources[0].path, _settings(experiment, cfg)
    finished = train_short(cfg, data)
    opened, rows = Opened(finished.model, cfg.loss, cfg.last_step), read_rows(data, settings.rows)[0]
    record = Measurement(trial.name, opened, rows, settings, out / "runs" / trial.name).record()
    return record | {"step_sec": finished.step_sec, "norm_by_step": finished.norm_by_step}


def _settings(experiment: Experiment, cfg: Config) -> Settings:
    return Settings(loops=experiment.loops, rows=cfg.validation.rows, new_tokens=0, repeats=1)


COLUMNS: dict[str, Callable[[Record], float]] = {
    "norm at K": lambda r: r["norms"][_last(r)]["mean"],
    "norm at K / at 1": lambda r: r["norms"][_last(r)]["mean"] / r["norms"][0]["mean"],
    "PPL at 1": lambda r: r["ppl"][0],
    "PPL at K": lambda r: r["ppl"][_last(r)],
    "PPL gain, 1 to K": lambda r: r["ppl"][0] - r["ppl"][_last(r)],
    "loss gain, nats": lambda r: r["loss"][0] - r["loss"][_last(r)],
    "radial fraction": lambda r: statistics.fmean(g["fraction"] for g in r["gradients"]),
    "clamp, nats": lambda r: r["edits"]["clamp"][_last(r)] - r["loss"][_last(r)],
    "s per step": lambda r: r["step_sec"],
}


def _last(record: Record) -> int:
    return int(min(record["trained_loops"], len(record["loss"])) - 1)


def summarise(experiment: Experiment, records: list[Record]) -> Record:
    """By variant and column: mean and standard deviation over seeds, number of seeds, ratio to the reference."""
    summary: Record = {}
    for variant in experiment.variants:
        own = [record for record in records if record["variant"] == variant]
        if own:
            columns = {name: [get(record) for record in own] for name, get in COLUMNS.items()}
            summary[variant] = {"seeds": len(own), **{n: [statistics.fmean(v), _spread(v)] for n, v in columns.items()}}
    reference = summary.get(experiment.reference)
    for row in summary.values():
        for name in ("norm at K", "s per step"):
            row[f"{name}, ratio"] = row[name][0] / reference[name][0] if reference else None
    return summary


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def table_of(summary: Record) -> Table:
    """A line for each variant, mean ± standard deviation."""

    def cell(value: Any) -> str:
        if not isinstance(value, list):
            return "-" if value is None else f"{value:.3g}"
        mean, spread = value
        return f"{mean:.4g}" if spread is None else f"{mean:.4g} ± {spread:.2g}"

    names = list(next(iter(summary.values())))
    rows = [[variant, *(cell(row[name]) for name in names)] for variant, row in summary.items()]
    return Table(["variant", *names], rows, "mean ± standard deviation over seeds; K: the trained number of loops")


def write_results(experiment: Experiment, out: Path, records: list[Record]) -> Table:
    """Writes summary.json and report.html of what is measured so far; returns the table."""
    from tools.blindspot_page import sections

    summary = summarise(experiment, records)
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    table = table_of(summary)
    lines = {r["name"]: ([s for s, _ in r["norm_by_step"]], [n for _, n in r["norm_by_step"]]) for r in records}
    growth = line_figure(lines, xlabel="step", ylabel="mean norm of the last state", yscale="log")
    bars = new_figure()
    axes = axes_of(bars, ylabel="mean norm at K", yscale="log")
    for i, (variant, row) in enumerate(summary.items()):
        mean, spread = row["norm at K"]
        axes.bar(i, mean, yerr=spread if spread is not None and math.isfinite(spread) else None, capsize=4)
        axes.text(i, mean, variant, rotation=20, fontsize=7)
    axes.set_xticks([])
    head = Section(
        "Variants",
        "Means over seeds of what is measured on validation rows after training, and norms during training.",
        {"final_norms": bars, "norm_by_step": growth}, [table],
    )  # fmt: skip
    seed = min(record["seed"] for record in records)
    details = sections([record for record in records if record["seed"] == seed])
    write_page(out, f"Ablation of {experiment.config.stem}", f"Details are of seed {seed}.", [head, *details])
    return table


def run(experiment: Experiment, trials: list[Trial], out: Path, minutes: float | None, in_process: bool = False) -> int:
    """Trains, measures and reports what is missing; returns the exit code."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    records, stopped = [], False
    for trial in trials:
        record = measured(experiment, trial, out, may_measure=False)
        if record is None and not stopped:
            left = (end - time.monotonic()) / 60
            stopped = left <= 0
            if not (stopped or in_process):
                stopped = not train(experiment, trial, None if math.isinf(left) else left)
            record = None if stopped else measured(experiment, trial, out, may_measure=True, in_process=in_process)
        if record is not None:
            records.append(record)
    if records:
        print(markdown(write_results(experiment, out, records)))
    print(f"{len(records)} of {len(trials)} runs are measured")
    return STOPPED_EXIT_CODE if stopped else 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the experiment, or writes its sweep; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools.ablate"
    )
    parser.add_argument("experiment", type=Path, help="file such as configs/ablations/readout.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the report")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command goes on")
    parser.add_argument("--in-process", action="store_true", help="train here (tools.short_run): for runs of minutes")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help="run these variants only")
    parser.add_argument("--list", type=Path, metavar="SWEEP", help="write the runs for launchers/slurm.py --array")
    args, overrides = parser.parse_known_args(arguments)
    try:
        experiment = restricted(read_experiment(args.experiment), args.only)
        trials = trials_of(experiment, args.out, overrides)
        if args.list is not None:
            if args.list.exists():
                raise ConfigError(f"--list {args.list}: it exists; choose another name")
            write_text(args.list, OmegaConf.to_yaml(OmegaConf.create([trial.overrides for trial in trials])))
            print(f"{args.list}: {len(trials)} runs of {experiment.config}")
            return 0
        return run(experiment, trials, args.out, args.minutes, args.in_process)
    except PretrainError as error:
        print(f"ablate: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
