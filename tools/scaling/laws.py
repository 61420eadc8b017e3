"""The laws, each one small object: constants, inputs, function. `fitting.py` fits any of them.

Inputs, by name: params N, the unrolled parameters by one reading (readings.py); once_params and recurrent_params, the
two parts of N; tokens D; mean_loops mu; num_loops T at evaluation. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""float64, or complex128 where the fitter differentiates: functions of a law must be analytic."""
Values = Mapping[str, Array]


@dataclass(frozen=True)
class Constant:
    """One positive constant of a law."""

    name: str
    low: float
    """Starts are drawn log-uniformly between `low` and `high`."""
    high: float
    scales: tuple[str, str] | None = None
    """(input, exponent) of a coefficient of input^-exponent: `low` and `high` are then the size of the whole term, in
    nats at the input's geometric mean, and so is what the fitter moves: it does not hang on the exponent as the
    coefficient does."""

    @property
    def resolution(self) -> float:
        """The factor within which data must pin the constant to count as identifying it.

        A coefficient takes over the error of its exponent times ln(input), 20 for a model of 0.5B parameters.
        """
        return 2.0 if self.scales is None else 10.0


@dataclass(frozen=True)
class Law:
    """Loss as a function of inputs and constants."""

    name: str
    formula: str
    constants: tuple[Constant, ...]
    inputs: tuple[str, ...]
    function: Callable[[Values, Values], Array]
    """(constants, inputs) to losses; constants broadcast against inputs."""
    may_stay: tuple[str, ...] = ()
    """Inputs that may be the same in all runs."""

    @property
    def varied(self) -> tuple[str, ...]:
        """Inputs that must differ between runs."""
        return tuple(name for name in self.inputs if name not in self.may_stay)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the constants, in order."""
        return tuple(constant.name for constant in self.constants)

    def predict(self, constants: Mapping[str, float | Array], inputs: Mapping[str, float | Array]) -> Array:
        """Losses in nats. Constants [samples, 1] and inputs [points] give [samples, points]."""
        values = {name: np.asarray(constants[name]) for name in self.names}
        return self.function(values, {name: np.asarray(inputs[name], dtype=np.float64) for name in self.inputs})


def _power(base: Array, exponent: Array) -> Array:
    """base^-exponent."""
    return np.exp(-exponent * np.log(base))


def _floor(high: float = 5.0) -> Constant:
    return Constant("E", 0.1, high)


_N_TERM = (Constant("X", 0.01, 3.0, ("params", "x")), Constant("x", 0.05, 1.5))
_D_TERM = (Constant("Y", 0.01, 3.0, ("tokens", "y")), Constant("y", 0.05, 1.5))
_LOOP_TERM = (Constant("Z", 0.001, 5.0), Constant("z", 0.1, 10.0))


def _parametric(c: Values, v: Values) -> Array:
    return c["E"] + c["X"] * _power(v["params"], c["x"]) + c["Y"] * _power(v["tokens"], c["y"])


PARAMETRIC = Law(
    "parametric", "L = E + X N^-x + Y D^-y", (_floor(), *_N_TERM, *_D_TERM), ("params", "tokens"), _parametric
)
"""Parcae's training law (arXiv 2604.12946, eq. 7), N with all loops unrolled; E and all else per model size."""

UNIFIED = Law(
    "unified", "L(T | mu, D) = E + X N^-x + Y D^-y + Z exp(-z T / mu)",
    (_floor(), *_N_TERM, *_D_TERM, *_LOOP_TERM), ("params", "tokens", "mean_loops", "num_loops"),
    lambda c, v: _parametric(c, v) + c["Z"] * np.exp(-c["z"] * v["num_loops"] / v["mean_loops"]),
)  # fmt: skip
"""Parcae's eq. 8."""

