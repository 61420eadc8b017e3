"""One fitter for all laws: the least Huber loss on log L, bootstrap intervals, profile likelihoods, held-out errors.

The papers' delta of 1e-3 (Hoffmann et al. 2022) is kept where losses are that exact; above it delta is 1.345 robust
standard deviations of the residuals, where Huber's estimate has 95% of the efficiency of least squares: a delta far
below the noise makes it a fit of absolute values, with 64%. The search is that of problem.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

from pretrain.errors import ConfigError
from tools.scaling.laws import Law
from tools.scaling.problem import DELTA, Floats, Problem

_TUNING = 1.345
_MAD = 1.4826
"""Standard deviation of a normal variable over its median absolute deviation."""
STARTS, BOOTSTRAPS, FOLDS = 8, 200, 6
LEVEL = 0.95
_CHI2_95 = 3.841
"""95% quantile of chi^2 with one degree of freedom."""
_LARGEST_LOG = 300.0
"""Of a coefficient that nothing holds."""


@dataclass(frozen=True)
class Estimate:
    """A fitted constant."""

    value: float
    low: float
    high: float
    """Ends of the 95% bootstrap interval."""
    identified: bool
    """False where the profile likelihood is flat: the constant moved by its resolution, the others make up for it; and
    at an end of the searched range."""


@dataclass(frozen=True)
class Fit:
    """A law's constants from data."""

    law: Law
    constants: dict[str, Estimate]
    samples: Floats
    """Constants of the bootstrap fits, [bootstraps, constants]."""
    residuals: Floats
    """ln L measured - ln L fitted, by point."""
    objective: float
    """S at the best fit, times delta^2: the sum that papers report."""
    delta: float
    noise: float
    """RMS residual, with the constants' degrees of freedom taken off: the relative error of a loss."""
    held_out: float | None
    """RMS of ln L measured - predicted over points that the fit did not see, by folds; None with too few."""
    ranges: dict[str, tuple[float, float]]
    """Smallest and largest value of each input."""

    @property
    def values(self) -> dict[str, float]:
        """The constants alone."""
        return {name: estimate.value for name, estimate in self.constants.items()}

    @property
    def unidentified(self) -> list[str]:
        """Names of the constants that the data do not identify."""
        return [name for name, estimate in self.constants.items() if not estimate.identified]


def quantiles(samples: Floats) -> tuple[float, float]:
    """Ends of an interval that holds another draw in 95% of cases; wider than the middle 95% of few samples."""
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="weibull")
    return float(low), float(high)


def solve(
    law: Law, inputs: Mapping[str, Sequence[float] | Floats], loss: Sequence[float] | Floats, *,
    delta: float | None = None, starts: int = STARTS, rng: np.random.Generator | None = None,
) -> tuple[Problem, float, Floats]:  # fmt: skip
    """(problem with its delta, S, v) of the best fit; delta None is found from the residuals.

    Errors: ConfigError where there are not more points than constants, or an input of the law never changes.
    """
    problem = Problem(law, inputs, loss, DELTA if delta is None else delta)
    _check(problem)
    objective, v = problem.best(starts, np.random.default_rng(0) if rng is None else rng)
    if delta is None:
        residuals = problem.log_loss - problem.log_model(v)[0]
        freedom = len(residuals) / (len(residuals) - len(v))
        spread = float(np.median(np.abs(residuals))) * _MAD * math.sqrt(freedom)
        problem.delta = max(DELTA, _TUNING * spread)
        values, fitted = problem.minima(v[None])
        objective, v = float(values[0]), fitted[0]
    return problem, objective, v


def fit(
    law: Law, inputs: Mapping[str, Sequence[float] | Floats], loss: Sequence[float] | Floats, *,
    groups: Sequence[str] | None = None, delta: float | None = None, starts: int = STARTS,
    bootstraps: int = BOOTSTRAPS, seed: int = 0,
) -> Fit:  # fmt: skip
    """The law's constants with 95% intervals, residuals and held-out error.

    `groups` names the run of each point: folds and bootstrap keep a run's points together. Errors: as for `solve`.
    """
    rng = np.random.default_rng(seed)
    problem, objective, v = solve(law, inputs, loss, delta=delta, starts=starts, rng=rng)
    residuals = problem.log_loss - problem.log_model(v)[0]
    runs = np.arange(len(residuals)).astype(str) if groups is None else np.asarray(groups)
    values = _values(problem, v)
    samples = _bootstrap(problem, v, residuals, runs, bootstraps, rng)
    ends = [quantiles(samples[:, i]) for i in range(len(law.names))]
    identified = _identified(problem, v, objective, residuals)
    return Fit(
        law=law,
        constants={
            name: Estimate(values[i], *ends[i], identified[i]) for i, name in enumerate(law.names)
        },
        samples=samples, residuals=residuals, objective=objective * problem.delta**2, delta=problem.delta,
        noise=_noise(residuals, len(v)), held_out=_held_out(problem, v, runs),
        ranges={name: (float(x.min()), float(x.max())) for name, x in problem.inputs.items()},
    )  # fmt: skip


def constants_at(problem: Problem, v: Floats) -> dict[str, float]:
    """The constants at v, in order."""
    constants = problem.constants(v)
    return {name: float(constants[name][0]) for name in problem.law.names}


def _values(problem: Problem, v: Floats) -> list[float]:
    return list(constants_at(problem, v).values())


