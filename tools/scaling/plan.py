"""Plans the runs of a study: which mean loops, layers and steps spend a budget of FLOPs exactly.

FLOPs are model FLOPs of docs/accounting.md: look-ups count nothing, the head once, loops without gradient forward only.
Two constraints decide what stays the same while the loops change:

    fixed_parameters   the model: P, R, C layers as the configuration says, so more loops make it deeper (Parcae's)
    fixed_layers       the effective layers P + mu R + C: more loops take layers out of the core (iso-depth)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pretrain.accounting import model_flops
from pretrain.config.bounds import require
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.validate import require_validation, validate
from pretrain.errors import ConfigError
from pretrain.files import write_text
from pretrain.planning import expected_work
from tools.report import Table

Constraint = Literal["fixed_parameters", "fixed_layers"]
CONSTRAINTS: tuple[Constraint, ...] = get_args(Constraint)
PLAN_NAME = "plan.json"
TOLERANCE = 0.01
"""Of a run's FLOPs against its budget."""
EVALUATED_LOOPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    name: str
    """run.name."""
    config: str
    """File whose model it trains."""
    size: str
    """The file's name: what is the same along an iso-FLOP curve."""
    constraint: Constraint
    budget_flops: float
    mean_loops: float
    core_layers: int
    seed: int
    steps: int
    tokens: int
    flops: float
    """Expected model FLOPs: those of the mean over the depths that are drawn."""
    overrides: tuple[str, ...]
    """What the sweep file says."""


