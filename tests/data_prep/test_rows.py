"""Best-fit packing: every row begins with a document, nothing appears twice, every token is accounted for."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import data_prep.build_shards
from data_prep.build_shards import build
from data_prep.encoding import Encoder
from data_prep.packing import BuildSettings
from data_prep.rows import Rows, best_fit_rows, join_rows
from data_prep.verify_shards import verify
from pretrain.data.documents import IGNORED_LABEL
from pretrain.data.loader import TrainLoader
from pretrain.data.manifest import read_manifest
from pretrain.errors import ConfigError, DataError
from pretrain.train.inputs import Inputs
from tests.data.sets import alone, make_config
from tests.data_prep.conftest import all_rows, tree

MakeSettings = Callable[..., BuildSettings]


def stream_of(lengths: list[int]) -> np.ndarray:
    """Documents that begin with 0; the ids after it are the document's number."""
    return np.concatenate([[0, *[i + 1] * (n - 1)] for i, n in enumerate(lengths)]).astype(np.uint32)


def pieces(row: np.ndarray) -> list[np.ndarray]:
    starts = np.flatnonzero(row == 0)
    assert starts[0] == 0, "the row does not begin with a document"
    return np.split(row, starts[1:])


def pack(lengths: list[int], row_tokens: int) -> Rows:
    return best_fit_rows(stream_of(lengths), np.array(lengths, np.int64), row_tokens)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_begins_with_a_document_and_every_token_is_counted(seed: int) -> None:
    rng = random.Random(seed)
    row_tokens = rng.choice([2, 3, 17, 64])
    longest = rng.choice([2, row_tokens // 2 + 2, 3 * row_tokens])
    lengths = [rng.randint(2, longest) for _ in range(rng.randint(1, 300))]
    found = pack(lengths, row_tokens)
    assert found.rows.size + found.dropped_tokens + found.cropped_tokens == sum(lengths)
    assert found.dropped_tokens < row_tokens
    seen = set()
    for row in found.rows:
        *whole, last = pieces(row)
        for piece in whole:  # only a row's last document may be cut
            assert len(piece) == lengths[piece[1] - 1]
        for piece in [*whole, last]:
            if len(piece) > 1:
                assert (piece[1:] == piece[1]).all() and piece[1] not in seen
                assert len(piece) <= lengths[piece[1] - 1]
                seen.add(piece[1])
    assert (found.rows == pack(lengths, row_tokens).rows).all()


def test_the_longest_that_fits_comes_first_and_the_shortest_is_cut() -> None:
    """Packed in the order 9 + 1 of 2, 7 + 3; 5 and 4 do not fill a row."""
    found = pack([3, 7, 4, 5, 9, 2], 10)
    assert sorted(found.rows.tolist()) == [[0, *[2] * 6, 0, 1, 1], [0, *[5] * 8, 0]]
    assert (found.dropped_tokens, found.cropped_tokens) == (9, 1)


def test_the_order_of_rows_tells_nothing_of_lengths() -> None:
    """Packing begins with the longest documents; the first rows of a split are what validation reads."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 40, 5_000).tolist()
    documents_of_rows = [len(pieces(row)) for row in pack(lengths, 64).rows]
    assert abs(np.corrcoef(documents_of_rows, np.arange(len(documents_of_rows)))[0, 1]) < 0.05
    assert np.mean(documents_of_rows[:500]) == pytest.approx(np.mean(documents_of_rows), rel=0.05)


def test_long_documents_fill_rows_of_their_own() -> None:
    """The plain rule leaves them waiting until nothing else is there, and cuts short documents meanwhile."""
    lengths = [50] * 40 + [4] * 80
    random.Random(0).shuffle(lengths)
    found = pack(lengths, 8)
    assert len(found.rows) == 40 + 80 * 4 // 8
    assert found.cropped_tokens == 40 * 42 and found.dropped_tokens == 0


@pytest.mark.parametrize("function", [join_rows, best_fit_rows])
def test_no_documents_and_too_few(function: Callable[..., Rows]) -> None:
    empty = function(np.empty(0, np.uint16), np.empty(0, np.int64), 4)
    assert empty.rows.shape == (0, 4) and empty.dropped_tokens == empty.cropped_tokens == 0
    few = function(stream_of([3]), np.array([3]), 4)
    assert few.rows.shape == (0, 4) and few.dropped_tokens == 3


@pytest.fixture
def settings(make_settings: MakeSettings) -> BuildSettings:
    """Several buckets and shards."""
    return make_settings(pack="best-fit", bucket_tokens=3_000, shard_bytes=4_096)


def test_a_packed_set_is_the_same_for_any_processes_and_after_a_break(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = build(settings)
    assert f"{manifest.splits['train'].cropped_tokens:,} cropped (" in capsys.readouterr().out
    assert verify(settings.out) == []
    build(replace(settings, out=tmp_path / "two"), processes=2)
    assert tree(tmp_path / "two") == tree(settings.out)
    whole, calls = data_prep.build_shards.pack_bucket, []

    def fails(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise OSError("No space left on device")
        return whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(data_prep.build_shards, "pack_bucket", fails)
    broken = replace(settings, out=tmp_path / "three")
    with pytest.raises(DataError, match="No space left on device; finished work is kept"):
        build(broken)
    monkeypatch.setattr(data_prep.build_shards, "pack_bucket", whole)
    with pytest.raises(ConfigError, match=r"begun with pack='best-fit' \(now None\)"):
        build(replace(broken, pack="join"))
    capsys.readouterr()
    build(broken)
    assert "train: 2 of" in capsys.readouterr().out
    assert tree(broken.out) == tree(settings.out)


def test_rows_of_a_packed_set_are_beginnings_of_documents(settings: BuildSettings, documents: list[str]) -> None:
    manifest = build(settings)
    encoder = Encoder(settings.out / "tokenizer")
    ids = [[encoder.info.bos_id, *encoder.encode(text).tolist()] for text in documents]
    for split, info in manifest.splits.items():
        rows = all_rows(settings.out, split)
        assert (rows[:, 0] == encoder.info.bos_id).all()
        assert rows.size == info.tokens - info.dropped_tokens - info.cropped_tokens
        assert 0 < info.cropped_tokens < info.tokens / 2
        for row in rows[:20]:
            for piece in np.split(row, np.flatnonzero(row == encoder.info.bos_id)[1:]):
                assert any(document[: len(piece)] == piece.tolist() for document in ids)
    assert read_manifest(settings.out) == manifest
    assert manifest.source["arguments"]["pack"] == "best-fit"


def test_the_loader_reads_a_packed_set_with_borders_and_positions(settings: BuildSettings, tokenizer: Path) -> None:
    build(settings)
    bos = read_manifest(settings.out).tokenizer.bos_id
    cfg = make_config(settings.out, context=32, vocab_size=400, mask_document_boundaries=True)
    with TrainLoader(cfg, alone()) as loader:
        for _ in range(loader.steps_per_epoch):
            inputs = Inputs.of(next(loader).tokens, cfg, loader.bos_id, torch.device("cpu"))
            starts = inputs.tokens == bos
            assert starts[:, 0].all()
            assert ((inputs.positions == 0) == starts).all(), "positions begin with documents, and nowhere else"
            assert (inputs.document_ids == starts.cumsum(1) - 1).all()
            assert ((inputs.labels[:, :-1] == IGNORED_LABEL) == starts[:, 1:]).all()


def test_a_joined_set_of_an_earlier_version_is_the_same_set(
    built: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    path = copy / "manifest.json"
    text = path.read_text()
    lines = [line for line in text.splitlines(keepends=True) if "cropped_tokens" not in line]
    assert len(lines) < text.count("\n")
    path.write_text("".join(lines))
    assert read_manifest(copy) == read_manifest(built)
    build(make_settings(bucket_tokens=3_000, shard_bytes=4_096, out=copy))  # complete, and left alone
    assert path.read_text() == "".join(lines)
