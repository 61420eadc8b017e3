"""The manifest of a data set: what data_prep/build_shards.py wrote and the loader may rely on.
Stdlib only.

A data set is one folder, written in full or not at all:

    manifest.json             this file's `Manifest`
    tokenizer/                the tokenizer that made the ids (tokenizer.json, ...)
    train/index.json          MDS index; the shards it lists lie below train/
    validation/index.json     absent where the set was built with --validation-fraction 0
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, DataError
from pretrain.foreign import check_name, read_json

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
PARTIAL_SUFFIX = ".partial"
"""OUT.partial holds the work of a build; OUT appears by one rename at its end."""
COLUMN = "tokens"
HASH = "xxh3_64"
MAX_UINT16_VOCAB = 65_536
_MAX_SHARD_BYTES = 1 << 32
"""MDS keeps offsets as uint32."""

_REBUILD = "build the data set again with data_prep/build_shards.py"


def token_dtype(vocab_size: int) -> str:
    """The stored type for ids below `vocab_size`: uint16 up to 65,536, else uint32."""
    return "uint16" if vocab_size <= MAX_UINT16_VOCAB else "uint32"


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer of a data set."""

    path: str
    """Folder, relative to the data set's."""
    sha256: str
    """Of the bytes of tokenizer.json (`tokenizer_sha256`)."""
    vocab_size: int
    """Largest id that the tokenizer can give, plus 1."""
    bos_id: int
    """Stands before every document and nowhere else."""
    eos_id: int | None
    pad_id: int | None


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """Exact counts of one split; rows * row_tokens = tokens - dropped - cropped + padded tokens."""

    documents: int
    tokens: int
    """Of all documents, each with its <|bos|>."""
    rows: int
    dropped_tokens: int
    """Of a bucket's last row, which was not full."""
    cropped_tokens: int = 0
    """Of best-fit packing: ends of documents that were cut where nothing fitted a row."""
    padded_tokens: int
    """Padding ids in the rows. The builder drops tails, so it writes 0."""
    max_id: int
    """Largest id in the rows."""
    shards: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a data set holds; one that `read_manifest` returns has passed `validate`."""

    format_version: int = FORMAT_VERSION
    dtype: str
    """uint16 or uint32, as stored."""
    row_tokens: int
    """Ids per row: context_length + 1."""
    tokenizer: TokenizerInfo
    splits: dict[str, SplitInfo]
    """train, and validation unless the set has none."""
    source: dict[str, Any]
    """Where the text came from and the arguments of the build; informative."""
    seed: int

    @property
    def context_length(self) -> int:
        """Trained positions per row: inputs row[:-1], targets row[1:]."""
        return self.row_tokens - 1

    @property
    def encoding(self) -> str:
        """MDS encoding of the `tokens` column."""
        return f"ndarray:{self.dtype}:{self.row_tokens}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's ids."""
        return self.row_tokens * (2 if self.dtype == "uint16" else 4)

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def validate(self, where: str) -> None:
        """Raises ConfigError, naming the file `where`, if numbers contradict each other."""

        def check(holds: bool, key: str, value: object, expected: str) -> None:
            if not holds:
                raise ConfigError(f"{where}: {key} is {value!r}, expected {expected}; {_REBUILD}")

        vocab_size = self.tokenizer.vocab_size
        check(
            self.format_version == FORMAT_VERSION,
            "format_version",
            self.format_version,
            str(FORMAT_VERSION),
        )
        check(self.row_tokens >= 2, "row_tokens", self.row_tokens, "an integer >= 2")
        check(vocab_size >= 1, "tokenizer.vocab_size", vocab_size, "an integer >= 1")
        expected = f"{token_dtype(vocab_size)} for a vocabulary of {vocab_size}"
        check(self.dtype == token_dtype(vocab_size), "dtype", self.dtype, expected)
        for key in ("bos_id", "eos_id", "pad_id"):
            value = getattr(self.tokenizer, key)
            check(
                value is None or 0 <= value < vocab_size,
                f"tokenizer.{key}",
                value,
                f"in [0, {vocab_size})",
            )
        check_name(self.tokenizer.path, f"{where}: tokenizer.path")
        check("train" in self.splits, "splits", sorted(self.splits), "train among them")
        for name, split in self.splits.items():
            check_name(name, f"{where}: a name among splits")
            for key, value in dataclasses.asdict(split).items():
                check(value >= 0, f"splits.{name}.{key}", value, "an integer >= 0")
            lost = split.dropped_tokens + split.cropped_tokens
            total = split.tokens - lost + split.padded_tokens
            key, value = f"splits.{name}.rows", split.rows
            check(value > 0, key, value, "at least 1")
            rule = (
                f"(tokens - dropped - cropped + padded) / row_tokens = {total} / {self.row_tokens}"
            )
            check(value * self.row_tokens == total, key, value, rule)
            expected = f"below the vocabulary size {vocab_size}"
            check(split.max_id < vocab_size, f"splits.{name}.max_id", split.max_id, expected)


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard of a split as index.json lists it."""

    path: Path
    bytes: int
    """Size of the file on disk (compressed, where `compression` is given)."""
    hash: str
    """xxh3_64 of the file on disk, hexadecimal."""
    compression: str | None
    raw_path: Path
    """Of the uncompressed shard; `path` where it is stored so."""
    raw_bytes: int
    raw_hash: str
    rows: int

    def check_size(self) -> None:
        """Raises DataError, naming the shard, where its file is missing or has another size."""
        if not self.path.is_file():
            raise DataError(f"{self.path}: shard is missing; restore it or {_REBUILD}")
        size = self.path.stat().st_size
        if size != self.bytes:
            raise DataError(
                f"{self.path}: {size} bytes, index.json says {self.bytes}: the shard is truncated "
                f"or was overwritten; restore it or {_REBUILD}"
            )


def read_manifest(folder: str | Path, *, shards_are_local: bool = True) -> Manifest:
    """The manifest of the data set in `folder`, checked against its own sums, the tokenizer and the
    indexes.

    With `shards_are_local=False` (the folder caches a remote set) no index.json is looked for.
    Shard files are not touched: `read_shards` lists them, `ShardFile.check_size` and
    data_prep/verify_shards.py check them. Errors: ConfigError for a missing folder, a missing or
    invalid manifest, tokenizer or index.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ConfigError(_why_missing(folder))
    manifest = read_manifest_file(path)
    tokenizer = folder / manifest.tokenizer.path
    found = tokenizer_sha256(tokenizer)
    if found != manifest.tokenizer.sha256:
        raise ConfigError(
            f"{tokenizer}: sha256 of tokenizer.json is {found}, {path} says "
            f"{manifest.tokenizer.sha256}: another tokenizer made the ids; restore it or {_REBUILD}"
        )
    if shards_are_local:
        for split in manifest.splits:
            read_shards(folder, manifest, split)
    return manifest


