"""What a value may be beyond its type, declared where its field is: `width: Annotated[int, Range(1, 65_536)] = 768`.

pretrain/config/check.py applies it to every value, docs/configuration.md shows it. A bound is far above what anybody
trains today, and below what would overflow, hang a check or fill the memory by itself.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated

from pretrain.errors import ConfigError

TINY = 1e-30
"""Stands for 0 as an excluded bound: smaller numbers are lost in fp32, which ends at 1e-38."""

_LONGEST_PATH = 3_000
"""Linux ends at 4,095, with what a run adds below its folder."""


def require(condition: bool, field_name: str, value: object, expected: str) -> None:
    """Raises ConfigError naming the field, its value and what was expected, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field_name}={value!r}: expected {expected}")


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included but where `above` or `below` leave them out."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        over = value > self.least if self.above else value >= self.least
        return over and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        """In words: ">= 1 and <= 2^16"; "0, 1, 2 or 3"."""
        if isinstance(self.least, int) and isinstance(self.most, int) and 0 < self.most - self.least <= 4:
            *first, last = range(self.least, self.most + 1)
            return f"{', '.join(map(str, first))} or {last}"
        lower = f"> 0 (>= {TINY:g})" if self.least == TINY else f"{'>' if self.above else '>='} {_number(self.least)}"
        return f"{lower} and {'<' if self.below else '<='} {_number(self.most)}"


@dataclass(frozen=True)
class PathText:
    """The name of a file or folder: not empty; `~` and `~user` stand for the home."""

    def expand(self, text: str) -> str:
        """The name without `~`. Errors: ValueError saying what was expected."""
        if not text.strip():
            raise ValueError("the name of a folder, not an empty one")
        if len(os.fsencode(text)) > _LONGEST_PATH or max(len(os.fsencode(name)) for name in text.split("/")) > 255:
            raise ValueError(f"a name of at most {_LONGEST_PATH} bytes, 255 between two slashes")
        expanded = os.path.expanduser(text)
        if expanded.startswith("~"):
            user = text.split("/")[0]
            raise ValueError(f"a folder; there is no user {user[1:]!r} for {user} (write ./{user} for a folder)")
        return expanded


FolderName = Annotated[str, PathText()]

Count = Annotated[int, Range(1, 10**9)]
"""Steps, rows, documents: at least one."""
CountOrZero = Annotated[int, Range(0, 10**9)]
Loops = Annotated[int, Range(1, 4_096)]
Layers = Annotated[int, Range(0, 512)]
Channels = Annotated[int, Range(1, 2**20)]
Tokens = Annotated[int, Range(1, 2**24)]
Seed = Annotated[int, Range(0, 2**64, below=True)]
Seconds = Annotated[float, Range(TINY, 31_536_000)]
"""Up to a year."""
Weight = Annotated[float, Range(0, 1e6)]
"""A factor of a loss, 0 for none."""
Positive = Annotated[float, Range(TINY, 1e6)]
LearningRate = Annotated[float, Range(TINY, 1e30)]
Epsilon = Annotated[float, Range(TINY, 1)]
Share = Annotated[float, Range(0.0, 1.0)]
ShareBelowOne = Annotated[float, Range(0.0, 1.0, below=True)]


def _number(value: float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    for base in (2, 10):
        exponent = round(math.log(value, base)) if value >= 2**20 - 1 else 0
        if exponent and base**exponent == value:
            return f"{base}^{exponent}"
    return f"{value:_}"
