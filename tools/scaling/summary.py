"""The fits as tables, for the terminal and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from tools.report import Table
from tools.scaling.fits import Fits
from tools.scaling.fitting import Estimate
from tools.scaling.laws import TEST_TIME_LAWS


def fit_tables(fits: Fits) -> list[Table]:
    """All tables that have rows."""
    tables = [optima_table(fits), exponents_table(fits), constants_table(fits), curves_table(fits)]
    return [table for table in tables if table.rows]


def optima_table(fits: Fits) -> Table:
    """A row for each iso-FLOP curve."""
    rows = []
    for constraint, o in fits.optima:
        curve = o.curve
        tokens = o.tokens if o.problem is None else None
        rows.append([constraint, curve.size, curve.flops, len(curve.loss), o.mean_loops if o.curvature > 0 else None,
                     tokens, o.loss if o.curvature > 0 else None, o.problem or "minimum"])  # fmt: skip
    columns = ["constraint", "size", "FLOPs", "runs", "best mean loops", "best tokens", "loss", "vertex"]
    return Table(columns, rows, "Iso-FLOP parabolas in ln(mean loops)")


def exponents_table(fits: Fits) -> Table:
    """A row for each constraint."""
    rows = []
    for constraint, e in fits.exponents.items():
        loops, tokens = interval(e.loops, *e.loops_interval), interval(e.tokens, *e.tokens_interval)
        rows.append([constraint, loops, tokens, e.loop_share, e.check, f"{e.lost:.0%}"])
    columns = ["constraint", "a of mu* ~ C^a", "b of D* ~ C^b", "loop share s", "a s + b", "resamples without minimum"]
    return Table(columns, rows, "How the optima grow with the budget C; a s + b is 1 where both describe one curve")


def constants_table(fits: Fits) -> Table:
    """A row for each fit of a law."""
    rows = []
    for item in fits.laws:
        constants = ", ".join(f"{name} {_constant(e)}" for name, e in item.fit.constants.items())
        held_out = None if item.fit.held_out is None else f"{item.fit.held_out:.2%}"
        rows.append([item.fit.law.name, item.size, item.reading, len(item.runs), f"{item.fit.noise:.2%}", held_out,
                     constants])  # fmt: skip
    columns = ["law", "size", "N", "losses", "residual", "held-out error", "constants (95% interval)"]
    return Table(columns, rows, "Laws; a constant is not identified where its profile likelihood is flat")


def curves_table(fits: Fits) -> Table:
    """A row for each test-time curve and one of means over the curves."""
    names = [law.name for law in TEST_TIME_LAWS]
    rows = []
    for item in fits.test_time:
        c = item.exponential.constants
        rows.append([
            item.run, *(_constant(c[name]) for name in ("L_inf", "Z", "z")),
            *(_percent(item.in_sample.get(name)) for name in names),
            *(_percent(item.out_of_sample.get(name)) for name in names), item.seen_loops, _gap(item.above_floor),
            _percent(item.relative_gap),
        ])  # fmt: skip
    if len(rows) > 1:
        gaps = [item.relative_gap for item in fits.test_time if item.relative_gap is not None]
        nats = [abs(item.above_floor) for item in fits.test_time if item.above_floor is not None]
        errors = list(_means(fits, names))
        mean = (_gap(statistics.fmean(nats)), _percent(statistics.fmean(gaps))) if gaps else ("-", "-")
        largest = (_gap(max(nats)), _percent(max(gaps))) if gaps else ("-", "-")
        rows.append(["root mean square; of the differences, mean", "", "", "", *errors, None, *mean])
        rows.append(["largest difference", "", "", "", *([""] * len(errors)), None, *largest])
    short = {"exponential": "exp", "shifted_power": "shifted", "floor_power": "power + floor", "power": "power"}
    columns = ["run", "L_inf", "Z", "z", *(f"{short[name]}, fitted" for name in names),
               *(f"{short[name]}, beyond" for name in names), "fitted up to T",
               "L(mu) - L_inf, nats", "of L(mu)"]  # fmt: skip
    return Table(columns, rows, "Test-time loops: L(T) = L_inf + Z exp(-z T), RMS relative errors of four forms, and "
                 "how far the loss at T = mu is from the floor")  # fmt: skip


def _means(fits: Fits, names: list[str]) -> Iterator[str]:
    for kind in ("in_sample", "out_of_sample"):
        for name in names:
            errors = [getattr(item, kind)[name] for item in fits.test_time if name in getattr(item, kind)]
            yield _percent(math.sqrt(sum(e * e for e in errors) / len(errors)) if errors else None)


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _constant(estimate: Estimate) -> str:
    found = interval(estimate.value, estimate.low, estimate.high)
    return found if estimate.identified else f"{found} NOT IDENTIFIED"


def interval(value: float, low: float, high: float) -> str:
    """`value [low, high]` to four digits."""
    return f"{value:.4g} [{low:.4g}, {high:.4g}]"
