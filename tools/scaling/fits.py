"""What `fit` finds in a table: optima, exponents, laws and test-time curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pretrain.errors import ConfigError
from tools.scaling.collect import Row
from tools.scaling.fitting import BOOTSTRAPS, STARTS, Fit, constants_at, fit, relative_error, solve
from tools.scaling.isoflop import Curve, Exponents, Optimum, find_optimum, fit_exponents
from tools.scaling.laws import (
    EXPONENTIAL,
    ISO_DEPTH,
    PARAMETRIC,
    TEST_TIME_LAWS,
    UNIFIED,
    UNIFIED_LEARNED,
    UNIFIED_UNSCALED,
    Law,
)
from tools.scaling.readings import READINGS

LAW_GROUPS: dict[str, tuple[Law, ...]] = {
    "parametric": (PARAMETRIC,),
    "unified": (UNIFIED, UNIFIED_LEARNED, UNIFIED_UNSCALED),
    "iso_depth": (ISO_DEPTH,),
}
CHOICES = ("iso_flop", *LAW_GROUPS, "test_time")
ALL_SIZES = "all sizes"
MIN_TEST_LOOPS = 6
"""Loop counts of a test-time curve: the largest laws have three constants, and the held-out part needs some too."""


@dataclass(frozen=True)
class Settings:
    """How to fit."""

    readings: tuple[str, ...] = tuple(READINGS)
    """Of N."""
    delta: float | None = None
    """Of the Huber loss. None: from the residuals."""
    starts: int = STARTS
    bootstraps: int = BOOTSTRAPS
    seed: int = 0


@dataclass(frozen=True)
class LawFit:
    """A law fitted to the runs of one size, or of all."""

    size: str
    reading: str
    runs: tuple[str, ...]
    """The run of each residual."""
    fit: Fit

    @property
    def label(self) -> str:
        """A name that is unique among the fits of a table."""
        return f"{self.fit.law.name}, {self.size}, N: {self.reading}"


@dataclass(frozen=True)
class TestTime:
    """The test-time laws on one run's losses by loop count."""

    __test__ = False  # no test class

    run: str
    mean_loops: float
    num_loops: tuple[int, ...]
    loss: tuple[float, ...]
    seen_loops: int
    """The out-of-sample fits see loop counts up to this one: mu, or more where fewer than five are below."""
    in_sample: dict[str, float]
    """RMS relative error by law, fitted to all loop counts."""
    out_of_sample: dict[str, float]
    """The same beyond `seen_loops`, by law."""
    exponential: Fit
    """To all loop counts."""

    @property
    def above_floor(self) -> float | None:
        """L(T = mu) - L_inf in nats (Parcae, table 13); None where the run was not evaluated at mu."""
        at_mean = [loss for t, loss in zip(self.num_loops, self.loss, strict=True) if t == round(self.mean_loops)]
        return at_mean[0] - self.exponential.constants["L_inf"].value if at_mean else None

    @property
    def relative_gap(self) -> float | None:
        """|L(T = mu) - L_inf| / L(T = mu)."""
        gap = self.above_floor
        return None if gap is None else abs(gap) / (self.exponential.constants["L_inf"].value + gap)


@dataclass
class Fits:
    """Everything that was fitted, and what could not be."""

    optima: list[tuple[str, Optimum]] = field(default_factory=list)
    """With their constraint."""
    exponents: dict[str, Exponents] = field(default_factory=dict)
    """By constraint."""
    laws: list[LawFit] = field(default_factory=list)
    test_time: list[TestTime] = field(default_factory=list)
    not_fitted: list[str] = field(default_factory=list)
    """What was left out and why."""

    def attempt(self, step: Callable[[], None]) -> None:
        """Runs a step; what it refuses becomes an entry of `not_fitted`."""
        try:
            step()
        except ConfigError as error:
            self.not_fitted.append(str(error))


def fit_table(rows: Sequence[Row], wanted: Sequence[str] = CHOICES, settings: Settings | None = None) -> Fits:
    """Fits what `wanted` names (of `CHOICES`); what the table does not allow is in `not_fitted`, with the reason.

    Errors: ConfigError where nothing at all could be fitted.
    """
    settings, fits = settings or Settings(), Fits()
    if "iso_flop" in wanted:
        _fit_iso_flop([row for row in rows if row.at_mean], fits, settings)
    for group, laws in LAW_GROUPS.items():
        for law in laws if group in wanted else ():
            _fit_law(law, rows, fits, settings)
    if "test_time" in wanted:
        for run in dict.fromkeys(row.run for row in rows):
            curve = [row for row in rows if row.run == run]
            fits.attempt(lambda curve=curve: fits.test_time.append(_fit_test_time(curve, settings)))  # type: ignore[misc]
    if not (fits.optima or fits.laws or fits.test_time):
        raise ConfigError("fit: nothing could be fitted: " + "; ".join(fits.not_fitted))
    return fits


