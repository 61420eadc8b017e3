"""One self-contained HTML page of findings: sentences, figures and tables, without scripts or anything from a network.

Figures are matplotlib's, written as PNG files beside the page and embedded in it as data URIs.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.files import write_text

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem;
     border-bottom: 1px solid #ddd; } h3 { font-size: 1.05rem; }
p.what { max-width: 50rem; } p.note { color: #8a4b00; max-width: 50rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #999; }
caption { text-align: left; color: #555; padding-bottom: .3rem; }
"""


@dataclass(frozen=True)
class Table:
    """Rows below column names; a cell is text, a number or None (shown as a dash)."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass
class Section:
    """One finding of a page."""

    title: str
    what: str
    """What was measured, in a sentence or two."""
    figures: dict[str, Figure] = field(default_factory=dict)
    """By file name without suffix."""
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What does not apply here and why."""


def axes_of(figure: Figure, **settings: Any) -> Axes:
    """The only axes of a figure, in the style of all pages."""
    axes = figure.add_subplot(**settings)
    axes.grid(True, color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def new_figure(width_inches: float = 8.0, height_inches: float = 4.2) -> Figure:
    """An empty figure that lays itself out."""
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def line_figure(lines: Mapping[str, tuple[Sequence[float], Sequence[float | None]]], **settings: Any) -> Figure:
    """One line with markers for each name in `lines` (x, y; None leaves a gap); `settings` are those of the axes."""
    figure = new_figure()
    axes = axes_of(figure, **settings)
    for index, (name, (x, y)) in enumerate(lines.items()):
        values = [math.nan if value is None else value for value in y]
        axes.plot(x, values, marker="o", markersize=3.5, color=f"C{index % 10}", label=name)
    if lines:
        axes.legend(fontsize=8)
    return figure


def write_page(folder: Path, title: str, subtitle: str, sections: Iterable[Section], name: str = "report.html") -> Path:
    """The path of the page, written with the PNG of every figure into `folder` (made if absent)."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = list(sections)
    links = "".join(f'<a href="#s{i}">{html.escape(s.title)}</a> ' for i, s in enumerate(sections))
    body = "".join(_section(folder, f"s{i}", section) for i, section in enumerate(sections))
    path = folder / name
    write_text(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(subtitle)}</p><nav>{links}</nav>\n{body}</body></html>\n",
    )
    return path


def markdown(table: Table) -> str:
    """The table as Markdown, for a terminal or a log."""
    rows = [[show(cell) for cell in row] for row in table.rows]
    lines = [list(table.columns), ["---"] * len(table.columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(cell: Any) -> str:
    """A cell as text: numbers to four digits, None as a dash."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    if isinstance(cell, bool) or not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
    return f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e7 else f"{cell:.4g}"


def _section(folder: Path, anchor: str, section: Section) -> str:
    figures = "".join(_figure(folder, name, figure, section) for name, figure in section.figures.items())
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in section.notes)
    tables = "".join(map(_table, section.tables))
    return (
        f'<section id="{anchor}"><h2>{html.escape(section.title)}</h2>'
        f'<p class="what">{html.escape(section.what)}</p>{notes}{figures}{tables}</section>\n'
    )


def _figure(folder: Path, name: str, figure: Figure, section: Section) -> str:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img id="{html.escape(name)}" alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">'


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(show(c))}</td>" for c in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{html.escape(table.caption)}</caption>" if table.caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
