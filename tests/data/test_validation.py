"""The validation rows: the same rows once over all ranks, whatever their number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.config.schema import SourceConfig
from pretrain.data.manifest import read_manifest
from pretrain.data.validation import ValidationRows
from pretrain.errors import ConfigError, DataError
from pretrain.preflight import apportion
from tests.data.sets import alone, make_config, numbered_rows, numbers, write_set


@pytest.mark.parametrize("dp_size", [1, 2, 4, 16])
@pytest.mark.parametrize("rows_per_batch", [1, 3, 8])
def test_each_row_counts_once_and_ranks_yield_equally_many_batches(
    set_101: Path, dp_size: int, rows_per_batch: int
) -> None:
    found = {}
    padding = 0
    for dp_rank in range(dp_size):
        rows = ValidationRows(make_config(set_101, 16, validation_rows=10), alone(dp_rank, dp_size))
        batches = list(rows.batches(rows_per_batch))
        assert len(batches) == rows.num_batches(rows_per_batch)
        for tokens, positions, weights in batches:
            assert tokens.shape == (rows_per_batch, 9) and tokens.dtype == torch.int64
            padding += int((weights == 0).sum())
            for number, position, weight in zip(numbers(tokens), positions.tolist(), weights.tolist(), strict=True):
                if weight:
                    assert position not in found
                    found[position] = number
    assert found == {v: 500 + v for v in range(10)}
    assert padding == rows.num_padding_rows(rows_per_batch)


def test_a_rank_that_does_not_read_yields_batches_of_the_same_shapes(set_101: Path) -> None:
    cfg = make_config(set_101, 16, validation_rows=10)
    read, unread = (list(ValidationRows(cfg, alone(1, 2), reads=reads).batches(3)) for reads in (True, False))
    for batch, filler in zip(read, unread, strict=True):
        assert filler.tokens.shape == batch.tokens.shape and not filler.tokens.any()
        assert torch.equal(filler.weights, batch.weights) and torch.equal(filler.positions, batch.positions)


def test_sources_share_the_rows_by_weight(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        write_set(tmp_path / name, numbered_rows(20), numbered_rows(8, first))
    write_set(tmp_path / "c", numbered_rows(20), None)
    sources = [SourceConfig(path=str(tmp_path / n), weight=w) for n, w in (("a", 3.0), ("b", 1.0), ("c", 9.0))]
    rows = ValidationRows(make_config(None, validation_rows=8, sources=sources), alone())
    (batch,) = rows.batches(8)
    assert numbers(batch.tokens) == [0, 1, 2, 3, 4, 5, 100, 101]
    with pytest.raises(ConfigError, match=r"validation\.rows=12.*9 of them fall to .*a by its weight 3\.0, .* has 8"):
        ValidationRows(make_config(None, validation_rows=12, sources=sources), alone())


def test_apportion_by_largest_remainder() -> None:
    assert apportion(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert apportion(7, [0.5, 0.3, 0.2]) == [4, 2, 1]
    assert apportion(1, [1.0]) == [1]


def test_remote_rows_come_through_the_cache_and_bad_ones_are_named(tmp_path: Path) -> None:
    origin = write_set(
        tmp_path / "origin", numbered_rows(20), numbered_rows(60, 700), compression="zstd:3", shard_rows=20
    )
    source = SourceConfig(path=str(tmp_path / "cache"), remote=str(origin))
    rows = ValidationRows(make_config(None, validation_rows=30, sources=[source]), alone())
    (batch,) = rows.batches(30)
    assert numbers(batch.tokens) == list(range(700, 730))
    assert read_manifest(tmp_path / "cache").splits["validation"].rows == 60
    assert not list((tmp_path / "cache" / "train").glob("shard*"))

    shard = sorted((origin / "validation").glob("*.zstd"))[0]
    shard.write_bytes(shard.read_bytes()[:-20])
    source = SourceConfig(path=str(tmp_path / "cache2"), remote=str(origin))
    with pytest.raises(DataError, match=r"cache2/validation/shard\.00000\.mds: validation shard"):
        ValidationRows(make_config(None, validation_rows=30, sources=[source]), alone())


def test_ids_above_the_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", numbered_rows(20), numbered_rows(4))
    shard = folder / "validation" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xff\xff")
    with pytest.raises(DataError, match=r"validation rows hold id 65535, but model\.vocab_size=1000"):
        ValidationRows(make_config(folder, validation_rows=4), alone())
