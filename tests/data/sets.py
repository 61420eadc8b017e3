"""Small data sets whose rows carry their own number, and configurations that read them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import MDSWriter

from pretrain.config.model import ModelConfig
from pretrain.config.schema import Config, DataConfig, SourceConfig, TrainConfig, ValidationConfig
from pretrain.data.manifest import HASH, Manifest, SplitInfo, TokenizerInfo
from pretrain.data.place import DataPlace

VOCAB = 1_000
BOS = 0
CONTEXT = 8
TOKENIZER = "{}"


def numbered_rows(count: int, first: int = 0) -> NDArray[np.int64]:
    """[count, CONTEXT + 1] rows; row i starts with the digits of first + i to the base VOCAB."""
    rows = np.ones((count, CONTEXT + 1), dtype=np.int64)
    rows[:, 0], rows[:, 1] = np.divmod(np.arange(first, first + count), VOCAB)
    return rows


def numbers(tokens: Any) -> list[int]:
    """The numbers that the rows [B, CONTEXT + 1] carry."""
    tokens = np.asarray(tokens)
    return (tokens[:, 0] * VOCAB + tokens[:, 1]).tolist()


def write_set(
    folder: Path,
    rows: NDArray[np.int64],
    validation: NDArray[np.int64] | None,
    *,
    vocab_size: int = VOCAB,
    compression: str | None = None,
    shard_rows: int = 16,
) -> Path:
    """A data set as data_prep/build_shards.py writes it, with `shard_rows` rows to a shard; returns `folder`."""
    dtype = "uint16" if vocab_size <= 65_536 else "uint32"
    splits = {"train": rows} | ({} if validation is None else {"validation": validation})
    infos = {}
    for split, values in splits.items():
        # Header, offsets and rows of an MDS shard; generous, so that a shard holds at least `shard_rows` rows.
        limit = 400 + shard_rows * (4 + rows.shape[1] * np.dtype(dtype).itemsize)
        columns = {"tokens": f"ndarray:{dtype}:{rows.shape[1]}"}
        out = folder / split
        with MDSWriter(
            out=str(out), columns=columns, hashes=[HASH], size_limit=limit, compression=compression
        ) as writer:
            for row in values:
                writer.write({"tokens": row.astype(dtype)})
        infos[split] = SplitInfo(
            documents=1, tokens=values.size, rows=len(values), dropped_tokens=0, padded_tokens=0,
            max_id=int(values.max()), shards=len(list(out.glob("*.mds*"))),
        )  # fmt: skip
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_text(TOKENIZER)
    manifest = Manifest(
        dtype=dtype,
        row_tokens=rows.shape[1],
        tokenizer=TokenizerInfo(
            path="tokenizer", sha256=hashlib.sha256(TOKENIZER.encode()).hexdigest(), vocab_size=vocab_size,
            bos_id=BOS, eos_id=None, pad_id=None,
        ),
        splits=infos,
        source={},
        seed=0,
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def make_config(
    path: Path | None, global_batch_size: int = 8, *, validation_rows: int = 1, vocab_size: int = VOCAB,
    sources: list[SourceConfig] | None = None, context: int = CONTEXT, **data: Any,
) -> Config:  # fmt: skip
    """A configuration that reads `path` in this process (num_workers=0), with `data` on top of the data section."""
    where = {"path": str(path)} if path is not None else {"sources": sources}
    return Config(
        model=ModelConfig(context_length=context, vocab_size=vocab_size),
        data=DataConfig(**({"num_workers": 0, "shuffle_block_rows": 32} | where | data)),
        train=TrainConfig(max_steps=10, global_batch_size=global_batch_size),
        validation=ValidationConfig(rows=validation_rows),
    )


def alone(dp_rank: int = 0, dp_size: int = 1, num_nodes: int = 1) -> DataPlace:
    """The place of one data-parallel rank of a layout whose other ranks do not exist."""
    return DataPlace(dp_rank=dp_rank, dp_size=dp_size, num_nodes=num_nodes)
