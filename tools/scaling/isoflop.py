"""Iso-FLOP curves: loss against loops at one budget, their optima, and how the optima grow with the budget.

A curve is the parabola L = L* + k (ln mu - ln mu*)^2 of one size and budget; with C FLOPs, tokens follow from
C / D = c_0 + c_1 mu. The optima of several budgets give mu* ~ C^a and D* ~ C^b. From the second equation, with the
loops' share of a token's FLOPs s = c_1 mu / (c_0 + c_1 mu),

    b + a s = 1

at the point where s is taken: the exponents are local, since s grows with mu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from tools.scaling.fitting import BOOTSTRAPS, quantiles

Floats = NDArray[np.float64]
MIN_LOOPS = 3


@dataclass(frozen=True)
class Curve:
    """Runs of one size at one budget."""

    size: str
    flops: float
    mean_loops: Floats
    tokens: Floats
    loss: Floats

    @classmethod
    def of(
        cls, size: str, flops: float, mean_loops: Sequence[float], tokens: Sequence[float], loss: Sequence[float]
    ) -> Curve:
        """From plain numbers."""
        return cls(size, flops, *(np.asarray(values, dtype=np.float64) for values in (mean_loops, tokens, loss)))

    @property
    def costs(self) -> tuple[float, float]:
        """(c_0, c_1) of C / D = c_0 + c_1 mu."""
        slope, constant = np.polyfit(self.mean_loops, self.flops / self.tokens, 1)
        return float(constant), float(slope)

    def tokens_at(self, mean_loops: float) -> float:
        """D at this budget and mean loops, exact where measured: gradient loops and layers come in whole numbers."""
        constant, slope = self.costs
        order = np.argsort(self.mean_loops)
        loops = self.mean_loops[order]
        off_line = self.flops / self.tokens[order] - (constant + slope * loops)
        return float(self.flops / (constant + slope * mean_loops + np.interp(mean_loops, loops, off_line)))

    def loop_share(self, mean_loops: float) -> float:
        """s, the loops' share of a token's FLOPs."""
        constant, slope = self.costs
        return slope * mean_loops / (constant + slope * mean_loops)


@dataclass(frozen=True)
class Optimum:
    """The vertex of a curve's parabola."""

    curve: Curve
    curvature: float
    """k, nats; the vertex is a minimum where it is positive."""
    log_mean_loops: float
    """ln mu*."""
    loss: float
    """L*."""
    residuals: Floats

    @property
    def mean_loops(self) -> float:
        """mu*."""
        return float(np.exp(self.log_mean_loops))

    @property
    def tokens(self) -> float:
        """D* at mu*."""
        return self.curve.tokens_at(self.mean_loops)

    @property
    def problem(self) -> str | None:
        """Why the vertex tells no optimum, or None."""
        low, high = self.curve.mean_loops.min(), self.curve.mean_loops.max()
        if self.curvature <= 0:
            return "the curve bends downwards: no optimum in its range"
        if not low <= self.mean_loops <= high:
            return f"the vertex, {self.mean_loops:.3g} loops, lies outside of the measured {low:g} to {high:g}"
        return None

    def loss_at(self, mean_loops: Floats) -> Floats:
        """The parabola."""
        return self.loss + self.curvature * (np.log(mean_loops) - self.log_mean_loops) ** 2


def find_optimum(curve: Curve) -> Optimum:
    """The parabola through a curve. Errors: ConfigError with fewer than three loop counts."""
    distinct = len(set(curve.mean_loops))
    if distinct < MIN_LOOPS:
        raise ConfigError(
            f"iso-FLOP curve of {curve.size} at {curve.flops:.3g} FLOPs: {distinct} mean loop count"
            f"{'s' * (distinct != 1)}: expected at least {MIN_LOOPS}, since a parabola has three constants"
        )
    x = np.log(curve.mean_loops)
    a, b, c = np.polyfit(x, curve.loss, 2)
    vertex = -b / (2 * a) if a else np.inf
    return Optimum(curve, float(a), float(vertex), float(c - a * vertex**2), curve.loss - np.polyval([a, b, c], x))


