"""Documents to shuffled rows, in two passes of independent tasks with bounded memory.

    encode_unit   reads a unit of the sources, encodes it, writes its documents sorted by random key
    pack_bucket   gathers a range of keys from every unit, sorts it, makes rows, writes MDS shards

The key is a hash of (seed, file, position), so sorting by it is a random permutation of all
documents, the same for any number of processes and after any restart. A bucket is a range of keys:
what must fit in memory is a part of a unit or a bucket, never the corpus. Which split a document
belongs to is a hash of its text, so that equal documents never lie on both sides.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.encoding import Encoder
from data_prep.rows import PACKINGS, Packing
from data_prep.sources import Document, DocumentError, TextFormat, Unit, read_unit
from data_prep.tasks import Record, sync_folder
from pretrain.data.manifest import COLUMN, HASH, TokenizerInfo, token_dtype
from pretrain.errors import ConfigError, DataError

SPLITS = ("train", "validation")
PART_TOKENS = 1 << 24
"""Ids that an encoding process holds before it writes them: 400 MB where documents are short."""
CHECK_EVERY = 256
"""One document in so many is encoded by the saved tokenizer too, and the ids compared."""
_EXAMPLES = 3
ANEW = "remove the .partial folder and build anew"

_ENTRY = np.dtype([("key", "<u8"), ("start", "<u8"), ("length", "<u4")])
_KEYS = 1 << 64
_COMPRESSION = re.compile(r"zstd(:\d{1,2})?")


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The arguments of a build that decide its output; `build_shards.py --help` describes them."""

    inputs: tuple[str, ...]
    tokenizer: Path
    out: Path
    row_tokens: int
    text_format: TextFormat = field(default_factory=TextFormat)
    validation_fraction: float = 0.005
    seed: int = 0
    pack: Packing = "join"
    compression: str | None = None
    on_bad_document: Literal["stop", "skip"] = "stop"
    shard_bytes: int = 1 << 26
    bucket_tokens: int = 1 << 26
    unit_bytes: int = 1 << 26

    def __post_init__(self) -> None:
        rows, shard = self.row_tokens, self.shard_bytes
        for holds, flag, value, expected in (
            (rows >= 2, "--row-tokens", rows, "an integer >= 2 (context_length + 1)"),
            (0 <= self.validation_fraction < 1, "--validation-fraction", self.validation_fraction,
             "a number in [0, 1)"),
            (0 <= self.seed < _KEYS, "--seed", self.seed, "an integer in [0, 2**64)"),
            (_COMPRESSION.fullmatch(self.compression or "zstd"), "--compression", self.compression,
             "zstd or zstd:LEVEL, or none given"),
            (16 * rows <= shard < 1 << 32, "--shard-bytes", shard,
             f"at least {16 * rows} (4 rows of 4 bytes per id) and below 2**32"),
            (self.bucket_tokens >= 4 * rows, "--bucket-tokens", self.bucket_tokens,
             f"at least {4 * rows} (4 rows)"),
            (self.unit_bytes >= 1, "--unit-bytes", self.unit_bytes, "an integer >= 1"),
            (self.text_format.separator != "", "--text-separator", "", "at least one character"),
        ):  # fmt: skip
            if not holds:
                raise ConfigError(f"{flag} is {value!r}, expected {expected}")


def encode_unit(settings: BuildSettings, tokenizer: Path, unit: Unit, folder: Path) -> Record:
    """Writes the unit's documents to `folder` as parts sorted by key; returns their counts.

    Errors: DataError for a source that cannot be read, for a document that cannot be used (unless
    settings.on_bad_document = skip), and for ids that differ from the saved tokenizer's.
    """
    started = time.process_time()
    _empty(folder)
    encoder = load_encoder(tokenizer)
    writer = _PartWriter(folder, encoder.info)
    threshold = int(settings.validation_fraction * _KEYS)
    empty_documents = bad_documents = text_bytes = 0
    bad_examples: list[str] = []
    for document in read_unit(unit, settings.text_format):
        if not document.problem and (not document.text or document.text.isspace()):
            empty_documents += 1
            continue
        place = struct.pack("<QQ", document.file, document.position)
        key = xxhash.xxh3_64_intdigest(place, settings.seed)
        checked = key % CHECK_EVERY == 0 or writer.is_empty
        ids, problem = _encoded(document, encoder, _where(unit, document), checked)
        if ids is None:
            if settings.on_bad_document == "stop":
                raise DataError(
                    f"{problem}; mend the file, or leave such documents out with "
                    "--on-bad-document skip"
                )
            bad_documents += 1
            bad_examples = [*bad_examples, problem][:_EXAMPLES]
            continue
        utf8 = document.text.encode()
        text_bytes += len(utf8)
        is_validation = xxhash.xxh3_64_intdigest(utf8, settings.seed) < threshold
        writer.add("validation" if is_validation else "train", key, ids)
    writer.flush()
    sync_folder(folder)
    return {
        "parts": writer.parts,
        "documents": writer.documents,
        "tokens": writer.tokens,
        "text_bytes": text_bytes,
        "empty_documents": empty_documents,
        "bad_documents": bad_documents,
        "bad_examples": bad_examples,
        "core_seconds": time.process_time() - started,
    }


