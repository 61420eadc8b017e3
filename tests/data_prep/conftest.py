"""A small tokenizer, a small corpus in every kind of file, and built data sets."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import pre_tokenizers, trainers

from data_prep.build_shards import build
from data_prep.packing import BuildSettings
from data_prep.sources import TextFormat
from data_prep.train_tokenizer import SPECIAL_TOKENS, _new_tokenizer
from data_prep.verify_shards import read_rows
from pretrain.data.manifest import read_manifest, read_shards

WORDS = ["the", "loop", "reads", "its", "own", "state", "and", "writes", "naïve", "Zürich", "東京"]
WORDS += ["12", "345", "(a)", "b.\n", "x's", "🙂", "<|bos|>", ""]
SEPARATOR = "<|endoftext|>"


def make_documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Different texts of up to `words` words; one holds the spelling of a special token."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, words))) + f" {i}" for i in range(count)]


def write_documents(path: Path, documents: list[str]) -> Path:
    """Writes the documents in the kind of file that the name asks for."""
    lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)]
    halves = [
        "".join(lines[: len(lines) // 2]).encode(),
        "".join(lines[len(lines) // 2 :]).encode(),
    ]
    if path.name.endswith(".gz"):  # two members, two frames: what parallel compressors write
        path.write_bytes(b"".join(gzip.compress(half) for half in halves))
    elif path.name.endswith(".zst"):
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(half) for half in halves))
    elif path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(documents)), "text": documents})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".txt":
        path.write_text(SEPARATOR.join(documents), newline="")
    else:
        path.write_bytes(b"".join(halves))
    return path


def save_tokenizer(folder: Path, tokenizer: object, **special_tokens: str) -> Path:
    """A saved tokenizer's two files, without the seconds that importing transformers takes."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    config = special_tokens or SPECIAL_TOKENS
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 ids."""
    bpe = _new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(make_documents(200), trainer)
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe", bpe)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(300)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """The documents spread over three kinds of files."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "part").mkdir()
    write_documents(folder / "part" / "a.jsonl", documents[:100])
    write_documents(folder / "b.jsonl.gz", documents[100:200])
    write_documents(folder / "c.parquet", documents[200:])
    return folder


@pytest.fixture
def make_settings(corpus: Path, tokenizer: Path, tmp_path: Path) -> Callable[..., BuildSettings]:
    """Settings of a build of the corpus into tmp_path/set in several units, with changes."""

    def make(**changes: object) -> BuildSettings:
        values = {
            "inputs": (str(corpus),),
            "tokenizer": tokenizer,
            "out": tmp_path / "set",
            "row_tokens": 33,
            "validation_fraction": 0.1,
            "unit_bytes": 4_000,
            "text_format": TextFormat(),
        }
        return BuildSettings(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Path) -> Path:
    """A data set of several buckets and shards; not to be changed."""
    out = tmp_path_factory.mktemp("built") / "set"
    settings = BuildSettings(
        inputs=(str(corpus),),
        tokenizer=tokenizer,
        out=out,
        row_tokens=33,
        validation_fraction=0.1,
        unit_bytes=4_000,
        bucket_tokens=3_000,
        shard_bytes=4_096,
    )
    build(settings)
    return out


def all_rows(folder: Path, split: str) -> np.ndarray:
    """[rows, row_tokens] of a split, in the order of its shards."""
    manifest = read_manifest(folder)
    return np.concatenate([read_rows(s, manifest) for s in read_shards(folder, manifest, split)])


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