UNIFIED_LEARNED = Law(
    "unified_learned", "L(T | mu, D) = E + X N^-x + Y D^-y + Z exp(-z T / mu^gamma)",
    (*UNIFIED.constants, Constant("gamma", 0.3, 3.0)), UNIFIED.inputs,
    lambda c, v: _parametric(c, v) + c["Z"] * np.exp(-c["z"] * v["num_loops"] * _power(v["mean_loops"], c["gamma"])),
)  # fmt: skip
"""Eq. 8 with a learned exponent of mu (the paper's table 14: 1.19 and 1.17)."""

UNIFIED_UNSCALED = Law(
    "unified_unscaled", "L(T | mu, D) = E + X N^-x + Y D^-y + Z exp(-z T)", UNIFIED.constants,
    ("params", "tokens", "num_loops"), lambda c, v: _parametric(c, v) + c["Z"] * np.exp(-c["z"] * v["num_loops"]),
)  # fmt: skip
"""Eq. 8 without mu in the exponent: what table 14 compares with."""

def _iso_depth(c: Values, v: Values) -> Array:
    params = v["once_params"] + _power(v["mean_loops"], -c["phi"]) * v["recurrent_params"]
    return c["E"] + c["A"] * _power(params, c["alpha"]) + c["B"] * _power(v["tokens"], c["beta"])


ISO_DEPTH = Law(
    "iso_depth", "L = E + A (N_once + mu^phi N_rec)^-alpha + B D^-beta",
    (
        _floor(), Constant("A", 0.01, 3.0, ("once_params", "alpha")), Constant("alpha", 0.05, 1.5),
        Constant("B", 0.01, 3.0, ("tokens", "beta")), Constant("beta", 0.05, 1.5), Constant("phi", 0.05, 1.5),
    ),
    ("once_params", "recurrent_params", "mean_loops", "tokens"),
    _iso_depth, may_stay=("once_params", "recurrent_params"),
)  # fmt: skip
"""arXiv 2604.21106: what a loop is worth in parameters; phi = 1 a layer of its own, phi = 0 nothing."""

EXPONENTIAL = Law(
    "exponential", "L(T) = L_inf + Z exp(-z T)", (Constant("L_inf", 0.1, 5.0), *_LOOP_TERM), ("num_loops",),
    lambda c, v: c["L_inf"] + c["Z"] * np.exp(-c["z"] * v["num_loops"]),
)  # fmt: skip
"""Test-time depth of one model (Parcae, table 12)."""

_T_TERM = (Constant("Z", 0.001, 5.0, ("num_loops", "z")), Constant("z", 0.02, 5.0))

SHIFTED_POWER = Law(
    "shifted_power", "L(T) = L_inf + Z (1 + T)^-z", (Constant("L_inf", 0.1, 5.0), *_T_TERM), ("num_loops",),
    lambda c, v: c["L_inf"] + c["Z"] * _power(1 + v["num_loops"], c["z"]),
)  # fmt: skip
"""The other forms of table 12: this one, a power with a floor and a power alone."""

FLOOR_POWER = Law(
    "floor_power", "L(T) = L_inf + Z T^-z", (Constant("L_inf", 0.1, 5.0), *_T_TERM), ("num_loops",),
    lambda c, v: c["L_inf"] + c["Z"] * _power(v["num_loops"], c["z"]),
)  # fmt: skip

POWER = Law(
    "power", "L(T) = Z T^-z", (Constant("Z", 0.3, 10.0, ("num_loops", "z")), Constant("z", 1e-3, 1.0)), ("num_loops",),
    lambda c, v: c["Z"] * _power(v["num_loops"], c["z"]),
)  # fmt: skip

TRAINING_LAWS = (PARAMETRIC, UNIFIED, UNIFIED_LEARNED, UNIFIED_UNSCALED, ISO_DEPTH)
TEST_TIME_LAWS = (EXPONENTIAL, SHIFTED_POWER, FLOOR_POWER, POWER)
LAWS = {law.name: law for law in (*TRAINING_LAWS, *TEST_TIME_LAWS)}