def _encoded(
    document: Document, encoder: Encoder, where: str, checked: bool
) -> tuple[NDArray[np.uint32] | None, str]:
    """The ids of a document, or None and what is wrong with it."""
    if document.problem:
        return None, f"{where}: {document.problem}"
    try:
        ids = encoder.encode(document.text)
        if checked:
            encoder.check(document.text, ids, where)
    except DocumentError as error:
        return None, f"{where}: {error}"
    return ids, ""


def pack_bucket(
    settings: BuildSettings,
    tokenizer: TokenizerInfo,
    parts: list[Path],
    key_range: tuple[int, int],
    folder: Path,
) -> Record:
    """Writes the documents with keys in [low, high), packed into rows, as MDS shards in `folder`.

    `parts` are the stems of one split's parts, in order. Ids after the last full row are dropped
    and counted. Returns the counts and the shards' entries for the split's index.json.
    """
    started = time.process_time()
    _empty(folder)
    stream, lengths = _gather(parts, key_range, np.dtype(token_dtype(tokenizer.vocab_size)))
    packed = PACKINGS[settings.pack](stream, lengths, settings.row_tokens)
    rows = packed.rows
    max_id = int(rows.max()) if len(rows) else 0
    if max_id >= tokenizer.vocab_size:
        raise DataError(
            f"{folder}: id {max_id} among encoded documents, expected ids below the vocabulary "
            f"size {tokenizer.vocab_size}; {ANEW}"
        )
    shards = write_shards(settings, rows, folder)
    sync_folder(folder)
    return {
        "documents": len(lengths),
        "tokens": len(stream),
        "rows": len(rows),
        "dropped_tokens": packed.dropped_tokens,
        "cropped_tokens": packed.cropped_tokens,
        "max_id": max_id,
        "shards": shards,
        "core_seconds": time.process_time() - started,
    }