@dataclass(frozen=True)
class Study:
    """What a plan asks for."""

    configs: Sequence[str]
    overrides: Sequence[str]
    budgets: Sequence[float]
    mean_loops: Sequence[float]
    constraint: Constraint
    layers: int | None = None
    """Effective layers with fixed_layers. None: those of the configuration at its own mean loops."""
    seeds: Sequence[int] = (0,)
    min_steps: int = 200

    def __post_init__(self) -> None:
        for name, values in (("--flops", self.budgets), ("--mean-loops", self.mean_loops), ("--seeds", self.seeds)):
            require(len(set(values)) == len(values), name, list(values), "each value once")
        for name, amounts in (("--flops", self.budgets), ("--mean-loops", self.mean_loops)):
            for value in amounts:
                require(
                    0 < value < math.inf and float(f"{value:g}") == value, name, value,
                    "a number > 0 of at most six digits, all of which are in the names of the runs",
                )  # fmt: skip
        require(self.min_steps >= 50, "--min-steps", self.min_steps, "at least 50, so that whole steps meet 1%")
        stems = [Path(config).stem for config in self.configs]
        require(len(set(stems)) == len(stems), "configurations", stems, "different file names, which name the sizes")
        require(
            self.layers is None or self.constraint == "fixed_layers", "--layers", self.layers,
            "no such option, since --constraint fixed_parameters keeps the layers of the configuration",
        )  # fmt: skip

    def runs(self) -> list[PlannedRun]:
        """All runs, by size, budget, mean loops and seed.

        Errors: ConfigError naming every run whose budget gives fewer than `min_steps` steps; what a run's configuration
        refuses, with the run's name.
        """
        bases = {config: load_config(config, self.overrides) for config in self.configs}
        for base in bases.values():
            require_validation(base, "`collect`")
        runs = [
            self._run(config, base, flops, mean_loops, seed)
            for config, base in bases.items() for flops in self.budgets for mean_loops in self.mean_loops
            for seed in self.seeds
        ]  # fmt: skip
        short = [f"{run.name} ({run.steps})" for run in runs if run.steps < self.min_steps]
        if short:
            raise ConfigError(
                f"--flops: fewer than {self.min_steps} steps: {', '.join(short)}: expected larger budgets, fewer mean "
                "loops, a smaller train.global_batch_size, or --min-steps"
            )
        return runs

    def _run(self, config: str, base: Config, flops: float, mean_loops: float, seed: int) -> PlannedRun:
        size = Path(config).stem
        layers = f"-layers{self._layers(base)}" if self.constraint == "fixed_layers" else ""
        seeds = f"-s{seed}" if len(self.seeds) > 1 else ""
        name = f"{size}{layers}-{flops:g}-mu{mean_loops:g}{seeds}".replace("+", "")
        try:
            overrides = [f"run.name={name}", *self._model_overrides(base, mean_loops), f"train.seed={seed}"]
            cfg = load_config(config, [*self.overrides, *overrides])
            per_step = model_flops(cfg.model, expected_work(cfg))
            steps = round(flops / per_step)
            overrides.append(f"train.max_steps={steps}")
            if steps >= self.min_steps:
                validate(replace(cfg, train=replace(cfg.train, max_steps=steps, max_tokens=None)), None)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        return PlannedRun(
            name, config, size, self.constraint, flops, mean_loops, cfg.model.core_layers, seed, steps,
            steps * cfg.tokens_per_step, steps * per_step, tuple(overrides),
        )  # fmt: skip

    def _model_overrides(self, base: Config, mean_loops: float) -> Iterable[str]:
        recurrence, key = base.model.recurrence, "model.recurrence."
        require(
            recurrence.curriculum == "none", key + "curriculum", recurrence.curriculum,
            "none, since a ramp of the loops would spend less than the budget",
        )  # fmt: skip
        if mean_loops == 1:
            yield key + "distribution=fixed"  # max(1, Poisson(1)) has the mean 1.37
        yield f"{key}mean_loops={mean_loops:g}"
        if not any(text.lstrip("-").startswith(key + "backprop_loops") for text in self.overrides):
            yield key + "backprop_loops=null"
        if self.constraint == "fixed_layers":
            yield f"model.core_layers={self._core_layers(base, mean_loops)}"
        wanted = {*(base.validation.num_loops or EVALUATED_LOOPS), max(1, round(mean_loops))}
        yield f"validation.num_loops={[1] if mean_loops == 1 else sorted(wanted)}"
        yield "validation.every_steps=null"

    def _layers(self, base: Config) -> int:
        return self.layers or round(base.model.effective_layers(base.model.recurrence.mean_loops))

    def _core_layers(self, base: Config, mean_loops: float) -> int:
        outer, layers = base.model.prelude_layers + base.model.coda_layers, self._layers(base)
        looped = layers - outer
        require(
            looped >= mean_loops and looped % mean_loops == 0, "--mean-loops", mean_loops,
            f"a divisor of the {looped} looped layers ({layers} effective layers less {outer} of prelude and coda): "
            f"{', '.join(str(d) for d in range(1, looped + 1) if looped % d == 0)}",
        )  # fmt: skip
        return int(looped // mean_loops)


def write_plan(runs: Sequence[PlannedRun], overrides: Sequence[str], folder: Path) -> list[tuple[str, Path]]:
    """Writes one sweep file for each configuration and plan.json; returns (configuration, sweep file).

    Errors: ConfigError where the folder has the plan of other runs, which `collect` would no longer know.
    """
    plan, sweeps = folder / PLAN_NAME, []
    if plan.exists() and read_plan(plan) != list(runs):
        raise ConfigError(f"--out {folder}: its {PLAN_NAME} plans other runs; expected another folder, as `collect` "
                          "takes several plans")  # fmt: skip
    for config in dict.fromkeys(run.config for run in runs):
        own = [run for run in runs if run.config == config]
        path = folder / f"{own[0].size}_{own[0].constraint}.yaml"
        base = " ".join([config, *overrides])
        lines = [f"# {len(own)} runs at equal FLOPs, {own[0].constraint}, of {base}"]
        lines += ["- " + json.dumps(list(run.overrides)) for run in own]
        write_text(path, "\n".join(lines) + "\n")
        sweeps.append((config, path))
    write_text(plan, json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    return sweeps


def read_plan(path: Path) -> list[PlannedRun]:
    """The runs of plan.json. Errors: ConfigError naming the file."""
    try:
        items: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        if not items or not isinstance(items, list):
            raise ValueError("it lists no runs")
        return [PlannedRun(**{**item, "overrides": tuple(item["overrides"])}) for item in items]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--plan {path}: expected the {PLAN_NAME} of `plan`: {error}") from error


def read_plans(paths: Sequence[Path]) -> list[PlannedRun]:
    """The runs of several plans, each once. Errors: ConfigError where two plans mean different runs by one name."""
    runs: dict[str, PlannedRun] = {}
    for path in paths:
        for run in read_plan(path):
            if runs.setdefault(run.name, run) != run:
                raise ConfigError(f"--plan {path}: {run.name} is another run than in the plans before it; "
                                  "collect them apart")  # fmt: skip
    return list(runs.values())


def plan_table(runs: Sequence[PlannedRun], flops_per_sec: float) -> Table:
    """The runs with their costs; `flops_per_sec` is what a GPU reaches, peak times MFU."""
    rows = [
        [
            run.name, run.budget_flops, run.mean_loops, run.core_layers, run.steps, run.tokens, run.flops,
            f"{run.flops / run.budget_flops - 1:+.2%}", f"{run.flops / flops_per_sec / 3600:.3g}",
        ]
        for run in runs
    ]  # fmt: skip
    columns = ["run", "budget", "mean loops", "core layers", "steps", "tokens", "FLOPs", "off by", "GPU hours"]
    return Table(columns, rows, f"Runs at equal FLOPs, {runs[0].constraint}")
