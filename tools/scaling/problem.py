"""The least Huber loss of a law on data: from random starts by L-BFGS, and from there to the bottom of the valley.

    S(c) = sum_i rho((ln L_i - ln L(x_i; c)) / delta),   rho(u) = u^2 / 2 below |u| = 1, |u| - 1/2 above

(Hoffmann et al. 2022, section 3.3.) What moves are logarithms: of each constant, or of the size of the whole term for a
coefficient. Derivatives are exact, by complex steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from tools.scaling.laws import Law

Floats = NDArray[np.float64]
DELTA = 1e-3
DRAWS = 32
_COMPLEX_STEP = 1e-30
_MAX_STEPS, _TOLERANCE, _PROBE = 300, 1e-5, 0.1
"""Of the damped steps: the tolerance is on S, of which 1.9 is a 95% bound; the probe is a share of a step."""
_ROOM = math.log(10)
"""Constants stay within this of the range of their starts, in log: an exponent of 15 does not overflow yet."""


class Problem:
    """A law with data, in the coordinates that the fitter moves.

    v_i is ln of constant i; for a coefficient of input^-exponent, ln of the term at the input's geometric mean. Shapes:
    C constants, P points, B fits that are made side by side.
    """

    def __init__(self, law: Law, inputs: Mapping[str, Sequence[float] | Floats], loss: Sequence[float] | Floats,
                 delta: float = DELTA) -> None:  # fmt: skip
        self.law, self.delta = law, delta
        self.inputs = {name: np.asarray(inputs[name], dtype=np.float64) for name in law.inputs}
        self.centers = {name: np.log(values).mean() for name, values in self.inputs.items()}
        """Logarithms of the inputs' geometric means."""
        self.log_loss = np.log(np.asarray(loss, dtype=np.float64))
        ends = [(math.log(c.low) - _ROOM, math.log(c.high) + _ROOM) for c in law.constants]
        self.low, self.high = (np.array(end) for end in zip(*ends, strict=True))

    def constants(self, v: NDArray[Any], fixed: Floats | None = None) -> dict[str, NDArray[Any]]:
        """The constants at v [..., C], each [..., 1]; `fixed` [..., C]: logarithms that they keep instead, or NaN."""
        logs: dict[str, NDArray[Any]] = {}
        for i, c in sorted(enumerate(self.law.constants), key=lambda item: item[1].scales is not None):
            log = v[..., i : i + 1]
            if c.scales is not None:
                name, exponent = c.scales
                log = log + np.exp(logs[exponent]) * self.centers[name]
            logs[c.name] = log if fixed is None else np.where(np.isnan(fixed[..., [i]]), log, fixed[..., [i]])
        return {name: np.exp(logs[name]) for name in self.law.names}

    def log_model(self, v: Floats, fixed: Floats | None = None) -> tuple[Floats, Floats]:
        """ln L [..., P] at v [..., C] and its derivatives [..., C, P]."""
        shifted = v[..., None, :] + 1j * _COMPLEX_STEP * np.eye(v.shape[-1])
        kept = None if fixed is None else fixed[..., None, :]
        values = np.log(self.law.predict(self.constants(shifted, kept), self.inputs))
        return values[..., 0, :].real, values.imag / _COMPLEX_STEP

    def objective(self, v: Floats) -> tuple[float, Floats]:
        """S and its gradient at v [C]; v is taken back into its bounds first."""
        inside = np.clip(v, self.low, self.high)
        model, jacobian = self.log_model(inside)
        scaled = (self.log_loss - model) / self.delta
        gradient = -(jacobian @ np.clip(scaled, -1, 1)) / self.delta
        return float(_huber(scaled).sum()), np.where(inside == v, gradient, 0.0)

    def from_start(self, v: Floats) -> tuple[float, Floats]:
        """(S, v) of where L-BFGS gets to from v [C]: into a valley, whose bottom `minima` finds."""
        bounds = list(zip(self.low, self.high, strict=True))
        found = minimize(self.objective, v, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 50})
        return float(found.fun), np.asarray(found.x)

    def minima(
        self, v: Floats, log_loss: Floats | None = None, weights: Floats | None = None, fixed: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """(S [B], v [B, C]) of the minima near v, each with its own `log_loss` and `weights` [B, P] and `fixed` [B, C].

        Levenberg-Marquardt with geodesic acceleration, all fits in one array: it follows narrow valleys that bend, as
        L-BFGS does not, and makes hundreds of refits for the price of a few.
        """
        v = np.clip(v, self.low, self.high)
        data = self._refits(len(v), log_loss, weights, fixed)
        going, value, damping = np.arange(len(v)), self._totals(v, data), np.full(len(v), 1e-3)
        for _ in range(_MAX_STEPS):
            own = data.of(going)
            step, promised = self._step(v[going], own, damping[going])
            moved = np.clip(v[going] + step, self.low, self.high)
            there = self._totals(moved, own)
            better = there < value[going]
            done = (promised < _TOLERANCE) & (damping[going] <= 1e-2)
            v[going[better]], value[going[better]] = moved[better], there[better]
            damping[going] = np.clip(damping[going] * np.where(better, 0.2, 8.0), 1e-12, None)
            going = going[~done & (damping[going] < 1e9)]
            if not len(going):
                break
        return value, v

    def _refits(
        self, count: int, log_loss: Floats | None = None, weights: Floats | None = None, fixed: Floats | None = None
    ) -> _Refits:
        points = (count, len(self.log_loss))
        return _Refits(
            np.broadcast_to(self.log_loss if log_loss is None else log_loss, points),
            np.broadcast_to(1.0 if weights is None else weights, points),
            np.broadcast_to(np.nan if fixed is None else fixed, (count, len(self.low))),
        )

    def _values(self, v: Floats, fixed: Floats) -> Floats:
        """ln L [B, P]."""
        return np.asarray(np.log(self.law.predict(self.constants(v, fixed), self.inputs)))

    def _totals(self, v: Floats, data: _Refits) -> Floats:
        """S [B]."""
        scaled = (data.log_loss - self._values(v, data.fixed)) / self.delta
        return np.asarray((data.weights * _huber(scaled)).sum(-1))

    def _step(self, v: Floats, data: _Refits, damping: Floats) -> tuple[Floats, Floats]:
        """(step [B, C], twice the decrease of S [B] that a straight valley promises).

        A damped step on reweighted squares, turned by half of the model's second derivative along it (Transtrum and
        Sethna, arXiv 1201.5885).
        """
        model, jacobian = self.log_model(v, data.fixed)
        scaled, jacobian = (data.log_loss - model) / self.delta, jacobian / self.delta
        weights = data.weights / np.maximum(np.abs(scaled), 1)
        downhill = _times(jacobian, weights * scaled)
        at_end = (v <= self.low) & (downhill < 0) | (v >= self.high) & (downhill > 0)
        downhill, jacobian = np.where(at_end, 0.0, downhill), np.where(at_end[..., None], 0.0, jacobian)
        inverse = _damped_inverse(jacobian, weights, damping)
        step = _times(inverse, downhill)
        probe = np.clip(v + _PROBE * step, self.low, self.high)
        change = (self._values(probe, data.fixed) - model) / (self.delta * _PROBE)
        bend = (change - _times(jacobian.swapaxes(-1, -2), step)) * 2 / _PROBE
        turn = -_times(inverse, _times(jacobian, weights * bend)) / 2
        short = np.linalg.norm(turn, axis=-1) < 0.75 * np.linalg.norm(step, axis=-1)
        return step + np.where(short[:, None], turn, 0.0), (downhill * step).sum(-1)

    def best(self, starts: int, rng: np.random.Generator) -> tuple[float, Floats]:
        """(S, v [C]) of the best of `starts` searches, from the best of `DRAWS` times as many random points."""
        lows, highs = (np.log([getattr(c, end) for c in self.law.constants]) for end in ("low", "high"))
        drawn = rng.uniform(lows, highs, (DRAWS * starts, len(lows)))
        chosen = drawn[self._totals(drawn, self._refits(len(drawn))).argsort()[:starts]]
        found = [self.from_start(v) for v in chosen]
        nearest = sorted(found, key=lambda item: item[0])[:3]
        values, v = self.minima(np.array([at for _, at in nearest]))
        return float(values.min()), v[values.argmin()]


class _Refits(NamedTuple):
    """What B fits of a problem have of their own."""

    log_loss: Floats
    weights: Floats
    """[B, P] both."""
    fixed: Floats
    """[B, C]: logarithms that constants keep, or NaN."""

    def of(self, which: NDArray[Any]) -> _Refits:
        """Some of them."""
        return _Refits(*(values[which] for values in self))


def _huber(scaled: Floats) -> Floats:
    size = np.abs(scaled)
    return np.where(size < 1, scaled**2 / 2, size - 0.5)


def _damped_inverse(jacobian: Floats, weights: Floats, damping: Floats) -> Floats:
    """(J W J^T + damping diag)^-1 [B, C, C], with J [B, C, P], inverted in coordinates that make the diagonal one."""
    square = (jacobian * weights[:, None, :]) @ jacobian.swapaxes(-1, -2)
    scale = np.sqrt(np.diagonal(square, axis1=-2, axis2=-1))
    scale = np.where(scale > 0, scale, 1.0)
    scales = scale[:, :, None] * scale[:, None, :]
    # 1e-13: a direction that nothing holds stays where it is.
    damped = square / scales + (damping[:, None, None] + 1e-13) * np.eye(square.shape[-1])
    return np.asarray(np.linalg.inv(damped) / scales)


def _times(matrix: Floats, vector: Floats) -> Floats:
    return np.asarray((matrix @ vector[..., None])[..., 0])
