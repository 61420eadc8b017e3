"""Files that others may have written: names in them, their JSON, and folders of them, checked before they are used.

A data set, a checkpoint or a bundle of tasks may come from anywhere; docs/security.md says what it can do. Stdlib only.
"""

from __future__ import annotations

import json
import os
import stat
import unicodedata
from pathlib import Path, PureWindowsPath
from typing import Any

from pretrain.errors import ConfigError, PretrainError

MAX_PART_BYTES, MAX_NAME_BYTES = 255, 1_024
"""Of one part of a path, and of all parts: what every file system in use takes."""
NAME_RULE = (
    "a relative path below its folder, of plain characters, without '..', drive or control characters, at most "
    f"{MAX_PART_BYTES} bytes a part and {MAX_NAME_BYTES} in all"
)
ONE_LINE = "text in one line, without control characters"
"""What `is_one_line` asks for, in messages."""
_CONTROL = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's control characters, halves of pairs, and separators of lines and paragraphs."""


def is_one_line(text: str) -> bool:
    """Whether `text` can stand in a file, a script and a message: one line, no control character, no half of a pair.

    Every other character may be in a name, also one that this version of Python does not know yet.
    """
    return not any(unicodedata.category(char) in _CONTROL for char in text)


def check_name(name: object, where: str, error: type[PretrainError] = ConfigError) -> str:
    """`name`, which was read from a file, if it stays below the folder it is joined to.

    Raises `error`, beginning with `where` (file and key), for anything that breaks NAME_RULE on any system.
    """
    if isinstance(name, str) and is_one_line(name):
        path = PureWindowsPath(name)  # knows both kinds of separators, and drives
        longest = max((len(part.encode()) for part in path.parts), default=0)
        short = longest <= MAX_PART_BYTES and len(name.encode()) <= MAX_NAME_BYTES
        if path.parts and not path.anchor and ".." not in path.parts and short:
            return name
    raise error(f"{where} is {_shown(name)}, expected {NAME_RULE}; see where the files come from")


def path_below(folder: Path, name: object, where: str, error: type[PretrainError] = ConfigError) -> Path:
    """The file `name` below `folder`, to be written, replaced or removed: no link on the way may lead out of `folder`.

    What is only read needs `check_name` alone: the hub's cache and people with two disks put links into their folders.
    Raises `error` as `check_name` does.
    """
    path = folder / check_name(name, where, error)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link that leads to itself
        inside = False
    if not inside:
        raise error(
            f"{where} is {_shown(name)}: {path} leads out of {folder} through a symbolic link; expected a file within "
            "the folder, which is to be written or removed: remove the link"
        )
    return path


def parse_json(data: bytes, where: str, error: type[PretrainError] = ConfigError, mend: str = "restore it") -> Any:
    """The value that the UTF-8 text holds. Raises `error`, which names `where`, for anything that is not plain JSON.

    Keys that occur twice are refused: readers disagree about which one counts. So are halves of UTF-16's pairs, which
    tokenizers and file systems cannot take.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as problem:  # not UTF-8 and numbers of 5,000 digits are ValueErrors
        raise error(f"{where}: not valid JSON ({problem}); {mend}") from problem


def read_json(path: Path, error: type[PretrainError] = ConfigError, mend: str = "restore it") -> dict[str, Any]:
    """The object in a JSON file. Raises `error`, which names the file, where it cannot be read or holds no object."""
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror or problem}); {mend}") from problem
    value = parse_json(data, str(path), error, mend)
    if not isinstance(value, dict):
        raise error(f"{path}: holds {type(value).__name__}, expected an object; {mend}")
    return value


def files_below(folder: Path) -> list[Path]:
    """The files below `folder`, sorted, through links to folders too; what is hidden (`.name`) is left out.

    Errors: ConfigError for what would otherwise be left out without a word: a link that leads nowhere, a folder that
    cannot be read, two ways to one folder (among them a link back up), and what is neither file nor folder.
    """
    found: list[Path] = []
    seen: dict[str, Path] = {}
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        first = seen.setdefault(os.path.realpath(place), place)
        if first is not place:
            raise ConfigError(f"{place}: the same folder as {first}, which is searched too; remove the link")
        try:
            names = sorted(name for name in os.listdir(place) if not name.startswith("."))
        except OSError as error:
            raise ConfigError(f"{place}: cannot be searched ({error.strerror}); mend it or move it away") from error
        for path in (place / name for name in names):
            kind = _kind(path)
            if kind == "folder":
                waiting.append(path)
            else:
                found.append(path)
    return sorted(found)


def _kind(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        what = f"a link that leads nowhere (to {os.readlink(path)})" if path.is_symlink() else "cannot be read"
        raise ConfigError(f"{path}: {what}: {error.strerror}; mend it or remove it") from error
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        return "folder" if stat.S_ISDIR(mode) else "file"
    raise ConfigError(f"{path}: neither a file nor a folder (a pipe, socket or device); remove it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return result


def _shown(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 200 else text[:200] + "..."