def key_ranges(tokens: int, bucket_tokens: int) -> list[tuple[int, int]]:
    """Equal ranges of the keys, as many as give buckets of at most about `bucket_tokens`."""
    count = max(1, -(-tokens // bucket_tokens))
    cuts = [_KEYS * i // count for i in range(count + 1)]
    return list(itertools.pairwise(cuts))


@functools.lru_cache(maxsize=1)
def load_encoder(tokenizer: Path) -> Encoder:
    """The encoder of a process, built once."""
    return Encoder(tokenizer)


class _PartWriter:
    """Collects documents and writes them in parts of about PART_TOKENS, each sorted by key.

    A part of a split is two files: entries (key, start, length), and ids, each document with its
    <|bos|>.
    """

    def __init__(self, folder: Path, tokenizer: TokenizerInfo) -> None:
        self.parts: dict[str, list[str]] = {split: [] for split in SPLITS}
        """Stems, relative to the folder of all units."""
        self.documents = dict.fromkeys(SPLITS, 0)
        self.tokens = dict.fromkeys(SPLITS, 0)
        self._folder = folder
        self._tokenizer = tokenizer
        self._pending: dict[str, list[tuple[int, NDArray[Any]]]] = {split: [] for split in SPLITS}
        self._pending_tokens = 0

    @property
    def is_empty(self) -> bool:
        """No document has been added."""
        return not any(self.documents.values())

    def add(self, split: str, key: int, ids: NDArray[Any]) -> None:
        """Takes one document; `ids` are without <|bos|>."""
        self._pending[split].append((key, ids))
        self._pending_tokens += 1 + len(ids)
        self.documents[split] += 1
        self.tokens[split] += 1 + len(ids)
        if self._pending_tokens >= PART_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending."""
        for split, documents in self._pending.items():
            if documents:
                stem = self._folder / f"{split}_{len(self.parts[split]):04}"
                _write_part(stem, documents, self._tokenizer)
                self.parts[split].append(f"{self._folder.name}/{stem.name}")
                documents.clear()
        self._pending_tokens = 0


def _write_part(
    stem: Path, documents: list[tuple[int, NDArray[Any]]], tokenizer: TokenizerInfo
) -> None:
    documents.sort(key=lambda document: document[0])
    entries = np.empty(len(documents), _ENTRY)
    stream = np.empty(sum(1 + len(ids) for _, ids in documents), np.uint32)
    start = 0
    for i, (key, ids) in enumerate(documents):
        stream[start] = tokenizer.bos_id
        stream[start + 1 : start + 1 + len(ids)] = ids
        entries[i] = (key, start, 1 + len(ids))
        start += 1 + len(ids)
    if stream.max() >= tokenizer.vocab_size:  # the cast below would wrap without a word
        raise DataError(
            f"{stem}: id {stream.max()} from a tokenizer of vocabulary {tokenizer.vocab_size}"
        )
    np.save(_entries_path(stem), entries)
    stream.astype(token_dtype(tokenizer.vocab_size)).tofile(_tokens_path(stem))


def _gather(
    parts: list[Path], key_range: tuple[int, int], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Ids of all documents with keys in the range, in the order of the keys, and their lengths."""
    entries, blocks = [], []
    for stem in parts:
        every = np.load(_entries_path(stem), mmap_mode="r")
        low, high = (_lower_bound(every["key"], key) for key in key_range)
        if low == high:
            continue
        chosen = np.array(every[low:high])
        begin, end = int(chosen["start"][0]), int(chosen["start"][-1] + chosen["length"][-1])
        block = np.fromfile(_tokens_path(stem), dtype, end - begin, offset=begin * dtype.itemsize)
        if len(block) != end - begin:
            raise DataError(f"{_tokens_path(stem)}: truncated; {ANEW}")
        chosen["start"] -= begin
        entries.append(chosen)
        blocks.append(block)
    if not entries:
        return np.empty(0, dtype), np.empty(0, np.int64)
    joined = np.concatenate(entries)
    owner = np.repeat(np.arange(len(blocks)), [len(chosen) for chosen in entries])
    stream = np.empty(int(joined["length"].sum()), dtype)
    at = 0
    order = np.argsort(joined["key"], kind="stable")
    for i in order:
        start, length = int(joined["start"][i]), int(joined["length"][i])
        stream[at : at + length] = blocks[owner[i]][start : start + length]
        at += length
    return stream, joined["length"][order].astype(np.int64)


def _lower_bound(keys: NDArray[Any], key: int) -> int:
    return len(keys) if key >= _KEYS else int(np.searchsorted(keys, np.uint64(key)))


def write_shards(
    settings: BuildSettings, rows: NDArray[Any], folder: Path
) -> list[dict[str, Any]]:
    """Entries of the shards written, with names relative to the split's folder.

    No index.json stays, since a bucket is not a data set.
    """
    from streaming import MDSWriter  # here, because it imports torch, which encoding has no use for

    with MDSWriter(
        out=str(folder),
        columns={COLUMN: f"ndarray:{rows.dtype.name}:{settings.row_tokens}"},
        compression=settings.compression,
        hashes=[HASH],
        size_limit=settings.shard_bytes,
    ) as writer:
        for row in rows:
            writer.write({COLUMN: row})
    index = folder / "index.json"
    shards: list[dict[str, Any]] = json.loads(index.read_text())["shards"]
    index.unlink()
    for shard in shards:
        for data in filter(None, (shard["raw_data"], shard["zip_data"])):
            data["basename"] = f"{folder.name}/{data['basename']}"
    return shards


def _where(unit: Unit, document: Document) -> str:
    path = next(piece.path for piece in unit if piece.file == document.file)
    return f"{path}, document at {document.position}"


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _entries_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".entries.npy")


def _tokens_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".tokens")
