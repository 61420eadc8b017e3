"""Predictions from fitted or published constants, each with an interval and a note where it extrapolates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pretrain.accounting import model_flops
from pretrain.config.bounds import require
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.planning import expected_work
from tools.scaling.fits import Fits, LawFit
from tools.scaling.fitting import Fit, Floats, quantiles
from tools.scaling.laws import Law
from tools.scaling.published import PUBLISHED, Published
from tools.scaling.readings import Size
from tools.scaling.store import FITS_NAME, read_fits

MAX_LOOPS = 64
"""Mean loops and loops at inference are searched up to here."""
_FLAT = 1e-3
"""Nats above the floor at which further loops are not worth counting."""


@dataclass(frozen=True)
class Prediction:
    """A number with its 95% interval."""

    value: float
    low: float | None
    high: float | None
    """None: no interval is known."""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        interval = "no interval" if self.low is None else f"{self.low:.4g} to {self.high:.4g}"
        return f"{self.value:.4g} ({interval})" + "".join(f"\n  note: {note}" for note in self.notes)


@dataclass(frozen=True)
class Constants:
    """A law ready to predict, whether fitted here or published."""

    name: str
    law: Law
    values: Mapping[str, float]
    samples: Floats
    """Bootstrap constants, [samples, constants]; none for published ones."""
    relative_error: float | None
    """Of a loss the constants were not fitted to."""
    ranges: Mapping[str, tuple[float, float]]
    reading: str
    notes: tuple[str, ...] = ()

    @classmethod
    def fitted(cls, item: LawFit) -> Constants:
        """Of a fit."""
        found: Fit = item.fit
        notes = [f"not identified by the data: {', '.join(found.unidentified)}"] if found.unidentified else []
        return cls(item.label, found.law, found.values, found.samples, found.held_out, found.ranges, item.reading,
                   tuple(notes))  # fmt: skip

    @classmethod
    def published(cls, name: str, item: Published, reading: str) -> Constants:
        """Of a paper. Errors: ConfigError where it leaves a constant out."""
        missing = [constant for constant in item.law.names if constant not in item.constants]
        if missing:
            raise ConfigError(f"--from {name}: expected all constants; {', '.join(missing)} not in {item.source}")
        none = np.empty((0, len(item.law.names)))
        return cls(name, item.law, item.constants, none, item.held_out, item.ranges, reading, (item.source,))

    def losses(self, inputs: Mapping[str, float | Floats]) -> tuple[Floats, Floats]:
        """(losses [points], bootstrap losses [samples, points])."""
        columns = {name: self.samples[:, i : i + 1] for i, name in enumerate(self.law.names)}
        points = {name: np.atleast_1d(np.asarray(inputs[name], dtype=np.float64)) for name in self.law.inputs}
        with np.errstate(over="ignore"):  # a refit may put an exponent that nothing holds anywhere
            return self.law.predict(self.values, points), self.law.predict(columns, points)

    def extrapolations(self, inputs: Mapping[str, float]) -> list[str]:
        """A note for each input outside of the data."""
        known = {name: ends for name, ends in self.ranges.items() if name in inputs}
        return [
            f"extrapolates: {name} = {inputs[name]:.4g}, the data cover {low:.4g} to {high:.4g}"
            for name, (low, high) in known.items() if not low * 0.999 <= inputs[name] <= high * 1.001
        ]  # fmt: skip


def constants_from(source: str, law: str | None, size: str | None, reading: str) -> Constants:
    """The constants that `--from` means: a published name, or a fits.json with a law, a size and a reading of N.

    Errors: ConfigError listing what there is, also where several fits are meant.
    """
    if source in PUBLISHED:
        only = PUBLISHED[source].law.name
        require(law in (None, only), "--law", law, f"none, or {only}, the law of --from {source}")
        require(size is None, "--size", size, f"none with --from {source}: it has one set of constants")
        return Constants.published(source, PUBLISHED[source], reading)
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"--from {source}: expected a {FITS_NAME} of `fit`, or one of {', '.join(PUBLISHED)}")
    fits = read_fits(path)
    found = [
        item for item in fits.laws
        if item.reading == reading and law in (None, item.fit.law.name) and size in (None, item.size)
    ]  # fmt: skip
    if not found:
        raise ConfigError(
            f"--from {source}: no fit of law {law or 'any'}, size {size or 'any'}, N {reading}; the file has "
            + ("; ".join(item.label for item in fits.laws) or "no laws")
        )
    if len(found) > 1:
        several = "; ".join(item.label for item in found)
        raise ConfigError(f"--from {source}: expected one fit, {len(found)} match: {several}; give --law and --size")
    return Constants.fitted(found[0])


def inputs_of(cfg: Config, reading: str, mean_loops: float, tokens: float, num_loops: float) -> dict[str, float]:
    """Every input that a law may take, of a model."""
    size = Size.of(cfg.model)
    return {
        "params": size.unrolled(reading, mean_loops), "once_params": size.once(reading),
        "recurrent_params": size.params_recurrent, "tokens": tokens, "mean_loops": mean_loops, "num_loops": num_loops,
    }  # fmt: skip


def predict_loss(
    constants: Constants, cfg: Config, mean_loops: float, tokens: float, num_loops: float | None
) -> Prediction:
    """Loss of `cfg` trained at mu on D tokens and evaluated at T loops (None: mu).

    Errors: ConfigError where T is below 1 or asked of a law without it.
    """
    require(num_loops is None or 1 <= num_loops < math.inf, "--num-loops", num_loops, "a number >= 1")
    if num_loops is not None and "num_loops" not in constants.law.inputs:
        require(
            num_loops == mean_loops, "--num-loops", num_loops,
            f"none, or the mean loops: {constants.law.formula} predicts T = mu alone; use a unified law",
        )  # fmt: skip
    loops = mean_loops if num_loops is None else num_loops
    return loss_at(constants, inputs_of(cfg, constants.reading, mean_loops, tokens, loops))


def loss_at(constants: Constants, inputs: Mapping[str, float]) -> Prediction:
    """Loss for all inputs that the law takes."""
    value, samples = constants.losses(inputs)
    return _prediction(float(value[0]), samples[:, 0], constants, inputs)


def _prediction(value: float, samples: Floats, constants: Constants, inputs: Mapping[str, float]) -> Prediction:
    """The interval holds the constants' uncertainty, and, where it is known, the error of a run that was not fitted."""
    low, high = quantiles(samples) if len(samples) else (value, value)
    error = 1.96 * (constants.relative_error or 0) * value
    notes = [*constants.notes, *constants.extrapolations(inputs)]
    if not len(samples) and not error:
        return Prediction(value, None, None, notes)
    down, up = np.hypot(value - low, error), np.hypot(high - value, error)
    return Prediction(value, float(value - down), float(value + up), notes)


