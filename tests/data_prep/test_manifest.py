"""A data set whose parts contradict each other is refused: file, key, what was expected."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.data.manifest import (
    read_manifest,
    read_manifest_file,
    read_shards,
    token_dtype,
    tokenizer_sha256,
)
from pretrain.errors import ConfigError, DataError

ABSENT = object()


@pytest.fixture
def data_set(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def test_type_follows_from_the_vocabulary() -> None:
    assert [token_dtype(size) for size in (400, 65_536, 65_537, 128_256)] == [
        "uint16", "uint16", "uint32", "uint32"
    ]  # fmt: skip


def test_reading_needs_neither_torch_nor_streaming(built: Path) -> None:
    code = (
        "import sys; from pretrain.data.manifest import read_manifest; read_manifest(sys.argv[1]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'streaming', 'numpy')))"
    )
    repository = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code, str(built)], cwd=repository, check=True, timeout=120
    )


def test_round_trip(built: Path) -> None:
    manifest = read_manifest(built)
    assert read_manifest_file(built / "manifest.json") == manifest
    assert manifest.context_length == 32
    assert manifest.encoding == "ndarray:uint16:33"
    assert manifest.tokenizer.sha256 == tokenizer_sha256(built / "tokenizer")
    shards = read_shards(built, manifest, "train")
    assert sum(shard.rows for shard in shards) == manifest.splits["train"].rows
    for shard in shards:
        shard.check_size()


TRAIN, TOKENIZER = ("splits", "train"), ("tokenizer",)


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ((), {"format_version": 2}, "format_version is 2, expected 1"),
        ((), {"dtype": "int64"}, "dtype is 'int64', expected uint16 for a vocabulary of 400"),
        (TOKENIZER, {"vocab_size": 65_537}, "dtype is 'uint16', expected uint32"),
        ((), {"row_tokens": "33"}, "row_tokens is '33', expected int"),
        ((), {"seed": True}, "seed is True, expected int"),
        ((), {"source": ABSENT}, "source is missing"),
        ((), {"rows": 1}, "rows is unknown"),
        ((), {"splits": []}, r"splits is \[\], expected an object"),
        (("splits",), {"train": ABSENT}, r"splits is \['validation'\], expected train among them"),
        (("splits",), {"train": 3}, r"splits\.train is 3, expected an object"),
        (TRAIN, {"dropped_tokens": 0}, r"splits\.train\.rows is"),
        (TRAIN, {"max_id": 400}, r"splits\.train\.max_id is 400, expected below"),
        (TRAIN, {"rows": -1}, r"splits\.train\.rows is -1, expected an integer >= 0"),
        (TOKENIZER, {"bos_id": 400}, r"tokenizer\.bos_id is 400, expected in \[0, 400\)"),
        (TOKENIZER, {"bos_id": None}, r"tokenizer\.bos_id is None, expected int"),
    ],
)
def test_contradictions_name_the_key(
    data_set: Path, where: tuple[str, ...], change: dict[str, Any], message: str
) -> None:
    path = data_set / "manifest.json"
    manifest = json.loads(path.read_text())
    section = manifest
    for key in where:
        section = section[key]
    section.update(change)
    for key in [key for key, value in section.items() if value is ABSENT]:
        del section[key]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=rf"manifest\.json: {message}.*build the data set again"):
        read_manifest(data_set)


def test_missing_and_broken_files(data_set: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "set.partial").mkdir()
    with pytest.raises(ConfigError, match=r"set: its build has not finished .*set\.partial"):
        read_manifest(tmp_path / "set")

    index = data_set / "validation" / "index.json"
    saved = index.read_text()
    index.write_text(saved[:-3])
    with pytest.raises(ConfigError, match=r"validation/index\.json: not valid JSON"):
        read_manifest(data_set)
    index.write_text('{"version": 2, "shards": [{}]}')
    with pytest.raises(ConfigError, match=r"validation/index\.json: not an MDS index"):
        read_manifest(data_set)
    index.write_text(saved.replace("uint16", "int64"))
    with pytest.raises(ConfigError, match=r"columns is .*int64:33.* says .*uint16:33"):
        read_manifest(data_set)
    index.unlink()
    with pytest.raises(ConfigError, match=r"validation/index\.json: missing"):
        read_manifest(data_set)
    read_manifest(data_set, shards_are_local=False)

    tokenizer = data_set / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    with pytest.raises(ConfigError, match=r"tokenizer: sha256 .* another tokenizer made the ids"):
        read_manifest(data_set)
    tokenizer.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing"):
        read_manifest(data_set)
    (data_set / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"manifest\.json: holds list, expected an object"):
        read_manifest(data_set)


def test_index_must_count_what_the_manifest_counts(data_set: Path) -> None:
    path = data_set / "train" / "index.json"
    index = json.loads(path.read_text())
    rows = sum(shard["samples"] for shard in index["shards"])
    index["shards"][0]["samples"] += 1
    path.write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=rf"number of rows is {rows + 1}, manifest\.json says {rows}"
    ):
        read_manifest(data_set)
    index["shards"].pop()
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="number of shards is"):
        read_manifest(data_set)


def test_shard_files_of_another_size(data_set: Path) -> None:
    shard = read_shards(data_set, read_manifest(data_set), "train")[1]
    shard.path.write_bytes(shard.path.read_bytes()[:-10])
    with pytest.raises(
        DataError, match=rf"{shard.path}: \d+ bytes, index\.json says {shard.bytes}"
    ):
        shard.check_size()
    shard.path.unlink()
    with pytest.raises(DataError, match="shard is missing"):
        shard.check_size()