def read_manifest_file(path: Path) -> Manifest:
    """The manifest in the file, checked against itself alone. Errors: ConfigError naming the file."""
    data, where = read_json(path, mend=f"restore it or {_REBUILD}"), str(path)
    for key, kind in (("tokenizer", TokenizerInfo), ("splits", None)):
        if not isinstance(data.get(key), dict):
            raise ConfigError(
                f"{where}: {key} is {data.get(key)!r}, expected an object; {_REBUILD}"
            )
        if kind is not None:
            data[key] = _from_dict(kind, data[key], f"{where}: {key}.")
    for name, value in data["splits"].items():
        if isinstance(value, dict):  # sets built before there was best-fit packing do not have it
            value.setdefault("cropped_tokens", 0)
        data["splits"][name] = _from_dict(SplitInfo, value, f"{where}: splits.{name}.")
    manifest: Manifest = _from_dict(Manifest, data, f"{where}: ")
    manifest.validate(where)
    return manifest


def read_shards(folder: str | Path, manifest: Manifest, split: str) -> list[ShardFile]:
    """The shards of `split`, in order, from its index.json, which must agree with the manifest.

    Errors: ConfigError for a missing or invalid index.json and for one that counts other rows,
    shards or columns.
    """
    path = Path(folder) / split / "index.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: missing, though {MANIFEST_NAME} lists the split; restore it or {_REBUILD}"
        )
    entries: Any = read_json(path, mend=f"restore it or {_REBUILD}").get("shards")
    try:
        columns = {(*entry["column_names"], *entry["column_encodings"]) for entry in entries}
        shards = [_shard_file(path, entry, manifest) for entry in entries]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not an MDS index with {HASH} hashes ({error!r}); {_REBUILD}"
        ) from error
    _refuse_shared_files(path, shards)
    expected = manifest.splits[split]
    for what, found, wanted in (
        ("columns", columns, {(COLUMN, manifest.encoding)}),
        ("number of shards", len(shards), expected.shards),
        ("number of rows", sum(shard.rows for shard in shards), expected.rows),
    ):
        if found != wanted:
            raise ConfigError(
                f"{path}: {what} is {found}, {MANIFEST_NAME} says {wanted}; {_REBUILD}"
            )
    return shards


