"""Accuracy by depth and loops of a depth task, as a heat map, and the curve of the depth that is solved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from pretrain.evaluation.depth_task import ACCURACY

ByLoops = Mapping[int, Mapping[str, float]]
"""{loop count: {metric: value}}, as TaskResult has it."""
COLORS = "cividis"
"""Also told apart by people who do not see red or green, and in print."""


def depths_of(by_loops: ByLoops) -> list[int]:
    """The depths that were measured, rising."""
    start = ACCURACY.format("")
    return sorted(int(name.removeprefix(start)) for name in next(iter(by_loops.values())) if name.startswith(start))


def draw_heat_map(axes: Axes, by_loops: ByLoops, title: str) -> None:
    """Depths from the bottom up, loop counts from left to right, accuracy as color and number."""
    depths, loops = depths_of(by_loops), sorted(by_loops)
    values = np.array([[by_loops[t][ACCURACY.format(depth)] for t in loops] for depth in depths])
    image = axes.imshow(values, origin="lower", aspect="auto", vmin=0.0, vmax=1.0, cmap=COLORS)
    for (row, column), value in np.ndenumerate(values):
        color = "black" if value > 0.5 else "white"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(loops)), [str(t) for t in loops])
    axes.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set(xlabel="loops", ylabel="depth of the problem", title=title)
    axes.figure.colorbar(image, ax=axes, label="accuracy")
