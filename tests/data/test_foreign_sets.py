"""Data sets of strangers: nothing outside of the set or its cache is touched, and what cannot be read is named."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.schema import SourceConfig
from pretrain.data.loader import TrainLoader
from pretrain.data.manifest import read_manifest, read_shards
from pretrain.data.validation import ValidationRows
from pretrain.errors import ConfigError, PretrainError
from tests.data.sets import alone, make_config, numbered_rows, write_set

Json = dict[str, Any]
OUTSIDE = ("../../victim/precious.txt", "../victim/precious.txt", "{tmp}/victim/precious.txt", "..\\victim", "a\0b")


@pytest.fixture
def origin(set_101: Path, tmp_path: Path) -> Path:
    """A copy of the set, with a neighbour that nobody may touch."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious.txt").write_text("precious")
    return Path(shutil.copytree(set_101, tmp_path / "origin"))


def edit(path: Path, change: Callable[[Json], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def everything_but(folder: Path, *names: str) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in names)
    return {str(path): path.read_bytes() for path in paths}


def refused(origin: Path, message: str) -> None:
    """The set is refused as a local one and through a cache, and nothing around it has changed."""
    folder = origin.parent
    before = everything_but(folder, "caches")
    for number, build in enumerate((TrainLoader, ValidationRows)):
        cache = folder / "caches" / f"{number}{len(message)}"  # its lock ends with the process
        cached = SourceConfig(path=str(cache), remote=str(origin))
        for cfg in (make_config(origin), make_config(None, sources=[cached])):
            with pytest.raises(ConfigError, match=message):
                build(cfg, alone())  # type: ignore[operator]
    assert everything_but(folder, "caches") == before


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("data", ["raw_data", "zip_data"])
def test_shards_with_names_outside(origin: Path, tmp_path: Path, name: str, data: str) -> None:
    def change(index: Json) -> None:
        shard = index["shards"][1]
        shard[data] = dict(shard["raw_data"], basename=name.format(tmp=tmp_path))
        shard["compression"] = "zstd:3" if data == "zip_data" else None

    edit(origin / "train" / "index.json", change)
    refused(origin, r"train/index\.json: basename is .*, expected a relative path below its folder")


@pytest.mark.parametrize("name", [*OUTSIDE, "../written_tok"])
def test_a_tokenizer_or_a_split_outside(origin: Path, tmp_path: Path, name: str) -> None:
    saved = (origin / "manifest.json").read_text()
    name = name.format(tmp=tmp_path)
    edit(origin / "manifest.json", lambda data: data["tokenizer"].update(path=name))
    refused(origin, r"manifest\.json: tokenizer\.path is .*, expected a relative path below its folder")
    (origin / "manifest.json").write_text(saved)
    edit(origin / "manifest.json", lambda data: data["splits"].update({name: data["splits"]["validation"]}))
    refused(origin, r"manifest\.json: a name among splits is .*, expected a relative path below its folder")
    assert not (tmp_path / "written_tok").exists()


def test_a_cache_with_links_that_lead_out_is_not_written_through(origin: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "train").symlink_to(tmp_path / "victim")
    shutil.copy(origin / "manifest.json", cache)
    cfg = make_config(None, sources=[SourceConfig(path=str(cache), remote=str(origin))])
    with pytest.raises(ConfigError, match=r"train/index\.json leads out of .*cache through a symbolic link"):
        TrainLoader(cfg, alone())
    cache = tmp_path / "cache2"
    shutil.copytree(origin, cache)
    cfg = make_config(None, sources=[SourceConfig(path=str(cache), remote=str(origin))])
    target = tmp_path / "victim" / "precious.txt"
    (cache / "train" / "shard.00001.mds").unlink()
    (cache / "train" / "shard.00001.mds").symlink_to(target)
    with pytest.raises(ConfigError, match=r"shard\.00001\.mds leads out of .*cache2 through a symbolic link"):
        TrainLoader(cfg, alone())
    assert target.read_text() == "precious"


def test_a_local_set_may_lie_on_two_disks(origin: Path, tmp_path: Path) -> None:
    """As in the hub's cache, where every file is a link: it is read alone."""
    os.rename(origin / "train", tmp_path / "other_disk")
    (origin / "train").symlink_to(tmp_path / "other_disk")
    with TrainLoader(make_config(origin), alone()) as loader:
        assert next(loader).tokens is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shards: shards[1]["raw_data"].update(basename="index.json"), "basename 'index.json' is given twice"),
        (lambda shards: shards[1]["raw_data"].update(basename=shards[0]["raw_data"]["basename"]), "is given twice"),
        (lambda shards: shards[1].update(format="json"), "format is 'json', expected 'mds'"),
        (lambda shards: shards[1].update(samples=10**30), "shard.00001.mds has 10{30} samples in"),
        (lambda shards: shards[1].update(samples=0), "samples is 0, expected an integer >= 1"),
        (lambda shards: shards[1].update(samples=2.0), "samples is 2.0, expected an integer >= 1"),
        (lambda shards: shards[1]["raw_data"].update(bytes=1 << 32), "raw_data.bytes is 4294967296, expected"),
        (lambda shards: shards[1]["raw_data"].update(bytes="9"), "raw_data.bytes is '9', expected an integer"),
        (lambda shards: shards[1].update(compression="zstd"), "compression is 'zstd', expected a name where there is"),
        (lambda shards: shards[1].update(compression=3), "compression is 3, expected"),
        (lambda shards: shards[1].update(raw_data=None), "not an MDS index"),
        (lambda shards: shards.__setitem__(1, "shard"), "not an MDS index"),
        (lambda shards: shards[1].update(column_names=[["tokens"]]), "not an MDS index"),
    ],
)
def test_an_index_of_other_things(origin: Path, change: Callable[[Any], None], message: str) -> None:
    edit(origin / "train" / "index.json", lambda data: change(data["shards"]))
    with pytest.raises(ConfigError, match=rf"train/index\.json: .*{message}"):
        read_manifest(origin)