@dataclass(frozen=True)
class BestForBudget:
    """What to train for a budget."""

    mean_loops: Prediction
    tokens: Prediction
    loss: Prediction


def best_for_budget(constants: Constants, cfg: Config, flops: float) -> BestForBudget:
    """The mean loops and tokens that minimise the law at `flops`, for the model of `cfg` at fixed parameters.

    Searched over whole and half loops from 1 to `MAX_LOOPS`; T = mu.
    """
    require(0 < flops < math.inf, "--flops", flops, "FLOPs of a run, > 0")
    loops = np.arange(1, MAX_LOOPS + 0.5, 0.5)
    tokens = flops / _flops_per_token(cfg, loops)
    size = Size.of(cfg.model)
    inputs = {
        "params": size.once(constants.reading) + loops * size.params_recurrent,
        "once_params": np.full_like(loops, size.once(constants.reading)),
        "recurrent_params": np.full_like(loops, size.params_recurrent), "tokens": tokens, "mean_loops": loops,
        "num_loops": loops,
    }  # fmt: skip
    value, samples = constants.losses(inputs)
    best, bests = int(value.argmin()), samples.argmin(1)
    notes = ["at the end of the searched loops: the law has no optimum here"] if best in (0, len(loops) - 1) else []
    at_best = {name: float(column[best]) for name, column in inputs.items()}
    loss = _prediction(float(value[best]), samples[:, best], constants, at_best)

    def of(column: Floats) -> Prediction:
        low, high = quantiles(column[bests]) if len(bests) else (None, None)
        return Prediction(float(column[best]), low, high, notes)

    return BestForBudget(of(loops), of(tokens), loss)