@dataclass(frozen=True)
class Exponents:
    """mu* ~ C^a and D* ~ C^b, common to the sizes that have several budgets."""

    loops: float
    loops_interval: tuple[float, float]
    tokens: float
    tokens_interval: tuple[float, float]
    loop_share: float
    """s, mean over the optima."""
    prefactors: dict[str, tuple[float, float]]
    """By size: mu* = first C^a, D* = second C^b."""
    budgets: dict[str, tuple[float, float]]
    """By size: the smallest and the largest budget with an optimum."""
    lost: float
    """Share of bootstrap samples in which some curve had no minimum; they are left out of the intervals."""
    samples: dict[str, list[list[float]]]
    """By size: ln of the first prefactor, a, ln of the second, b of each bootstrap sample; none where half are lost."""

    @property
    def check(self) -> float:
        """a s + b, 1 where both exponents describe the same curve."""
        return self.loops * self.loop_share + self.tokens

    def optimum(self, size: str, flops: float) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """(mu*, low, high) and (D*, low, high) at a budget; infinite ends where no interval is known."""
        loops, tokens = self.prefactors[size]
        best = (loops * flops**self.loops, tokens * flops**self.tokens)
        if not self.samples[size]:
            return (best[0], 0.0, np.inf), (best[1], 0.0, np.inf)
        drawn = np.array(self.samples[size]).reshape(-1, 2, 2)
        ends = [quantiles(np.exp(drawn[:, i] @ [1.0, np.log(flops)])) for i in (0, 1)]
        return (best[0], *ends[0]), (best[1], *ends[1])


def fit_exponents(optima: Sequence[Optimum], bootstraps: int = BOOTSTRAPS, seed: int = 0) -> Exponents:
    """Exponents over the optima that are minima inside of their curve's range, with 95% bootstrap intervals.

    Residuals of all parabolas are redrawn together, times sqrt(points / (points - constants)). Errors: ConfigError
    where no size has such optima at two budgets.
    """
    used = [o for o in optima if o.problem is None]
    counts = {o.curve.size: sum(p.curve.size == o.curve.size for p in used) for o in used}
    used = [o for o in used if counts[o.curve.size] >= 2]
    if not used:
        found = [f"{o.curve.size} at {o.curve.flops:.3g}: {o.problem or 'an optimum'}" for o in optima]
        raise ConfigError(
            "mu* ~ C^a: expected optima inside of the measured loop counts at two budgets of a size at least; found "
            + ("; ".join(found) or "none")
        )
    sizes = list(dict.fromkeys(o.curve.size for o in used))
    (loops, tokens), *intercepts = _lines(used, sizes)
    residuals = np.concatenate([o.residuals for o in used])
    residuals = residuals * np.sqrt(len(residuals) / max(1, len(residuals) - 3 * len(used)))
    rng, samples = np.random.default_rng(seed), []
    for _ in range(bootstraps):
        again = [_redrawn(o, residuals, rng) for o in used]
        if all(o.curvature > 0 for o in again):
            samples.append(_lines(again, sizes))
    drawn = np.array(samples).reshape(-1, 1 + len(sizes), 2)
    enough = len(drawn) > bootstraps // 2
    budgets = {size: [o.curve.flops for o in used if o.curve.size == size] for size in sizes}
    return Exponents(
        loops=float(loops), loops_interval=quantiles(drawn[:, 0, 0]) if enough else (-np.inf, np.inf),
        tokens=float(tokens), tokens_interval=quantiles(drawn[:, 0, 1]) if enough else (-np.inf, np.inf),
        loop_share=float(np.mean([o.curve.loop_share(o.mean_loops) for o in used])),
        prefactors={size: (float(np.exp(a)), float(np.exp(b))) for size, (a, b) in zip(sizes, intercepts, strict=True)},
        budgets={size: (min(own), max(own)) for size, own in budgets.items()},
        lost=1 - len(drawn) / bootstraps,
        samples={
            size: drawn[:, [1 + i, 0]].swapaxes(1, 2).reshape(-1, 4).tolist() if enough else []
            for i, size in enumerate(sizes)
        },
    )  # fmt: skip


def _redrawn(optimum: Optimum, residuals: Floats, rng: np.random.Generator) -> Optimum:
    curve = optimum.curve
    loss = optimum.loss_at(curve.mean_loops) + rng.choice(residuals, len(curve.loss))
    return find_optimum(Curve(curve.size, curve.flops, curve.mean_loops, curve.tokens, loss))


def _lines(optima: Sequence[Optimum], sizes: Sequence[str]) -> Floats:
    """[1 + sizes, 2] for mu* and D*: the common slope in log-log, then an intercept for each size."""
    design = np.array([[np.log(o.curve.flops), *(o.curve.size == size for size in sizes)] for o in optima], dtype=float)
    targets = np.array([[o.log_mean_loops, np.log(o.tokens)] for o in optima])
    solution: Floats = np.linalg.lstsq(design, targets, rcond=None)[0]
    return solution
