"""Figures of a table and its fits, as PNGs and one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.errors import ConfigError
from tools.report import Section, axes_of, line_figure, new_figure, write_page
from tools.scaling.collect import Row
from tools.scaling.fits import ALL_SIZES, Fits, LawFit, TestTime, law_inputs
from tools.scaling.summary import constants_table, curves_table, exponents_table, optima_table

PAGE_NAME = "scaling.html"
MAX_CURVES = 12
"""Test-time curves of a figure."""


def plot(rows: Sequence[Row], fits: Fits, folder: Path) -> Path:
    """Writes the page and its PNGs into `folder` and returns the page's path.

    Errors: ConfigError where a law was fitted to other runs than the table's.
    """
    runs = list(dict.fromkeys(row.run for row in rows))
    sizes = ", ".join(dict.fromkeys(row.size for row in rows))
    subtitle = f"{len(runs)} runs of the family {rows[0].family}, {sizes}; losses on {rows[0].validation}"
    sections = [_measured(rows), _iso_flop(fits), _optima(fits), _laws(rows, fits), _test_time(fits)]
    kept = [section for section in sections if section.figures or section.tables]
    if fits.not_fitted:
        kept.append(Section("Not fitted", "What the table does not allow, and why.", notes=list(fits.not_fitted)))
    return write_page(folder, "Scaling laws of loops", subtitle, kept, PAGE_NAME)


def _measured(rows: Sequence[Row]) -> Section:
    lines: dict[str, tuple[Sequence[float], Sequence[float | None]]] = {}
    at_mean = sorted((row for row in rows if row.at_mean), key=lambda row: row.tokens)
    for size, loops in sorted({(row.size, row.mean_loops) for row in at_mean}):
        own = [row for row in at_mean if row.size == size and row.mean_loops == loops]
        lines[f"{size}, mean loops {loops:g}"] = ([row.tokens for row in own], [row.loss for row in own])
    figure = line_figure(lines, xlabel="training tokens", ylabel="validation loss at the mean loops, nats per token",
                         xscale="log")  # fmt: skip
    return Section("Measured losses", "Each run's validation loss at its last step, at its own mean loops.",
                   {"scaling_measured": figure})  # fmt: skip


def _iso_flop(fits: Fits) -> Section:
    section = Section(
        "Iso-FLOP curves",
        "Runs along a curve cost the same training FLOPs: more loops, fewer tokens. Lines are parabolas in ln(mean "
        "loops), crosses their minima. With fixed_parameters the model is the same along a curve, with fixed_layers it "
        "loses layers as loops grow; the two answer different questions.",
        tables=[optima_table(fits)] if fits.optima else [],
    )  # fmt: skip
    for constraint in dict.fromkeys(name for name, _ in fits.optima):
        figure = new_figure()
        axes = axes_of(figure, xlabel="mean loops", ylabel="validation loss, nats per token", xscale="log")
        for index, optimum in enumerate(o for name, o in fits.optima if name == constraint):
            loops, color = optimum.curve.mean_loops, f"C{index % 10}"
            fine = np.geomspace(loops.min(), loops.max(), 80)
            label = f"{optimum.curve.size}, {optimum.curve.flops:.3g}"
            axes.plot(loops, optimum.curve.loss, "o", color=color, label=label)
            axes.plot(fine, optimum.loss_at(fine), color=color)
            if optimum.problem is None:
                axes.plot([optimum.mean_loops], [optimum.loss], "x", color=color, markersize=10)
        _plain_ticks(axes, [value for name, o in fits.optima if name == constraint for value in o.curve.mean_loops])
        axes.legend(title="size, FLOPs", fontsize=8)
        section.figures[f"scaling_iso_flop_{constraint}"] = figure
    return section


def _plain_ticks(axes: Axes, values: Sequence[float]) -> None:
    ticks = sorted(set(values))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _optima(fits: Fits) -> Section:
    section = Section(
        "How the optima grow",
        "Best mean loops and best tokens against the budget. The exponents are local: as loops take a larger share of "
        "the FLOPs, both cannot stay.",
        tables=[exponents_table(fits)] if fits.exponents else [],
    )
    for constraint, exponents in fits.exponents.items():
        figure = new_figure(10.0, 4.2)
        own = [o for name, o in fits.optima if name == constraint and o.problem is None]
        for place, (label, column, slope) in enumerate((("best mean loops", 0, exponents.loops),
                                                        ("best tokens", 1, exponents.tokens))):  # fmt: skip
            axes = figure.add_subplot(1, 2, place + 1, xlabel="FLOPs", ylabel=label, xscale="log", yscale="log")
            axes.grid(True, color="0.92")
            for index, (size, prefactors) in enumerate(exponents.prefactors.items()):
                points = [(o.curve.flops, (o.mean_loops, o.tokens)[column]) for o in own if o.curve.size == size]
                budgets = np.array(exponents.budgets[size])
                axes.plot(*zip(*points, strict=True), "o", color=f"C{index}", label=size)
                axes.plot(budgets, prefactors[column] * budgets**slope, color=f"C{index}")
            axes.legend(fontsize=8, title=f"exponent {slope:.3g}")
        section.figures[f"scaling_optima_{constraint}"] = figure
    return section


def _laws(rows: Sequence[Row], fits: Fits) -> Section:
    section = Section(
        "Laws",
        "Constants by Huber loss on ln L with 95% bootstrap intervals; predicted against measured losses and their "
        "residuals. One panel for each law, with the first reading of N.",
        tables=[constants_table(fits)] if fits.laws else [],
    )
    shown: set[str] = set()
    for item in fits.laws:
        name = f"{item.fit.law.name}, {item.size}"
        if name not in shown:
            shown.add(name)
            plain = "".join(c if c.isalnum() else "_" for c in name)
            section.figures[f"scaling_law_{plain}"] = _predicted(item, rows)
    return section


def _predicted(item: LawFit, rows: Sequence[Row]) -> Figure:
    every_loop = "num_loops" in item.fit.law.inputs
    own = [row for row in rows if item.size in (row.size, ALL_SIZES) and (every_loop or row.at_mean)]
    if sorted(row.run for row in own) != sorted(item.runs):
        raise ConfigError(f"--fits: {item.label}: expected a fit to the losses of the table; run `fit` on it again")
    measured = np.array([row.loss for row in own])
    inputs = {name: np.array(values) for name, values in law_inputs(own, item.reading).items()}
    predicted = item.fit.law.predict(item.fit.values, inputs)
    residuals = np.log(measured / predicted)
    figure = new_figure(10.0, 4.0)
    left = figure.add_subplot(1, 2, 1, xlabel="measured loss", ylabel="predicted loss", title=item.fit.law.formula)
    left.title.set_fontsize(9)
    title = f"{item.size}, N: {item.reading}"
    right = figure.add_subplot(1, 2, 2, xlabel="mean loops", ylabel="residual of ln L", title=title)
    right.title.set_fontsize(9)
    ends = [measured.min(), measured.max()]
    left.plot(ends, ends, color="0.7")
    right.axhline(0, color="0.7")
    for index, loops in enumerate(sorted({row.mean_loops for row in own})):
        mask, color = np.array([row.mean_loops == loops for row in own]), f"C{index % 10}"
        left.plot(measured[mask], predicted[mask], "o", markersize=4, color=color, label=f"{loops:g} mean loops")
        right.plot(np.full(mask.sum(), loops), residuals[mask], "o", markersize=4, color=color)
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(True, color="0.92")
    return figure


def _test_time(fits: Fits) -> Section:
    section = Section(
        "Loops at inference",
        "Loss of one trained model by the loops of its evaluation, with L_inf + Z exp(-z T) and its floor L_inf. The "
        "table's errors beyond are those of fits that saw the loop counts up to `fitted up to T` only.",
        tables=[curves_table(fits)] if fits.test_time else [],
    )
    for item in fits.test_time[:MAX_CURVES]:
        plain = "".join(c if c.isalnum() else "_" for c in item.run)
        section.figures[f"scaling_test_time_{plain}"] = _curve(item)
    if len(fits.test_time) > MAX_CURVES:
        section.notes.append(f"Figures of the first {MAX_CURVES} of {len(fits.test_time)} curves; the table has all.")
    return section


def _curve(item: TestTime) -> Figure:
    figure = new_figure(7.0, 3.4)
    axes = axes_of(figure, xlabel="loops at inference", ylabel="validation loss", title=item.run)
    constants, fit = item.exponential.values, item.exponential
    fine = np.linspace(min(item.num_loops), max(item.num_loops), 100)
    axes.plot(item.num_loops, item.loss, "o", color="C0", label="measured")
    axes.plot(fine, fit.law.predict(constants, {"num_loops": fine}), color="C0", label="exponential")
    floor = constants["L_inf"]
    axes.axhline(floor, color="black", linestyle="--", linewidth=1, label=f"floor {floor:.4f}")
    axes.axvline(item.mean_loops, color="0.7", linewidth=1, label="mean loops of training")
    axes.legend(fontsize=8)
    return figure