def curves(rows: Sequence[Row]) -> list[tuple[str, Curve]]:
    """The iso-FLOP curves of losses at the mean loops, each with its constraint; runs without a plan are in none."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        if row.constraint is not None and row.budget_flops is not None and row.at_mean:
            groups.setdefault((row.constraint, row.size, row.budget_flops), []).append(row)
    return [
        (constraint, Curve.of(size, flops, [row.mean_loops for row in own], [row.tokens for row in own],
                              [row.loss for row in own]))
        for (constraint, size, flops), own in groups.items()
    ]  # fmt: skip


def _fit_iso_flop(rows: Sequence[Row], fits: Fits, settings: Settings) -> None:
    found = curves(rows)
    if not found:
        fits.not_fitted.append("iso_flop: no budgets in the table: give `collect` the --plan of the runs")
    for constraint, curve in found:
        fits.attempt(
            lambda constraint=constraint, curve=curve: fits.optima.append((constraint, find_optimum(curve)))  # type: ignore[misc]
        )
    for constraint in dict.fromkeys(name for name, _ in fits.optima):
        own = [optimum for name, optimum in fits.optima if name == constraint]
        try:
            fits.exponents[constraint] = fit_exponents(own, settings.bootstraps, settings.seed)
        except ConfigError as error:
            fits.not_fitted.append(f"{constraint}: {error}")


def _fit_law(law: Law, rows: Sequence[Row], fits: Fits, settings: Settings) -> None:
    """One law by size and reading. The iso-depth law is one across sizes; others also get a fit of all sizes."""
    sizes = list(dict.fromkeys(row.size for row in rows))
    groups = {} if law is ISO_DEPTH else {size: [row for row in rows if row.size == size] for size in sizes}
    if len(sizes) > 1 or law is ISO_DEPTH:
        groups[ALL_SIZES] = list(rows)
    every_loop = "num_loops" in law.inputs
    for size, own in groups.items():
        points = [row for row in own if every_loop or row.at_mean]
        for reading in settings.readings:
            try:
                fits.laws.append(_law_fit(law, size, points, reading, settings))
            except ConfigError as error:
                fits.not_fitted.append(f"{size}: {error}")
                break  # another reading has as few points


def _law_fit(law: Law, size: str, points: Sequence[Row], reading: str, settings: Settings) -> LawFit:
    inputs = law_inputs(points, reading)
    runs = tuple(row.run for row in points)
    found = fit(
        law, {name: inputs[name] for name in law.inputs}, [row.loss for row in points], groups=runs,
        delta=settings.delta, starts=settings.starts, bootstraps=settings.bootstraps, seed=settings.seed,
    )  # fmt: skip
    return LawFit(size, reading, runs, found)


def law_inputs(rows: Sequence[Row], reading: str) -> dict[str, list[float]]:
    """Every input that a law may take, by row, with N by `reading`."""
    return {
        "params": [row.parameters.unrolled(reading, row.mean_loops) for row in rows],
        "once_params": [float(row.parameters.once(reading)) for row in rows],
        "recurrent_params": [float(row.params_recurrent) for row in rows],
        "tokens": [float(row.tokens) for row in rows],
        "mean_loops": [row.mean_loops for row in rows],
        "num_loops": [float(row.num_loops) for row in rows],
    }


def _fit_test_time(rows: Sequence[Row], settings: Settings) -> TestTime:
    run, mean_loops = rows[0].run, rows[0].mean_loops
    points = sorted((row.num_loops, row.loss) for row in rows)
    if len(points) < MIN_TEST_LOOPS:
        raise ConfigError(
            f"test_time: {run} was evaluated at {len(points)} loop counts: expected at least {MIN_TEST_LOOPS}, such as "
            "validation.num_loops=[1,2,3,4,6,8,12,16]"
        )
    loops, loss = [float(t) for t, _ in points], [value for _, value in points]
    seen = max(sum(t <= mean_loops for t in loops), min(MIN_TEST_LOOPS - 1, len(points) - 1))
    in_sample: dict[str, float] = {}
    out_of_sample: dict[str, float] = {}
    for law in TEST_TIME_LAWS:
        for errors, fitted, measured in (
            (in_sample, slice(None), slice(None)), (out_of_sample, slice(seen), slice(seen, None)),
        ):  # fmt: skip
            if loops[measured]:
                problem, _, v = solve(
                    law, {"num_loops": loops[fitted]}, loss[fitted], delta=settings.delta, starts=settings.starts
                )
                inputs = {"num_loops": loops[measured]}
                errors[law.name] = relative_error(law, constants_at(problem, v), inputs, loss[measured])
    exponential = fit(EXPONENTIAL, {"num_loops": loops}, loss, delta=settings.delta, starts=settings.starts,
                      bootstraps=settings.bootstraps, seed=settings.seed)  # fmt: skip
    return TestTime(run, mean_loops, tuple(t for t, _ in points), tuple(loss), int(loops[seen - 1]), in_sample,
                    out_of_sample, exponential)  # fmt: skip
