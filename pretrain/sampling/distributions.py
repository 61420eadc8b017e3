"""The law of the loop count T, as a table that turns a uniform number into a loop count.

A table holds P(T <= t) for t = 1, 2, ... up to the last value below 1. The tables that need exp or
ln are computed in 40-digit decimal arithmetic, whose exp and ln are correctly rounded, and then
rounded to float64: the C library's exp may differ in the last bit between machines, and then two
ranks could disagree about a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Distribution = Literal["poisson", "lognormal_poisson", "uniform", "fixed"]
Curriculum = Literal["none", "linear", "one_minus_sqrt"]

_DECIMAL = Context(prec=40, Emin=-999_999, Emax=999_999)
# The normal variable behind the log-normal rate is put on a grid of step 1/8 over +-6 standard
# deviations; what lies outside has probability 2e-9. Against a grid of step 1/64 the table moves by
# 3e-10 at sigma 0.5 and by 7e-7 at sigma 1 (mu 16).
_GRID_PER_SIGMA, _GRID_SIGMAS = 8, 6


@lru_cache(maxsize=4)
def loop_thresholds(
    distribution: Distribution,
    mean_loops: float,
    lognormal_sigma: float,
    max_loops: int | None,
    fixed_loops: int = 0,
) -> NDArray[np.float64]:
    """P(T <= t) for t = 1, 2, ... without the last value of T; `loops_at` draws with it.

    poisson            max(1, Poisson(mu)) (Parcae, arXiv 2604.12946, algorithm 2); the mean is
                       mu + exp(-mu).
    lognormal_poisson  1 + Poisson(rate), the rate log-normal with mean mu and `lognormal_sigma` of
                       its logarithm (Huginn, arXiv 2502.05171); the mean is mu + 1, as in the
                       authors' code.
    uniform            on {1, ..., 2 mu - 1}, the bound rounded while mu is ramped.
    fixed              mu, rounded while it is ramped.

    With `fixed_loops` F > 0 every draw has F loops and n more, so that T = F + n has mean mu: n is
    Poisson(mu - F), Poisson with a log-normal rate of that mean (without the 1), uniform on
    {0, ..., 2 (mu - F)}, or mu - F; 0 where mu is below F.

    `max_loops` moves the probability above it onto it (None: no bound). The array is shared
    between calls: do not write to it.
    """
    if fixed_loops:
        more = _more_loops(distribution, max(mean_loops - fixed_loops, 0.0), lognormal_sigma)
        thresholds = np.concatenate([np.zeros(fixed_loops - 1), more])
    elif distribution == "poisson":
        thresholds = _cumulate(_poisson(mean_loops), first=0, max_loops=max_loops)
    elif distribution == "lognormal_poisson":
        probabilities = _lognormal_poisson(mean_loops, lognormal_sigma)
        thresholds = _cumulate(probabilities, first=1, max_loops=max_loops)
    elif distribution == "uniform":
        highest = math.floor(2 * mean_loops - 0.5)
        thresholds = np.arange(1, highest) / highest
    else:
        thresholds = np.zeros(math.floor(mean_loops + 0.5) - 1)
    return thresholds if max_loops is None else thresholds[: max_loops - 1]


def _more_loops(distribution: Distribution, mean: float, lognormal_sigma: float) -> NDArray[np.float64]:
    """P(n <= 0), P(n <= 1), ... without the last value of n."""
    if distribution == "fixed" or mean == 0.0:
        return np.zeros(math.floor(mean + 0.5))
    if distribution == "uniform":
        count = math.floor(2 * mean + 0.5) + 1
        return np.arange(1, count) / count
    law = _poisson(mean) if distribution == "poisson" else _lognormal_poisson(mean, lognormal_sigma)
    return _cumulate(law, first=1, max_loops=None)


def loops_at(thresholds: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.int64]:
    """The quantiles of T at u in [0, 1]; the shape of u, at least 1."""
    return (np.searchsorted(thresholds, u, side="right") + 1).astype(np.int64)


def expected_loops(thresholds: NDArray[np.float64], backprop_loops: int) -> tuple[float, float]:
    """E[n] and E[k], the mean loops without and with gradient, from E[T] = sum_t P(T > t)."""
    survival = np.concatenate([[1.0], 1.0 - thresholds])
    return math.fsum(survival[backprop_loops:]), math.fsum(survival[:backprop_loops])


def ramped_mean(mean_loops: float, curriculum: Curriculum, curriculum_steps: int, step: int) -> float:
    """mu at `step`: 1 at step 0, `mean_loops` at step `curriculum_steps` and after.

    With x = step / curriculum_steps the ramp is x (linear) or 1 - sqrt(1 - x) (one_minus_sqrt:
    slow at first, steep at the end). All operations are correctly rounded by IEEE 754.
    """
    if curriculum == "none" or step >= curriculum_steps:
        return mean_loops
    progress = step / curriculum_steps
    ramp = progress if curriculum == "linear" else 1.0 - math.sqrt(1.0 - progress)
    return 1.0 + (mean_loops - 1.0) * ramp


def _poisson(rate: float) -> Iterator[Decimal]:
    """P(X = 0), P(X = 1), ... of a Poisson variable."""
    probability, count = (-Decimal(rate)).exp(), 0
    while True:
        yield probability
        count += 1
        probability = probability * Decimal(rate) / count


def _lognormal_poisson(mean_rate: float, sigma: float) -> Iterator[Decimal]:
    """P(X = 0), P(X = 1), ... of a Poisson variable with a log-normal rate."""
    exact_sigma = Decimal(sigma)
    log_rate = Decimal(mean_rate).ln() - exact_sigma**2 / 2
    grid = range(-_GRID_PER_SIGMA * _GRID_SIGMAS, _GRID_PER_SIGMA * _GRID_SIGMAS + 1)
    normal = [Decimal(i) / _GRID_PER_SIGMA for i in grid]
    weights = [(-(z**2) / 2).exp() for z in normal]
    rates = [(log_rate + exact_sigma * z).exp() for z in normal]
    total = sum(weights)
    terms = [w / total * (-rate).exp() for w, rate in zip(weights, rates, strict=True)]
    count = 0
    while True:
        yield sum(terms, Decimal(0))
        count += 1
        terms = [term * rate / count for term, rate in zip(terms, rates, strict=True)]


def _cumulate(probabilities: Iterator[Decimal], first: int, max_loops: int | None) -> NDArray[np.float64]:
    """P(T <= t) for t = 1, 2, ..., while it is below 1 in float64 and t below `max_loops`.

    The first probability is that of T = `first`, and T = 0 counts as 1. The generator runs inside
    the decimal context of this function.
    """
    thresholds: list[float] = []
    with localcontext(_DECIMAL):
        below = next(probabilities) if first == 0 else Decimal(0)
        for probability in probabilities:
            below += probability
            if float(below) >= 1.0 or len(thresholds) + 1 == max_loops:
                break
            thresholds.append(float(below))
    return np.array(thresholds)
