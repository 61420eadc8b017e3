"""Names, JSON and folders that others wrote: what is refused, with the file and the value."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.foreign import check_name, files_below, parse_json, path_below, read_json

GOOD = ["a", "train/00000/shard.00000.mds", ".hidden", "two words", "naïve/東京", "..a", "a..", "v1.0", "C/x", "a/./b"]
BAD: list[Any] = [
    "", ".", "./", "..", "../a", "a/../../b", "a/..", "/etc/passwd", "//host/share/x", "C:", "C:\\x", "c:x", "\\x",
    "\\\\host\\share\\x", "..\\a", "a\\..\\..\\b", "a\0b", "a\nb", "a\rb", "a\tb", "\x1b[2J", "a\x7fb", "a\x85b",
    "a\u2028b", "a\u2029b", "a\ud800b", "x" * 256, "x/" * 600, "東" * 86, None, 3, ["a"], {"a": 1}, True,
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_names_that_stay_below_their_folder(tmp_path: Path, name: str) -> None:
    assert check_name(name, "here") == name
    assert path_below(tmp_path, name, "here") == tmp_path / name


@pytest.mark.parametrize("name", BAD)
def test_names_that_do_not(tmp_path: Path, name: Any) -> None:
    expected = r"^index\.json: basename is .*expected a relative path below its folder"
    for error in (ConfigError, DataError, CheckpointError):
        with pytest.raises(error, match=expected):
            path_below(tmp_path, name, "index.json: basename", error)
        with pytest.raises(error, match=expected) as caught:
            check_name(name, "index.json: basename", error)
        message = str(caught.value)
        assert message.isascii() and message.isprintable(), "a name in a log writes nothing but itself"


def test_links_that_lead_out_are_not_written_through(tmp_path: Path) -> None:
    folder, outside = tmp_path / "set", tmp_path / "outside"
    (folder / "own").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").touch()
    (folder / "out").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    (folder / "loop").symlink_to("loop")
    (folder / "inside").symlink_to("own")
    for name in ("out", "out/new", "out/file", "file", "loop", "loop/x", "inside/../../outside/file"):
        with pytest.raises(ConfigError, match="here is"):
            path_below(folder, name, "here")
    assert path_below(folder, "inside/new", "here") == folder / "inside" / "new"
    (tmp_path / "linked").symlink_to(folder)
    assert path_below(tmp_path / "linked", "own/new", "here").parent.is_dir(), "the folder itself may be a link"


NOT_JSON = {
    "not UTF-8": b'{"a": "\xff"}', "a mark of the byte order": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"), "truncated": b'{"a": ', "empty": b"",
    "nested": b"[" * 200_000 + b"]" * 200_000, "digits": b'{"a": 1' + b"0" * 5_000 + b"}",
    "twice": b'{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "control character": b'{"a": "\n"}', "two": b"{} {}",
    "half of a pair": b'{"a": ["\\ud800"]}',
}  # fmt: skip


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_what_is_not_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(DataError, match=r"x\.json: not valid JSON \(.*\); restore it"):
        read_json(tmp_path / "x.json", DataError)


def test_json_that_is_no_object_or_cannot_be_read(tmp_path: Path) -> None:
    assert parse_json('["\u2028", {"a": 1}]'.encode(), "here") == ["\u2028", {"a": 1}]
    for text in ("[1]", "null", "3", '"a"', "true"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match=r"x\.json: holds \w+, expected an object"):
            read_json(tmp_path / "x.json")
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: cannot be read"):
            read_json(path)


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_folders_are_searched_through_links(tmp_path: Path) -> None:
    folder = tree(tmp_path / "set", "b/z", "a", ".hidden/x", "b/.y", "b-c")
    (folder / "linked").symlink_to(tree(tmp_path / "other", "deep/x"))
    (folder / "c").symlink_to(folder / "a")
    assert [str(path.relative_to(folder)) for path in files_below(folder)] == ["a", "b/z", "b-c", "c", "linked/deep/x"]


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("b/gone", "nowhere", r"b/gone: a link that leads nowhere \(to nowhere\)"),
        ("b/up", "..", r"b/up: the same folder as .*set, which is searched too"),
        ("b/self", ".", r"b/self: the same folder as .*set/b"),
        ("again", "b", r"the same folder as .*, which is searched too"),
        ("ring", "ring", r"ring: a link that leads nowhere"),
    ],
)
def test_links_that_lead_nowhere_or_in_circles(tmp_path: Path, link: str, target: str, message: str) -> None:
    folder = tree(tmp_path / "set", "a", "b/z")
    (folder / link).symlink_to(target)
    with pytest.raises(ConfigError, match=message):
        files_below(folder)


def test_what_is_no_file_or_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree(tmp_path / "set", "a", "b/z")
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(ConfigError, match=r"pipe\.txt: neither a file nor a folder"):
        files_below(folder)
    (folder / "pipe.txt").unlink()
    whole = os.listdir

    def refused(place: Path) -> list[str]:  # this test may run as root, whom no mode stops
        if place.name == "b":
            raise PermissionError(13, "Permission denied")
        return whole(place)

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(ConfigError, match=r"set/b: cannot be searched \(Permission denied\)"):
        files_below(folder)