def tokenizer_sha256(folder: str | Path) -> str:
    """Hexadecimal sha256 of the bytes of tokenizer.json in a tokenizer's folder."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: missing; expected the folder of a tokenizer, such as "
            "data_prep/train_tokenizer.py writes"
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _why_missing(folder: Path) -> str:
    """A message for a folder without a manifest."""
    partial = Path(os.path.abspath(folder) + PARTIAL_SUFFIX)  # the root has no name to add it to
    if partial.is_dir():
        return (
            f"{folder}: its build has not finished ({partial} holds its work); run the same "
            "data_prep/build_shards.py command again, it continues where it stopped"
        )
    if not folder.is_dir():
        return f"{folder}: no such folder; expected a data set written by data_prep/build_shards.py"
    return f"{folder}: no {MANIFEST_NAME}; expected a data set written by data_prep/build_shards.py"


def _from_dict(cls: type, data: dict[str, Any], where: str) -> Any:
    """An instance of the dataclass `cls`; ConfigError for keys missing, unknown or of another
    type."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where.rstrip('.')} is {data!r}, expected an object; {_REBUILD}")
    hints = typing.get_type_hints(cls)
    for key in sorted(hints.keys() ^ data.keys()):
        problem = "is missing" if key in hints else "is unknown"
        raise ConfigError(f"{where}{key} {problem}; expected exactly {sorted(hints)}; {_REBUILD}")
    for key, hint in hints.items():
        allowed = (
            typing.get_args(hint)
            if isinstance(hint, types.UnionType)
            else (typing.get_origin(hint) or hint,)
        )
        if type(data[key]) not in allowed:
            name = getattr(hint, "__name__", str(hint))
            raise ConfigError(f"{where}{key} is {data[key]!r}, expected {name}; {_REBUILD}")
    return cls(**data)


def _shard_file(index: Path, entry: dict[str, Any], manifest: Manifest) -> ShardFile:
    """What index.json says of a shard. Errors: ConfigError; KeyError and TypeError for what is no entry."""
    raw, stored = entry["raw_data"], entry["zip_data"] or entry["raw_data"]
    for data in (raw, stored):
        check_name(data["basename"], f"{index}: basename")
    compression, rows = entry["compression"], entry["samples"]
    for holds, key, value, expected in (
        (entry["format"] == "mds", "format", entry["format"], "'mds'"),
        (type(rows) is int and rows > 0, "samples", rows, "an integer >= 1"),
        (type(raw["bytes"]) is int and 0 < raw["bytes"] < _MAX_SHARD_BYTES, "raw_data.bytes", raw["bytes"],
         "an integer in [1, 2**32)"),
        (type(stored["bytes"]) is int and stored["bytes"] > 0, "zip_data.bytes", stored["bytes"], "an integer >= 1"),
        (isinstance(compression, str | None) and (compression is None) == (entry["zip_data"] is None),
         "compression", compression, "a name where there is zip_data, else null"),
    ):  # fmt: skip
        if not holds:
            raise ConfigError(f"{index}: {key} is {value!r}, expected {expected}; {_REBUILD}")
    if rows * (4 + manifest.row_bytes) >= raw["bytes"]:  # an offset and the ids of each row, after a header
        raise ConfigError(
            f"{index}: {raw['basename']} has {rows} samples in {raw['bytes']} bytes, expected more than "
            f"{4 + manifest.row_bytes} bytes for each; {_REBUILD}"
        )
    return ShardFile(
        path=index.parent / stored["basename"],
        bytes=stored["bytes"],
        hash=stored["hashes"][HASH],
        compression=compression,
        raw_path=index.parent / raw["basename"],
        raw_bytes=raw["bytes"],
        raw_hash=raw["hashes"][HASH],
        rows=rows,
    )


def _refuse_shared_files(index: Path, shards: list[ShardFile]) -> None:
    """ConfigError where two shards, or a shard and the index, are one file: a cache would remove it for the other."""
    names = [name for s in shards for name in {s.path, s.raw_path}]
    twice = {name for name, group in itertools.groupby(sorted([*names, index])) if len([*group]) > 1}
    if twice:
        raise ConfigError(f"{index}: basename {min(twice).name!r} is given twice; {_REBUILD}")
