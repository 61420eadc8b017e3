"""Types for the options of commands, with the same care as configuration keys: `add("--rows", type=integer(1, 10**6))`.

argparse ends the process with code 2 and names the option in front of the message. Numbers are decimal and ASCII, as in
configuration files: int() and float() take full-width digits, 0650 and nan.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from pretrain.config.bounds import PathText, Range
from pretrain.config.yaml_text import INTEGER, NUMBER
from pretrain.foreign import ONE_LINE, is_one_line

LARGEST = 10**15
"""Of an option without a bound of its own: a float holds every integer up to here."""


def integer(least: int = -LARGEST, most: int = LARGEST) -> Callable[[str], int]:
    """The type of an option that takes integers from `least` to `most`."""
    bounds = Range(least, most)

    def read(text: str) -> int:
        if not INTEGER.fullmatch(text) or len(text) > 40 or int(text) not in bounds:
            raise argparse.ArgumentTypeError(f"{text}: expected an integer {_words(bounds)}".rstrip())
        return int(text)

    return read


def integers(least: int = -LARGEST, most: int = LARGEST) -> Callable[[str], tuple[int, ...]]:
    """The type of an option that takes integers from `least` to `most` with commas between, in their order."""
    of_part = integer(least, most)

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(of_part(part.strip()) for part in text.split(","))
        except argparse.ArgumentTypeError as error:
            expected = f"integers {_words(Range(least, most))}".rstrip()
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}, with commas between ({error})") from error

    return read


def number(least: float = -LARGEST, most: float = LARGEST, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes finite numbers from `least` (`above`: without itself) to `most`."""
    bounds = Range(least, most, above=above)

    def read(text: str) -> float:
        if not NUMBER.fullmatch(text) or not math.isfinite(float(text)) or float(text) not in bounds:
            raise argparse.ArgumentTypeError(f"{text}: expected a number {_words(bounds)}".rstrip())
        return float(text)

    return read


def pathname(text: str) -> Path:
    """The type of an option that takes a file or a folder; `~` is the home, also in `--out=~/x`, which shells leave."""
    try:
        if not is_one_line(text):
            raise ValueError(ONE_LINE)
        return Path(PathText().expand(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {error}") from error


def _words(bounds: Range) -> str:
    """The bounds that somebody chose."""
    if bounds.least == -LARGEST:
        return "" if bounds.most == LARGEST else f"<= {bounds.most}"
    sign = ">" if bounds.above else ">="
    return f"{sign} {bounds.least}" if bounds.most == LARGEST else str(bounds)
