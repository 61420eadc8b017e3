"""The options of every command: what cannot be meant ends with code 2 and the option's name before anything is read."""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.arguments import integer, integers, number, pathname
from tests.helpers import REPOSITORY

FILES = [
    path
    for pattern in ("tools/*.py", "tools/scaling/recovery.py", "data_prep/*.py", "launchers/*.py", "pretrain/main.py")
    for path in sorted(REPOSITORY.glob(pattern))
    if "ArgumentParser(" in path.read_text(encoding="utf-8") or path.name == "main.py"
]
NEVER_NUMBERS = (
    "", " ", "abc", "nan", "-nan", "inf", "-inf", "1e999", "0650", "00", "0x10", "10:50",
    "\uff11\uff12", "1.5.5", "1,5", "1_",
    "²", "9" * 400, "true", "None", "3 ", " 3", "1e", "1/2", "٣", "1__0",
)  # fmt: skip
NEVER_INTEGERS = ("1.5", "1e9", "1e308", "-0.5", "1.0", ".5")
NEVER_PATHS = ("", " ", "a\0b", "a\nb", "~nobody_here/x", "x" * 300, "d/" * 3_000)
_INTEGER, _INTEGERS, _NUMBER = integer().__code__, integers().__code__, number().__code__


class _Captured(Exception):
    """The parser that a command was about to use."""


def parsers_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[argparse.ArgumentParser]:
    """The parser of a command and those of its subcommands; nothing runs."""

    def capture(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Captured(parser)

    module = importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_known_args"):
            patch.setattr(argparse.ArgumentParser, name, capture)
        with pytest.raises(_Captured) as caught:
            try:
                module.main([])
            except TypeError:
                module.main()
    parser: argparse.ArgumentParser = caught.value.args[0]
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(sub for action in inner for sub in action.choices.values())]


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options that take a value, and positional arguments."""
    for action in parser._actions:
        if action.nargs != 0 and not isinstance(action, argparse._SubParsersAction):
            yield action


def is_kind(action: argparse.Action, code: Any) -> bool:
    return getattr(action.type, "__code__", None) is code


def refused(parser: argparse.ArgumentParser, action: argparse.Action, value: str, capsys: Any) -> bool:
    """Whether `value` ends the process with code 2 and a message about this option."""
    option = action.option_strings[-1] if action.option_strings else None
    try:
        before = [other for other in parser._get_positional_actions() if other is not action] if not option else []
        earlier = ["x" for other in before if parser._actions.index(other) < parser._actions.index(action)]
        parser.parse_known_args([*earlier, f"{option}={value}" if option else value])
    except SystemExit as end:
        message = capsys.readouterr().err
        name = "/".join(action.option_strings) or str(action.metavar or action.dest)
        return end.code == 2 and f"argument {name}" in message and "expected" in message
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_no_number_and_no_path_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    for parser in parsers_of(path, monkeypatch):
        for action in options_of(parser):
            assert action.type not in (int, float, Path), f"{action.dest}: pretrain/arguments.py has a type for it"
            several = is_kind(action, _INTEGERS)
            whole = several or is_kind(action, _INTEGER)
            if whole or is_kind(action, _NUMBER):
                words = [*NEVER_NUMBERS, *(NEVER_INTEGERS if whole else ())]
                words = [f"1,{word}" for word in words if word not in ("1,5", "3 ", " 3")] if several else words
                words += [f"-{10 ** draw.randrange(16, 400)}", f"{10 ** draw.randrange(41, 400)}"]
            elif action.type is pathname:
                words = list(NEVER_PATHS)
            else:
                continue
            for word in words:
                if action.option_strings or not word.startswith("-"):
                    assert refused(parser, action, word, capsys), f"{action.dest} takes {word!r}"


def test_bounds_and_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert pathname("~/x") == Path("/home/me/x") and pathname("a/~") == Path("a/~")
    assert (integer(1)("1_000"), number(0)("1e-3"), number()("-2")) == (1000, 1e-3, -2.0)
    assert integers(0, 9)("3, 0,1") == (3, 0, 1)
    for read, text, expected in (
        (integer(1), "0", "0: expected an integer >= 1"),
        (integer(1, 64), "65", "65: expected an integer >= 1 and <= 64"),
        (integer(most=64), "65", "65: expected an integer <= 64"),
        (number(0, above=True), "0", "0: expected a number > 0"),
        (number(), "nan", "nan: expected a number"),
        (integers(1), "2,0", "2,0: expected integers >= 1, with commas between (0: expected an integer >= 1)"),
        (integers(), "1,\uff12", "1,\uff12: expected integers, with commas between (\uff12: expected an integer)"),
        (pathname, "a\u2028b", "'a\\u2028b': expected text in one line, without control characters"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            read(text)
        assert str(caught.value) == expected