@pytest.mark.parametrize("name", ["manifest.json", "train/index.json", "validation/index.json"])
@pytest.mark.parametrize("damage", ["byte", "cut", "bom", "utf16", "list", "nested", "twice"])
def test_metadata_that_cannot_be_read_is_named(origin: Path, name: str, damage: str) -> None:
    path = origin / name
    data = path.read_bytes()
    first = json.loads(data)
    key = json.dumps(next(iter(first)))
    path.write_bytes({
        "byte": data.replace(b"e", b"\xff", 1), "cut": data[: len(data) // 2], "bom": b"\xef\xbb\xbf" + data,
        "utf16": data.decode().encode("utf-16"), "list": b"[" + data + b"]", "nested": b"[" * 100_000,
        "twice": data.replace(b"{", f"{{{key}: 1, ".encode(), 1),
    }[damage])  # fmt: skip
    refused(origin, rf"{name}: (not valid JSON|holds list)")


def test_random_changes_of_metadata_never_end_in_a_traceback(origin: Path) -> None:
    """Of a value anywhere in manifest or index, into another type or size: read as before, or a message."""
    rng, values = random.Random(0), (None, -1, 0, 10**30, 1.5, "", "../x", [], {}, [1], {"a": 1}, True, "\ud800", 1e400)
    for name in ("manifest.json", "train/index.json"):
        path = origin / name
        saved = path.read_text()
        for _ in range(150):
            data = json.loads(saved)
            place: Any = data
            while True:
                key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.1:
                    break
                place = place[key]
            place[key] = rng.choice(values)
            path.write_text(json.dumps(data))
            try:
                manifest = read_manifest(origin)
                for split in manifest.splits:
                    for shard in read_shards(origin, manifest, split):
                        shard.check_size()
            except PretrainError as error:
                assert str(origin) in str(error)
        path.write_text(saved)


def test_training_needs_no_validation_split_without_validation(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", numbered_rows(20), None)
    with TrainLoader(make_config(folder, validation_rows=0), alone()) as loader:
        assert next(loader).tokens is not None
    with pytest.raises(ConfigError, match=r"validation\.rows=1: expected at most the 0 .*or 0 to train"):
        TrainLoader(make_config(folder, validation_rows=1), alone())