def _check(problem: Problem) -> None:
    law, points = problem.law, len(problem.log_loss)
    if points <= len(law.constants):
        raise ConfigError(
            f"{law.name}: {points} losses for {len(law.constants)} constants ({law.formula}): expected at least "
            f"{len(law.constants) + 1}; plan more runs, or fit a law with fewer constants"
        )
    if not np.isfinite(problem.log_loss).all():
        raise ConfigError(f"{law.name}: a loss is not a positive number: leave diverged runs out (collect does)")
    for name in law.varied:
        values = problem.inputs[name]
        if np.ptp(values) == 0:
            raise ConfigError(
                f"{law.name}: {name} is {values[0]:g} in every run: expected runs that differ in it, since "
                f"{law.formula} cannot be told apart otherwise"
            )


def _noise(residuals: Floats, num_constants: int) -> float:
    return float(np.sqrt((residuals**2).sum() / (len(residuals) - num_constants)))


def _bootstrap(
    problem: Problem, v: Floats, residuals: Floats, groups: NDArray[Any], count: int, rng: np.random.Generator
) -> Floats:
    """Constants of fits to the fitted losses with new noise, [count, constants].

    Noise is normal with the standard deviation of the residuals; where runs have several losses, these share a part of
    it, one number for each run, as large as the correlation of residuals within runs says. Few points know their noise
    badly, so deviations are stretched by Student's t over the normal quantile, for as many points as are independent.
    """
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    noise, correlation = _noise(residuals, len(v)), _correlation_within(residuals, member, sizes)
    independent = (sizes / (1 + (sizes - 1) * correlation)).sum()
    stretch = t.ppf((1 + LEVEL) / 2, max(1, independent - len(v))) / norm.ppf((1 + LEVEL) / 2)
    of_run, of_loss = rng.standard_normal((count, len(sizes))), rng.standard_normal((count, len(residuals)))
    drawn = math.sqrt(correlation) * of_run[:, member] + math.sqrt(1 - correlation) * of_loss
    _, refitted = problem.minima(np.tile(v, (count, 1)), problem.log_loss - residuals + noise * drawn)
    constants = problem.constants(refitted)
    samples, center = np.log([constants[name][:, 0] for name in problem.law.names]).T, np.log(_values(problem, v))
    return np.exp(np.clip(center + stretch * (samples - center), -_LARGEST_LOG, _LARGEST_LOG))


def _correlation_within(residuals: Floats, member: NDArray[Any], sizes: NDArray[Any]) -> float:
    """Mean product of two residuals of a run over the mean square, in [0, 1]; 0 where every run has one."""
    pairs = (sizes * (sizes - 1)).sum()
    if not pairs:
        return 0.0
    products = (np.bincount(member, residuals) ** 2).sum() - (residuals**2).sum()
    return float(np.clip(products / pairs / np.mean(residuals**2), 0, 1)) if residuals.any() else 0.0


def _identified(problem: Problem, v: Floats, best: float, residuals: Floats) -> list[bool]:
    """Whether each constant's profile likelihood rises beyond its 95% bound on both sides within its resolution.

    A constant at an end of the searched range is not identified either: the data ask for more than it allows.
    S is no likelihood; its rise is chi^2 / 2 times E[psi^2] / E[psi'], as for any M-estimator (Huber 1981, ch. 6).
    """
    scaled = residuals / problem.delta
    width = max(1.0, float(np.median(np.abs(scaled))) * _MAD)
    share_inside = np.mean(np.abs(scaled) < width) / width
    if share_inside == 0:
        return [False] * len(v)
    freedom = len(scaled) / (len(scaled) - len(v))
    allowed = _CHI2_95 / 2 * freedom * float(np.mean(np.clip(scaled, -1, 1) ** 2)) / share_inside
    resolution = np.log([constant.resolution for constant in problem.law.constants])
    fixed = np.full((2, len(v), len(v)), np.nan)
    each = np.arange(len(v))
    fixed[:, each, each] = np.log(_values(problem, v)) + np.stack([resolution, -resolution])
    values, _ = problem.minima(np.tile(v, (2 * len(v), 1)), fixed=fixed.reshape(-1, len(v)))
    inside = (v > problem.low + 1e-6) & (v < problem.high - 1e-6)
    found: list[bool] = (inside & (values.reshape(2, -1) - best > max(allowed, 1e-9)).all(0)).tolist()
    return found


def _held_out(problem: Problem, v: Floats, groups: NDArray[Any]) -> float | None:
    """RMS error in log of points left out of the fit, whole runs at a time; None where too few are left."""
    unique, member = np.unique(groups, return_inverse=True)
    folds = np.arange(min(FOLDS, len(unique)))
    fold_of = np.random.default_rng(0).permutation(len(unique)) % FOLDS
    seen = fold_of[member] != folds[:, None]
    seen = seen[(seen.sum(1) > len(v)) & ~seen.all(1)]
    if not len(seen):
        return None
    _, fitted = problem.minima(np.tile(v, (len(seen), 1)), weights=seen.astype(np.float64))
    errors = problem.log_loss - problem.log_model(fitted)[0]
    return float(np.sqrt(np.mean(errors[~seen] ** 2)))


def relative_error(law: Law, constants: Mapping[str, float], inputs: Mapping[str, Sequence[float] | Floats],
                   loss: Sequence[float] | Floats) -> float:  # fmt: skip
    """RMS of ln L measured - ln L predicted."""
    values = {name: np.asarray(x, dtype=np.float64) for name, x in inputs.items()}
    errors = np.log(np.asarray(loss, dtype=np.float64)) - np.log(law.predict(constants, values))
    return float(np.sqrt(np.mean(errors**2)))
