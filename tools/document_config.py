"""Writes the tables of docs/configuration.md: every key from the dataclasses, the families, the rules of resuming.

    python -m tools.document_config

The text outside the markers is kept. A test fails where the page is not what this would write.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pretrain.config.check import MISSING, describe_type, fields_of, without_null
from pretrain.config.families import FAMILIES
from pretrain.config.resume import RESUME_KEYS
from pretrain.config.schema import Config
from pretrain.files import write_text

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def main() -> int:
    """Rewrites the page."""
    write_text(PAGE, render(PAGE.read_text(encoding="utf-8")))
    return 0


def render(page: str) -> str:
    """Returns `page` with the text between each pair of markers made anew."""
    for name, lines in (("keys", key_tables()), ("families", family_table()), ("resume", resume_table())):
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"{PAGE}: expected the markers {begin.strip()} and {end} once each")
        before, rest = page.split(begin)
        page = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    return page


def key_tables() -> Iterator[str]:
    """Yields one table per section: key, values, default, meaning."""
    for name, hint in fields_of(Config).items():
        yield from _section_table(hint, name)


def family_table() -> Iterator[str]:
    """Yields what each family fills in."""
    yield from ("| family | sets |", "|---|---|")
    for family, preset in FAMILIES.items():
        recurrence = [f"recurrence.{key}: {_show(value)}" for key, value in preset["recurrence"].items()]
        others = [f"{key}: {_show(value)}" for key, value in preset.items() if key != "recurrence"]
        yield f"| `{family}` | {', '.join(others + recurrence)} |"


def resume_table() -> Iterator[str]:
    """Yields the rule of each prefix."""
    yield from ("| key | may change | because |", "|---|---|---|")
    words = {"free": "yes", "override": "with `run.override=true`", "never": "no"}
    for key, (rule, reason) in RESUME_KEYS.items():
        yield f"| `{key}` | {words[rule]} | {reason} |"


def _section_table(section: Any, prefix: str) -> Iterator[str]:
    summary = (inspect.getdoc(section) or "").partition("\n\n")[0].replace("\n", " ")
    docs, inner = _field_docs(section), []
    yield from (f"### `{prefix}`", "", summary, "", "| key | values | default | meaning |", "|---|---|---|---|")
    for item in fields(section):
        hint = fields_of(section)[item.name]
        core = without_null(hint)
        parts = typing.get_args(core)
        if is_dataclass(core):
            inner.append((core, f"{prefix}.{item.name}"))
            continue
        if parts and is_dataclass(parts[0]):
            inner.append((parts[0], f"{prefix}.{item.name}[]"))
        default = item.default_factory() if callable(item.default_factory) else item.default
        shown = "required" if default == MISSING else f"`{_show(default)}`"
        yield f"| `{item.name}` | {describe_type(hint)} | {shown} | {_cell(docs.get(item.name, ''))} |"
    yield ""
    for core, key in inner:
        yield from _section_table(core, key)


def _field_docs(section: type) -> dict[str, str]:
    """The text below each field, which Python does not keep at run time."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(section)).body[0]).body
    docs = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            docs[ast.unparse(statement.target)] = ast.literal_eval(following.value)
    return docs


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def _show(value: Any) -> str:
    """A value as YAML would have it."""
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
