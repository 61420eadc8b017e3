"""One fitter for all laws: Huber loss on log L, L-BFGS from many starts, bootstrap intervals, profile likelihoods.

    S(c) = sum_i rho((ln L_i - ln L(x_i; c)) / delta),   rho(u) = u^2 / 2 below |u| = 1, |u| - 1/2 above

(Hoffmann et al. 2022, section 3.3.) The papers' delta of 1e-3 is kept where losses are that exact; above it delta is
1.345 robust standard deviations of the residuals, where Huber's estimate has 95% of the efficiency of least squares: a
delta far below the noise makes it a fit of absolute values, with 64%. The fitter moves logarithms: of each constant, or
of the size of the whole term for a coefficient. Derivatives are exact, by complex steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.stats import norm, t

from pretrain.errors import ConfigError
from tools.scaling.laws import Law

Floats = NDArray[np.float64]
DELTA = 1e-3
_TUNING = 1.345
_MAD = 1.4826
"""Standard deviation of a normal variable over its median absolute deviation."""
STARTS, BOOTSTRAPS, FOLDS = 64, 200, 6
LEVEL = 0.95
_CHI2_95 = 3.841
"""95% quantile of chi^2 with one degree of freedom."""
_COMPLEX_STEP = 1e-30
_LARGEST_LOG = 300.0
"""Of a coefficient that nothing holds."""
_ROOM = math.log(10)
"""Constants stay within this of the range of their starts, in log: an exponent of 15 does not overflow yet."""


@dataclass(frozen=True)
class Estimate:
    """A fitted constant."""

    value: float
    low: float
    high: float
    """Ends of the 95% bootstrap interval."""
    identified: bool
    """False where the profile likelihood is flat: the constant moved by its resolution, the others make up for it."""


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
    """Ends of the central 95% of `samples`."""
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


class Problem:
    """A law with data, in the coordinates that the fitter moves.

    v_i is ln of constant i; for a coefficient of input^-exponent, ln of the term at the input's geometric mean.
    """

    def __init__(self, law: Law, inputs: Mapping[str, Sequence[float] | Floats], loss: Sequence[float] | Floats,
                 delta: float = DELTA) -> None:  # fmt: skip
        self.law, self.delta = law, delta
        self.inputs = {name: np.asarray(inputs[name], dtype=np.float64) for name in law.inputs}
        self.log_loss = np.log(np.asarray(loss, dtype=np.float64))
        ends = [(math.log(c.low) - _ROOM, math.log(c.high) + _ROOM) for c in law.constants]
        self.low, self.high = (np.array(end) for end in zip(*ends, strict=True))
        self.fixed: dict[str, float] = {}
        """Constants that stay at a value, for profiles."""

    def copy(self, mask: NDArray[np.bool_] | slice = slice(None)) -> Problem:
        """The same problem on some of the points."""
        inputs = {name: values[mask] for name, values in self.inputs.items()}
        return Problem(self.law, inputs, np.exp(self.log_loss[mask]), self.delta)

    def constants(self, v: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The constants at v [..., constants], each [..., 1]."""
        logs = {c.name: v[..., i : i + 1] for i, c in enumerate(self.law.constants)}
        logs |= {name: np.full_like(v[..., :1], math.log(value)) for name, value in self.fixed.items()}
        for c in self.law.constants:
            if c.scales is not None and c.name not in self.fixed:
                name, exponent = c.scales
                logs[c.name] = logs[c.name] + np.exp(logs[exponent]) * np.log(self.inputs[name]).mean()
        return {name: np.exp(value) for name, value in logs.items()}

    def log_model(self, v: Floats) -> tuple[Floats, Floats]:
        """ln L [points] at v and its derivatives [constants, points]."""
        shifted = v + 1j * _COMPLEX_STEP * np.eye(len(v))
        values = np.log(self.law.predict(self.constants(shifted), self.inputs))
        return values[0].real, values.imag / _COMPLEX_STEP

    def objective(self, v: Floats) -> tuple[float, Floats]:
        """S and its gradient at v; v is taken back into its bounds first."""
        inside = np.clip(v, self.low, self.high)
        model, jacobian = self.log_model(inside)
        scaled = (self.log_loss - model) / self.delta
        size = np.abs(scaled)
        value = np.where(size < 1, scaled**2 / 2, size - 0.5).sum()
        gradient = -(jacobian @ np.clip(scaled, -1, 1)) / self.delta
        return float(value), np.where(inside == v, gradient, 0.0)

    def from_start(self, v: Floats) -> tuple[float, Floats]:
        """(S, v) of the local minimum that plain L-BFGS finds from v."""
        bounds = list(zip(self.low, self.high, strict=True))
        found = minimize(self.objective, v, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 200})
        return float(found.fun), np.asarray(found.x)

    def polish(self, v: Floats, triangle: Floats | None = None) -> tuple[float, Floats]:
        """(S, v) of the minimum near v, by L-BFGS in coordinates that the data make equally stiff."""
        scale = self.triangle(v) if triangle is None else triangle

        def whitened(w: Floats) -> tuple[float, Floats]:
            value, gradient = self.objective(v + solve_triangular(scale, w, check_finite=False))
            return value, solve_triangular(scale, gradient, trans=1, check_finite=False)

        options = {"maxiter": 200, "ftol": 1e-10, "gtol": 1e-4}
        found = minimize(whitened, np.zeros_like(v), jac=True, method="L-BFGS-B", options=options)
        return float(found.fun), np.clip(v + solve_triangular(scale, found.x), self.low, self.high)

    def triangle(self, v: Floats) -> Floats:
        """R of J / delta = Q R, with a little of the identity, so that flat directions stay finite."""
        jacobian = self.log_model(v)[1].T / self.delta
        ridge = 1e-5 * np.linalg.norm(jacobian) * np.eye(len(v))
        return np.asarray(np.linalg.qr(np.vstack([jacobian, ridge]), mode="r"))

    def best(self, starts: int, rng: np.random.Generator) -> tuple[float, Floats]:
        """(S, v) of the best of `starts` random starts."""
        lows, highs = (np.log([getattr(c, end) for c in self.law.constants]) for end in ("low", "high"))
        found = [self.from_start(rng.uniform(lows, highs)) for _ in range(starts)]
        nearest = sorted(found, key=lambda item: item[0])[:3]
        return min((self.polish(v) for _, v in nearest), key=lambda item: item[0])


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
        objective, v = problem.polish(v)
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
    model, jacobian = problem.log_model(v)
    residuals = problem.log_loss - model
    runs = np.arange(len(model)).astype(str) if groups is None else np.asarray(groups)
    values = _values(problem, v)
    samples = _bootstrap(problem, v, residuals, jacobian, runs, bootstraps, rng)
    ends = [quantiles(samples[:, i]) for i in range(len(law.names))]
    return Fit(
        law=law,
        constants={
            name: Estimate(values[i], *ends[i], _is_identified(problem, v, objective, residuals, i))
            for i, name in enumerate(law.names)
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
    problem: Problem, v: Floats, residuals: Floats, jacobian: Floats, groups: NDArray[Any], count: int,
    rng: np.random.Generator,
) -> Floats:  # fmt: skip
    """Constants of fits to the fitted losses with new noise, [count, constants].

    Noise is normal with the standard deviation of the residuals. Where runs have several points, which err together, it
    is each run's residuals times one normal number, after a division by sqrt(1 - leverage): a fit pulls itself towards
    its points. Few points know their noise badly, so deviations are stretched by Student's t over the normal quantile.
    """
    basis = np.linalg.qr(jacobian.T)[0]
    inflated = residuals / np.sqrt(1 - np.minimum((basis**2).sum(1), 0.9))
    unique, member = np.unique(groups, return_inverse=True)
    alone = len(unique) == len(groups)
    model, triangle, noise = problem.log_loss - residuals, problem.triangle(v), _noise(residuals, len(v))
    stretch = t.ppf((1 + LEVEL) / 2, max(1, len(unique) - len(v))) / norm.ppf((1 + LEVEL) / 2)
    again, center = problem.copy(), np.log(_values(problem, v))
    samples = np.empty((count, len(v)))
    for sample in samples:
        drawn = rng.standard_normal(len(unique))
        again.log_loss = model + (noise * drawn if alone else inflated * drawn[member])
        sample[:] = np.log(_values(again, again.polish(v, triangle)[1]))
    return np.exp(np.clip(center + stretch * (samples - center), -_LARGEST_LOG, _LARGEST_LOG))


def _is_identified(problem: Problem, v: Floats, best: float, residuals: Floats, index: int) -> bool:
    """Whether the profile likelihood of a constant rises beyond its 95% bound on both sides within its resolution.

    S is no likelihood; its rise is chi^2 / 2 times E[psi^2] / E[psi'], as for any M-estimator (Huber 1981, ch. 6).
    """
    scaled = residuals / problem.delta
    width = max(1.0, float(np.median(np.abs(scaled))) * _MAD)
    share_inside = np.mean(np.abs(scaled) < width) / width
    if share_inside == 0:
        return False
    freedom = len(scaled) / (len(scaled) - len(v))
    allowed = _CHI2_95 / 2 * freedom * float(np.mean(np.clip(scaled, -1, 1) ** 2)) / share_inside
    constant = problem.law.constants[index]
    value = _values(problem, v)[index]
    for factor in (constant.resolution, 1 / constant.resolution):
        moved = problem.copy()
        moved.fixed = {constant.name: value * factor}
        if moved.polish(v)[0] - best <= max(allowed, 1e-9):
            return False
    return True


def _held_out(problem: Problem, v: Floats, groups: NDArray[Any]) -> float | None:
    """RMS error in log of points left out of the fit, whole runs at a time."""
    errors = [error for train, test in _folds(groups, len(v)) for error in _errors(problem, v, train, test)]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else None


def _folds(groups: NDArray[Any], num_constants: int) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    unique, member = np.unique(groups, return_inverse=True)
    fold_of = np.random.default_rng(0).permutation(len(unique)) % FOLDS
    for fold in range(min(FOLDS, len(unique))):
        test = fold_of[member] == fold
        if test.any() and (~test).sum() > num_constants:
            yield ~test, test


def _errors(problem: Problem, v: Floats, train: NDArray[np.bool_], test: NDArray[np.bool_]) -> Floats:
    seen, unseen = problem.copy(train), problem.copy(test)
    # Terms are scaled at the inputs' means, which differ a little between the parts.
    constants = constants_at(seen, seen.polish(v)[1])
    return unseen.log_loss - np.log(problem.law.predict(constants, unseen.inputs))


def relative_error(law: Law, constants: Mapping[str, float], inputs: Mapping[str, Sequence[float] | Floats],
                   loss: Sequence[float] | Floats) -> float:  # fmt: skip
    """RMS of ln L measured - ln L predicted."""
    values = {name: np.asarray(x, dtype=np.float64) for name, x in inputs.items()}
    errors = np.log(np.asarray(loss, dtype=np.float64)) - np.log(law.predict(constants, values))
    return float(np.sqrt(np.mean(errors**2)))
