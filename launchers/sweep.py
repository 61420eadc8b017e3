"""A sweep: the overrides of each run, from a file that lists them or spans a grid.

    - [optimizer.lr=4e-3, train.seed=1]        grid:
    - [optimizer.lr=8e-3, train.seed=1]          optimizer.lr: [4e-3, 8e-3]
    - [run.name=control, train.seed=2]           train.seed: [0, 1]

A list has one run per item; a grid one per combination, the last key changing fastest.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from pretrain.config.yaml_text import read_yaml
from pretrain.errors import ConfigError

FORMS = "a list of lists such as [optimizer.lr=4e-3, train.seed=1], or 'grid:' with a list of values for each key"


def read_sweep(path: Path) -> list[list[str]]:
    """The overrides (`key=value`) of each run, in order. Errors: ConfigError naming file and run."""
    if not path.is_file():
        raise ConfigError(f"--array {path}: no such file; expected {FORMS}")
    try:
        tree = read_yaml(path)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ").removeprefix("cannot be read: ")
        raise ConfigError(f"--array {path}: cannot be read: {reason}") from error
    runs = _grid(path, tree["grid"]) if isinstance(tree, dict) and list(tree) == ["grid"] else _list(path, tree)
    for i, run in enumerate(runs):
        if run in runs[:i]:
            raise ConfigError(f"--array {path}: runs {runs.index(run)} and {i} are both {' '.join(run)}")
    return runs


def _list(path: Path, items: Any) -> list[list[str]]:
    if not isinstance(items, list) or not items:
        raise ConfigError(f"--array {path}: expected {FORMS}")
    for i, item in enumerate(items):
        if not isinstance(item, list) or not item or not all(isinstance(text, str) and "=" in text for text in item):
            raise ConfigError(f"--array {path}, run {i}: {item!r}: expected a list such as [optimizer.lr=4e-3]")
    return items


def _grid(path: Path, axes: Any) -> list[list[str]]:
    if not isinstance(axes, dict) or not axes:
        raise ConfigError(f"--array {path}: grid={axes!r}: expected keys with lists of values")
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--array {path}: grid.{key}={values!r}: expected a list of values")
    combinations = itertools.product(*axes.values())
    return [[f"{key}={_text(value)}" for key, value in zip(axes, values, strict=True)] for values in combinations]


def _text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
