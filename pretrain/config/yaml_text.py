"""The YAML that users write: OmegaConf's reader (safe, bounded aliases, no duplicate keys), with numbers as they look.

YAML 1.1 takes 0650 for 424, 10:50 for 650 and 0x10 for 16. Here a number is decimal, without leading zeros; anything
else is text, which a field for a number refuses.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf._yaml import get_yaml_loader  # OmegaConf.load's own, which has no public name; the version is pinned
from yaml import MarkedYAMLError, YAMLError, load

from pretrain.errors import ConfigError

INTEGER = re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*)", re.ASCII)
NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9](?:_?[0-9])*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_MOST_DIGITS = 40
_TAG = "tag:yaml.org,2002:"


def read_yaml(path: Path) -> Any:
    """What a file holds: dicts, lists, text, numbers, truth values; {} where it is empty.

    Errors: ConfigError naming the file and, where it is not YAML, line and column.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return {} if tree is None else tree


def parse_yaml(text: str) -> Any:
    """What `text` holds. Errors: ValueError that says where it is not valid YAML."""
    try:
        return load(text, Loader=_loader())
    except MarkedYAMLError as error:
        raise ValueError(_describe(error, text)) from error
    except (YAMLError, UnicodeEncodeError) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError("not valid YAML: nested too deeply") from error


@cache
def _loader() -> Any:
    class Loader(get_yaml_loader()):  # type: ignore[misc]
        """OmegaConf's, with other resolvers; its own class, since resolvers belong to a class."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}int", f"{_TAG}float")]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    short = rf"(?!.{{{_MOST_DIGITS + 1}}})"
    for kind, pattern in (("int", INTEGER.pattern), ("float", f"{NUMBER.pattern}|{_SPECIAL}")):
        plain = re.compile(f"{short}(?:{pattern})$", re.ASCII)
        Loader.add_implicit_resolver(f"{_TAG}{kind}", plain, list("-+.0123456789"))
    # `!!int 010` and the like are numbers by force; they go the same way.
    Loader.add_constructor(f"{_TAG}int", lambda loader, node: _number(loader, node, INTEGER, int))
    Loader.add_constructor(f"{_TAG}float", lambda loader, node: _number(loader, node, NUMBER, float))
    return Loader


def _number(loader: Any, node: Any, pattern: re.Pattern[str], kind: type) -> Any:
    text = loader.construct_scalar(node)
    if kind is float and re.fullmatch(_SPECIAL, text):
        return float(text.replace(".", ""))
    return kind(text) if pattern.fullmatch(text) and len(text) <= _MOST_DIGITS else text


def _describe(error: MarkedYAMLError, text: str) -> str:
    mark, problem = error.problem_mark, error.problem or error.context
    if mark is None:
        return f"not valid YAML: {problem}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    tab = "; YAML indents with spaces, never with tabs" if "\t" in indent else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {problem}{tab}"