def _flops_per_token(cfg: Config, loops: Floats) -> Floats:
    """Training FLOPs per token at mean loops, linear between whole ones."""
    whole = np.arange(1, MAX_LOOPS + 1)
    costs = []
    for mean_loops in whole:
        distribution = "fixed" if mean_loops == 1 else cfg.model.recurrence.distribution
        bound = cfg.model.recurrence.max_loops
        recurrence = replace(
            cfg.model.recurrence, mean_loops=float(mean_loops), backprop_loops=None, distribution=distribution,
            max_loops=bound if bound is None or bound >= mean_loops else None,  # no run has a bound below its mean
        )  # fmt: skip
        own = replace(cfg, model=replace(cfg.model, recurrence=recurrence))
        costs.append(model_flops(own.model, expected_work(own)) / own.tokens_per_step)
    return np.asarray(np.interp(loops, whole, costs))


def best_by_curves(fits: Fits, flops: float) -> list[tuple[str, Prediction, Prediction]]:
    """(constraint and size, mu*, D*) by the power laws of the iso-FLOP optima."""
    found = []
    for constraint, e in fits.exponents.items():
        for size, (low, high) in e.budgets.items():
            loops, tokens = e.optimum(size, flops)
            notes = [] if low <= flops <= high else [f"extrapolates: the budgets are {low:.3g} to {high:.3g} FLOPs"]
            found.append((f"{constraint}, {size}", Prediction(*loops, notes), Prediction(*tokens, notes)))
    return found


@dataclass(frozen=True)
class Latency:
    """Time of one token or batch at inference: `once_ms` plus `loop_ms` per loop."""

    once_ms: float
    loop_ms: float

    def loops_within(self, budget_ms: float) -> int:
        """The most loops that fit. Errors: ConfigError where none does."""
        require(self.loop_ms > 0, "--ms-per-loop", self.loop_ms, "the measured milliseconds of a loop, > 0")
        require(self.once_ms >= 0, "--ms-once", self.once_ms, "the measured milliseconds of all but the loops, >= 0")
        require(math.isfinite(budget_ms), "--latency-ms", budget_ms, "milliseconds")
        loops = int((budget_ms - self.once_ms) / self.loop_ms + 1e-9)
        require(
            loops >= 1, "--latency-ms", budget_ms, f"at least {self.once_ms + self.loop_ms:g}, what one loop takes",
        )  # fmt: skip
        return loops


def loops_for_loss(constants: Constants, inputs: Mapping[str, float], target: float) -> Prediction:
    """The fewest loops at inference whose loss is at most `target`.

    Errors: ConfigError where the law has no T, or its floor is above the target.
    """
    loops, value, samples = _by_loops(constants, inputs)
    reached = value <= target
    if not reached.any():
        raise ConfigError(
            f"--target-loss {target:g}: expected at least {value[-1]:.4f}, this model's loss at {MAX_LOOPS} loops; "
            "more tokens or parameters lower it"
        )
    first = float(loops[int(reached.argmax())])
    counts = [float(loops[int(row.argmax())]) for row in samples <= target if row.any()]
    never = 1 - len(counts) / max(1, len(samples))
    notes = [*constants.notes, *constants.extrapolations({**inputs, "num_loops": first})]
    notes += [f"{never:.0%} of the bootstrap fits never reach it"] if never else []
    low, high = quantiles(np.array(counts)) if counts else (None, None)
    return Prediction(first, low, high, notes)


def useful_loops(constants: Constants, inputs: Mapping[str, float]) -> int:
    """The fewest loops whose loss is within 0.001 nats of the floor."""
    loops, value, _ = _by_loops(constants, inputs)
    return int(loops[int((value <= value[-1] + _FLAT).argmax())])


def _by_loops(constants: Constants, inputs: Mapping[str, float]) -> tuple[Floats, Floats, Floats]:
    if "num_loops" not in constants.law.inputs:
        raise ConfigError(
            f"{constants.name}: {constants.law.formula} does not know the loops at inference: use --law unified, or "
            "--run for one run's test-time curve"
        )
    loops = np.arange(1.0, MAX_LOOPS + 1)
    columns: dict[str, float | Floats] = {**inputs, "num_loops": loops}
    value, samples = constants.losses(columns)
    return loops, value, samples


def curve_constants(fits: Fits, run: str) -> Constants:
    """The exponential of one run's test-time curve. Errors: ConfigError listing the runs."""
    names: Sequence[str] = [item.run for item in fits.test_time]
    if run not in names:
        raise ConfigError(f"--run {run}: no test-time curve; there are {', '.join(names) or 'none'}")
    found = fits.test_time[names.index(run)].exponential
    notes = (f"not identified: {', '.join(found.unidentified)}",) if found.unidentified else ()
    return Constants(run, found.law, found.values, found.samples, None, found.ranges, "", notes)
