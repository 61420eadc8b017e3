"""A shard that is not what was written is named, whatever happened to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from data_prep.build_shards import build
from data_prep.packing import BuildSettings
from data_prep.verify_shards import verify
from pretrain.data.manifest import HASH, read_manifest, read_shards
from pretrain.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def data_set(built: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(built, tmp_path / "copy"))


def second_shard(folder: Path) -> Path:
    return read_shards(folder, read_manifest(folder), "train")[1].path


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_good_set(built: Path) -> None:
    assert verify(built) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "bytes, index.json says"),
        (lambda path: flip_byte(path, -5), "xxh3_64 of the file is"),
        (lambda path: path.unlink(), "shard is missing"),
    ],
)
def test_bad_shard_is_named(data_set: Path, damage: Callable[[Path], object], message: str) -> None:
    path = second_shard(data_set)
    damage(path)
    (problem,) = verify(data_set)
    assert problem.startswith(f"{path}: ")
    assert message in problem


def test_every_bad_shard_is_named_with_exit_code_3(data_set: Path) -> None:
    shards = read_shards(data_set, read_manifest(data_set), "train")
    flip_byte(shards[0].path, 200)
    flip_byte(shards[2].path, 200)
    result = subprocess.run(
        [sys.executable, "data_prep/verify_shards.py", str(data_set), "--processes", "1"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 3
    assert "2 problems" in result.stderr
    assert str(shards[0].path) in result.stderr
    assert str(shards[2].path) in result.stderr
    assert str(shards[1].path) not in result.stderr


def test_compressed_shards(make_settings: Callable[..., BuildSettings]) -> None:
    settings = make_settings(compression="zstd:1")
    build(settings)
    assert verify(settings.out) == []
    shard = read_shards(settings.out, read_manifest(settings.out), "validation")[0]
    assert shard.path.suffix == ".zstd"
    flip_byte(shard.path, 30)
    (problem,) = verify(settings.out)
    assert str(shard.path) in problem


def rehash(folder: Path, path: Path) -> None:
    """Makes index.json agree with the shard's present content."""
    index_path = folder / "train" / "index.json"
    index = json.loads(index_path.read_text())
    for shard in index["shards"]:
        if (folder / "train" / shard["raw_data"]["basename"]) == path:
            shard["raw_data"]["hashes"][HASH] = xxhash.xxh3_64_hexdigest(path.read_bytes())
    index_path.write_text(json.dumps(index))


def test_ids_and_rows_are_checked_behind_the_hash(data_set: Path) -> None:
    path = second_shard(data_set)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"\x7f")  # the high byte of the last id
    rehash(data_set, path)
    (problem,) = verify(data_set)
    assert f"{path}: holds id " in problem
    assert "vocabulary size 400" in problem
    path.write_bytes(bytes([good[0] - 1]) + good[1:])
    rehash(data_set, path)
    (problem,) = verify(data_set)
    assert f"{path}: {good[0] - 1} rows, index.json says {good[0]}" in problem


def test_largest_id_is_compared_with_the_manifest(data_set: Path) -> None:
    path = data_set / "manifest.json"
    manifest = json.loads(path.read_text())
    found = manifest["splits"]["train"]["max_id"]
    manifest["splits"]["train"]["max_id"] = found - 1
    path.write_text(json.dumps(manifest))
    assert verify(data_set) == [
        f"{data_set}/train: largest id is {found}, the manifest says {found - 1}"
    ]


def test_incomplete_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        verify(tmp_path / "nowhere")
