"""An experiment: variants x seeds of one configuration, trained one after the other, measured and compared.

    python -m tools.ablate configs/ablations/readout.yaml --out runs/readout [--minutes 5] [section.key=value ...]

Overrides go to every run. What is done is not done again, and a run that was interrupted goes on from its checkpoint;
with --minutes the command stops after that time with exit code 85. With --in-process runs are trained in this process,
one after the other, without launcher and checkpoints: for many short ones. OUT gets the runs, measured/NAME.json of
each, summary.json and report.html (tools.blindspot). A run that diverges is counted as such, and the others go on. On a
cluster the same runs are a sweep:

    python -m tools.ablate configs/ablations/readout.yaml --out runs/readout --list runs/readout_sweep.yaml
    python launchers/slurm.py --config configs/ablations/blindspot_base.yaml --array runs/readout_sweep.yaml ...

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
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from launchers.slurm import is_finished
from pretrain import processes
from pretrain.arguments import number, pathname
from pretrain.config.load import diff_configs, dump_config, load_config
from pretrain.config.schema import Config
from pretrain.config.validate import require_validation
from pretrain.config.yaml_text import read_yaml
from pretrain.errors import STOPPED_EXIT_CODE, ConfigError, DistributedError, PretrainError, TrainingError
from pretrain.files import write_text
from pretrain.folder_lock import FolderLock
from pretrain.messages import keep_console
from pretrain.train.metrics import METRICS_NAME, read_metrics
from tools.blindspot import Measurement, Opened, Settings, finite, measure, read_rows
from tools.report import Section, Table, axes_of, markdown, new_figure, write_page
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
    tree = read_yaml(path)
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
    if tree["loops"] < 2:
        raise ConfigError(f"{path}: loops={tree['loops']}: expected at least 2, of which the last is compared with one")
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
                require_validation(load_config(experiment.config, trials[-1].overrides), "tools.ablate")
    return trials


def train(experiment: Experiment, trial: Trial, minutes: float | None) -> bool:
    """Runs or resumes a trial; False where it stopped before its end.

    Errors: the one that ended the run, TrainingError where it diverged.
    """
    if is_finished(load_config(experiment.config, trial.overrides)):
        return True
    limit = [] if minutes is None else [f"train.max_hours={max(minutes, 0.1) / 60:.5f}"]
    config = str(experiment.config.resolve())
    command = [sys.executable, "pretrain/main.py", "--config", config, *trial.overrides, *limit]
    code = processes.run(command, cwd=ROOT)
    if code not in (0, STOPPED_EXIT_CODE):
        kinds = {kind.exit_code: kind for kind in PretrainError.__subclasses__()}
        raise kinds.get(code, DistributedError)(f"run {trial.name} ended with exit code {code}; its output is above")
    return code == 0


def keep_config(experiment: Experiment, out: Path) -> None:
    """Leaves the configuration in OUT/config.yaml. Errors: ConfigError where OUT was begun with another."""
    path, own = out / "config.yaml", load_config(experiment.config)
    if not path.is_file():
        write_text(path, dump_config(own))
    elif changes := diff_configs(load_config(path), own):
        key, old, new = changes[0]
        raise ConfigError(
            f"{experiment.config}: {key}={new!r}, but the runs in {out} were begun with {old!r} ({len(changes)} such "
            "changes): choose another --out"
        )


def earlier_record(experiment: Experiment, trial: Trial, out: Path) -> Record | None:
    """The trial's record of an earlier call, or None. Errors: ConfigError where it is damaged or of other settings."""
    path = _record_path(trial, out)
    if not path.is_file():
        return None
    try:
        record: Record = json.loads(path.read_text())
        before = record["overrides"]
        loops = experiment.loops if "diverged" in record else len(record["loss"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no record of a run ({error!r}); delete it to measure the run again") from error
    if before != trial.overrides:
        raise ConfigError(
            f"{path}: measured with {' '.join(before)}, now asked for {' '.join(trial.overrides)}: choose another --out"
        )
    if loops not in (1, experiment.loops):  # 1: a gpt
        raise ConfigError(f"{path}: measured with loops={loops}, now loops={experiment.loops}: choose another --out")
    return record


def make_record(
    experiment: Experiment, trial: Trial, out: Path, minutes: float | None, *, in_process: bool
) -> Record | None:
    """Trains and measures a trial and keeps its record; None where training stopped before its end.

    The record of a run that diverged has `diverged`, the reason, in place of measurements.
    """
    try:
        if in_process:
            record = _short(experiment, trial, out)
        elif train(experiment, trial, minutes):
            record = _of_run(experiment, trial, out)
        else:
            return None
    except TrainingError as error:
        record = {"diverged": str(error)}
    own = {"name": trial.name, "variant": trial.variant, "seed": trial.seed, "overrides": trial.overrides}
    kept: Record = finite(record | own | {"training": {}})
    write_text(_record_path(trial, out), json.dumps(kept, allow_nan=False) + "\n")
    return kept


def _record_path(trial: Trial, out: Path) -> Path:
    return out / "measured" / f"{trial.name}.json"


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
            used = [with_nan(record) for record in own if "diverged" not in record]
            columns = {name: _mean_and_spread([get(record) for record in used]) for name, get in COLUMNS.items()}
            summary[variant] = {"seeds": len(used), "diverged": len(own) - len(used), **columns}
    reference = summary.get(experiment.reference, {"seeds": 0})
    for row in summary.values():
        for name in ("norm at K", "s per step"):
            row[f"{name}, ratio"] = row[name][0] / reference[name][0] if row["seeds"] and reference["seeds"] else None
    return summary


def _mean_and_spread(values: list[float]) -> list[float | None]:
    return [
        float(np.mean(values)) if values else None,
        float(np.std(values, ddof=1)) if len(values) > 1 else None,
    ]  # fmt: skip


def with_nan(value: Any) -> Any:
    """A kept record with NaN where its JSON has null: numbers that were not finite."""
    if isinstance(value, dict):
        return {key: with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return math.nan if value is None else value


def table_of(summary: Record) -> Table:
    """A line for each variant, mean ± standard deviation."""

    def cell(value: Any) -> str:
        mean, spread = value if isinstance(value, list) else (value, None)
        if mean is None:
            return "-"
        return f"{mean:.4g}" if spread is None else f"{mean:.4g} ± {spread:.2g}"

    names = list(next(iter(summary.values())))
    rows = [[variant, *(cell(row[name]) for name in names)] for variant, row in summary.items()]
    return Table(["variant", *names], rows, "mean ± standard deviation over seeds; K: the trained number of loops")


def write_results(experiment: Experiment, out: Path, records: list[Record]) -> Table:
    """Writes summary.json and report.html of what is measured so far; returns the table."""
    from tools.blindspot_page import sections

    summary = summarise(experiment, records)
    write_text(out / "summary.json", json.dumps(finite(summary), indent=1) + "\n")
    table = table_of(summary)
    notes = [f"{r['name']} diverged: {r['diverged']}." for r in records if "diverged" in r]
    used = [with_nan(record) for record in records if "diverged" not in record]
    head = Section(
        "Variants",
        "Means over seeds of what is measured on validation rows after training, and norms during training.",
        {"final_norms": _final_norms(summary), "norm_by_step": _growth(used)}, [table], notes,
    )  # fmt: skip
    seed = min((record["seed"] for record in used), default=0)
    details = sections(own) if (own := [record for record in used if record["seed"] == seed]) else ()
    write_page(out, f"Ablation of {experiment.config.stem}", f"Details are of seed {seed}.", [head, *details])
    return table


def _final_norms(summary: Record) -> Figure:
    figure = new_figure()
    axes = axes_of(figure, ylabel="mean norm at K", yscale="log")
    for i, (variant, row) in enumerate(summary.items()):
        mean, spread = row["norm at K"]
        if mean is not None and math.isfinite(mean):
            axes.bar(i, mean, yerr=spread, capsize=4)
            axes.text(i, mean, variant, rotation=20, fontsize=7)
    axes.set_xticks([])
    return figure


def _growth(records: list[Record]) -> Figure:
    """The state's norm by step: one colour for each variant, a line for each seed."""
    figure = new_figure()
    axes = axes_of(figure, xlabel="step", ylabel="mean norm of the last state", yscale="log")
    variants = list(dict.fromkeys(r["variant"] for r in records))
    for r in records:
        steps, norms = [s for s, _ in r["norm_by_step"]], [n for _, n in r["norm_by_step"]]
        label = None if any(line.get_label() == r["variant"] for line in axes.lines) else r["variant"]
        axes.plot(steps, norms, color=f"C{variants.index(r['variant']) % 10}", label=label)
    if records:
        axes.legend(fontsize=8)
    return figure


def run(experiment: Experiment, trials: list[Trial], out: Path, minutes: float | None, in_process: bool = False) -> int:
    """Trains, measures and reports what is missing; returns the exit code."""
    keep_config(experiment, out)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    records, stopped = [], False
    for trial in trials:
        record = earlier_record(experiment, trial, out)
        if record is None and not stopped:
            left = (end - time.monotonic()) / 60
            limit = None if math.isinf(left) else left
            if left > 0:
                record = make_record(experiment, trial, out, limit, in_process=in_process)
            stopped = record is None
        if record is not None:
            records.append(record)
    if records:
        print(markdown(write_results(experiment, out, records)))
    diverged = sum("diverged" in record for record in records)
    print(f"{len(records)} of {len(trials)} runs are measured" + (f", {diverged} of them diverged" if diverged else ""))
    return STOPPED_EXIT_CODE if stopped else 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the experiment, or writes its sweep; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools.ablate"
    )
    parser.add_argument("experiment", type=pathname, help="file such as configs/ablations/readout.yaml")
    parser.add_argument("--out", type=pathname, required=True, help="folder of the runs and the report")
    parser.add_argument("--minutes", type=number(0, above=True), help="stop after this time; the same command goes on")
    parser.add_argument("--in-process", action="store_true", help="train here (tools.short_run): for runs of minutes")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help="run these variants only")
    parser.add_argument("--list", type=pathname, metavar="SWEEP", help="write the runs for launchers/slurm.py --array")
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
        with FolderLock(args.out):
            return run(experiment, trials, args.out, args.minutes, args.in_process)
    except PretrainError as error:
        print(f"ablate: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    keep_console()
    sys.exit(main())
