"""fits.json: the fits of a table, for `predict` and `plot`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.files import write_text
from tools.scaling.fits import Fits, LawFit, TestTime
from tools.scaling.fitting import Estimate, Fit
from tools.scaling.isoflop import Curve, Exponents, find_optimum
from tools.scaling.laws import LAWS

FITS_NAME = "fits.json"
FORMAT = 2


def write_fits(fits: Fits, path: Path) -> None:
    """Writes everything that `read_fits` gives back; numbers keep all digits."""
    tree = {
        "format": FORMAT,
        "curves": [{"constraint": constraint, **_curve(optimum.curve)} for constraint, optimum in fits.optima],
        "exponents": {constraint: asdict(exponents) for constraint, exponents in fits.exponents.items()},
        "laws": [{"size": item.size, "reading": item.reading, "runs": item.runs, "fit": _fit(item.fit)}
                 for item in fits.laws],
        "test_time": [{**{key: value for key, value in vars(item).items() if key != "exponential"},
                       "exponential": _fit(item.exponential)} for item in fits.test_time],
        "not_fitted": fits.not_fitted,
    }  # fmt: skip
    write_text(path, json.dumps(_null_for_infinite(tree), allow_nan=False) + "\n")


def read_fits(path: Path) -> Fits:
    """The fits of a file, or of fits.json in a folder. Errors: ConfigError naming the file."""
    path = path / FITS_NAME if path.is_dir() else path
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise ValueError(f"its format is {tree['format']}, this version reads {FORMAT}")
        return Fits(
            optima=[(item["constraint"], find_optimum(Curve.of(*(item[name] for name in _CURVE))))
                    for item in tree["curves"]],
            exponents={name: _exponents(item) for name, item in tree["exponents"].items()},
            laws=[LawFit(item["size"], item["reading"], tuple(item["runs"]), _read_fit(item["fit"]))
                  for item in tree["laws"]],
            test_time=[TestTime(**{**item, "num_loops": tuple(item["num_loops"]), "loss": tuple(item["loss"]),
                                   "exponential": _read_fit(item["exponential"])}) for item in tree["test_time"]],
            not_fitted=tree["not_fitted"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path}: expected the {FITS_NAME} of `fit`: {type(error).__name__}: {error}") from error


_CURVE = ("size", "flops", "mean_loops", "tokens", "loss")


def _curve(curve: Curve) -> dict[str, Any]:
    return {"size": curve.size, "flops": curve.flops} | {name: getattr(curve, name).tolist() for name in _CURVE[2:]}


def _exponents(item: dict[str, Any]) -> Exponents:
    def pair(values: list[float | None]) -> tuple[float, float]:
        low, high = values
        return -math.inf if low is None else low, math.inf if high is None else high

    intervals = {name: pair(item[name]) for name in ("loops_interval", "tokens_interval")}
    by_size = {name: {size: pair(ends) for size, ends in item[name].items()} for name in ("prefactors", "budgets")}
    return Exponents(**{**item, **intervals, **by_size})


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "law": fit.law.name, "formula": fit.law.formula,
        "constants": {name: asdict(estimate) for name, estimate in fit.constants.items()},
        "samples": fit.samples.tolist(), "residuals": fit.residuals.tolist(),
        "objective": fit.objective, "delta": fit.delta,
        "noise": fit.noise, "held_out": fit.held_out, "ranges": fit.ranges,
    }  # fmt: skip


def _read_fit(item: dict[str, Any]) -> Fit:
    return Fit(
        law=LAWS[item["law"]],
        constants={name: Estimate(**estimate) for name, estimate in item["constants"].items()},
        samples=np.array(item["samples"], dtype=np.float64), residuals=np.array(item["residuals"], dtype=np.float64),
        objective=item["objective"], delta=item["delta"], noise=item["noise"], held_out=item["held_out"],
        ranges={name: (low, high) for name, (low, high) in item["ranges"].items()},
    )  # fmt: skip


def _null_for_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_for_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_infinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
