"""Check a data set against its manifest: every shard's size, hash, rows and ids.

Exit code 0: all is well. 2: the folder is no complete data set. 3: shards are bad; each is named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.tasks import command, default_processes, parallel, progress
from pretrain.arguments import integer, pathname
from pretrain.data.manifest import Manifest, ShardFile, read_manifest, read_shards
from pretrain.errors import DataError


def verify(folder: Path, processes: int = 1) -> list[str]:
    """What is wrong with the shards of the data set in `folder`, a sentence each that names the
    file; empty if nothing.

    Errors: ConfigError where manifest, tokenizer or index cannot be used (`read_manifest`).
    """
    manifest = read_manifest(folder)
    problems: list[str] = []
    for split, info in manifest.splits.items():
        shards = read_shards(folder, manifest, split)
        max_id, bad = 0, len(problems)
        calls = [(largest_id, (shard, manifest)) for shard in shards]
        with progress(split, sum(shard.bytes for shard in shards), "B") as bar:
            for i, result in parallel(calls, processes):
                bar.update(shards[i].bytes)
                if isinstance(result, str):
                    problems.append(result)
                else:
                    max_id = max(max_id, result)
        if len(problems) == bad and max_id != info.max_id:
            problems.append(
                f"{folder}/{split}: largest id is {max_id}, the manifest says {info.max_id}"
            )
        print(
            f"{split}: {info.shards} shards, {info.rows:,} rows, largest id {max_id}, "
            f"{len(problems) - bad} bad"
        )
    return sorted(problems)


def largest_id(shard: ShardFile, manifest: Manifest) -> int | str:
    """The largest id in a shard, or what is wrong with it."""
    try:
        shard.check_size()
        return int(read_rows(shard, manifest).max())
    except DataError as error:
        return str(error)


def read_rows(shard: ShardFile, manifest: Manifest) -> NDArray[Any]:
    """The shard's rows [rows, row_tokens], as stored, after its hashes and ids have been checked.

    Layout of an MDS shard with one fixed-size column: uint32 number of rows, uint32 offset of each
    row and of the end, the header, the rows. Errors: DataError that names the shard.
    """
    data = shard.path.read_bytes()
    _check_hash(shard, data, shard.hash, "file")
    if shard.compression is not None:
        from streaming.base.compression import decompress  # here, because it imports torch

        data = decompress(shard.compression, data)
        _check_hash(shard, data, shard.raw_hash, "decompressed data")
    shape = (shard.rows, manifest.row_tokens)
    dtype = np.dtype(manifest.dtype)
    row_bytes = manifest.row_tokens * dtype.itemsize
    count = int(np.frombuffer(data, "<u4", 1)[0])
    offsets = np.frombuffer(data, "<u4", count + 1, offset=4)
    if count != shard.rows or (np.diff(offsets) != row_bytes).any() or offsets[-1] != len(data):
        raise DataError(
            f"{shard.path}: {count} rows, index.json says {shard.rows} of {row_bytes} bytes each"
        )
    rows = np.frombuffer(data, dtype, offset=int(offsets[0])).reshape(shape)
    if rows.max() >= manifest.tokenizer.vocab_size:
        raise DataError(
            f"{shard.path}: holds id {rows.max()}, expected ids below the vocabulary size "
            f"{manifest.tokenizer.vocab_size}; build the data set again"
        )
    return rows


def _check_hash(shard: ShardFile, data: bytes, expected: str, what: str) -> None:
    found = xxhash.xxh3_64_hexdigest(data)
    if found != expected:
        raise DataError(
            f"{shard.path}: xxh3_64 of the {what} is {found}, index.json says {expected}: the "
            "shard is corrupt; restore it or build the data set again"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathname, help="data set written by build_shards.py")
    parser.add_argument("--processes", type=integer(1, 1_024), default=default_processes(), help="(%(default)s)")
    arguments = parser.parse_args()
    problems = verify(arguments.folder, arguments.processes)
    if problems:
        raise DataError(f"{len(problems)} problems\n" + "\n".join(problems))


if __name__ == "__main__":
    command(main)
