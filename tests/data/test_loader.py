"""The training loader: one order of rows for every layout, exact epochs, and a position that is the step."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.config.model import RecurrenceConfig
from pretrain.config.schema import Config, SourceConfig
from pretrain.data.loader import TrainLoader
from pretrain.data.manifest import read_manifest
from pretrain.errors import CheckpointError, ConfigError
from pretrain.sampling.sampler import DepthSampler
from tests.data.sets import BOS, alone, make_config, numbered_rows, numbers, write_set

ONE_ROW = numbered_rows(1)
STEPS = 26  # 12 steps of 8 rows are an epoch of 101 rows: two ends of epochs lie within


def read_layout(
    cfg: Config, dp_size: int, num_nodes: int = 1, start_step: int = 0, steps: int = STEPS
) -> dict[tuple[int, int], int]:
    """{(step, position): row number} of every rank of a layout; each position must come once."""
    found: dict[tuple[int, int], int] = {}
    for dp_rank in range(dp_size):
        with TrainLoader(cfg, alone(dp_rank, dp_size, num_nodes), start_step=start_step) as loader:
            for step in range(start_step, start_step + steps):
                assert loader.step == step
                batch = next(loader)
                assert batch.tokens is not None and batch.tokens.dtype == torch.int64
                assert batch.positions.tolist() == loader.all_positions[dp_rank].tolist()
                for p, number in zip(batch.positions.tolist(), numbers(batch.tokens), strict=True):
                    assert (step, p) not in found
                    found[step, p] = number
    assert len(found) == steps * cfg.train.global_batch_size
    return found


def epochs(found: dict[tuple[int, int], int], steps_per_epoch: int) -> Iterator[list[int]]:
    """Row numbers of each full epoch, in order of (step, position)."""
    for epoch in range(max(step for step, _ in found) // steps_per_epoch):
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        yield [number for (step, _), number in sorted(found.items()) if step in steps]


@pytest.fixture(scope="module")
def reference(set_101: Path) -> dict[tuple[int, int], int]:
    return read_layout(make_config(set_101, canonical_nodes=2), 1)


@pytest.mark.parametrize(
    ("dp_size", "num_nodes", "num_workers"),
    [(2, 1, 0), (4, 1, 0), (8, 1, 0), (2, 2, 0), (4, 2, 0), (8, 2, 0), (8, 4, 0), (1, 1, 1), (1, 1, 3), (2, 2, 2)],
)
def test_the_row_at_a_position_does_not_depend_on_the_layout(
    set_101: Path, reference: dict[tuple[int, int], int], dp_size: int, num_nodes: int, num_workers: int
) -> None:
    cfg = make_config(set_101, canonical_nodes=2, num_workers=num_workers)
    assert read_layout(cfg, dp_size, num_nodes) == reference


@pytest.mark.parametrize(
    ("start_step", "dp_size", "num_workers"), [(7, 2, 0), (7, 1, 2), (12, 1, 2), (11, 4, 0), (25, 1, 0)]
)
def test_resuming_at_a_step_gives_the_rows_of_the_straight_run(
    set_101: Path, reference: dict[tuple[int, int], int], start_step: int, dp_size: int, num_workers: int
) -> None:
    cfg = make_config(set_101, canonical_nodes=2, num_workers=num_workers)
    found = read_layout(cfg, dp_size, start_step=start_step, steps=STEPS - start_step)
    assert found == {key: number for key, number in reference.items() if key[0] >= start_step}


def test_epochs_are_exact_and_differ(reference: dict[tuple[int, int], int]) -> None:
    first, second = epochs(reference, steps_per_epoch=12)
    for rows in (first, second):
        assert len(set(rows)) == 96 and set(rows) <= set(range(101))
    assert first != second and set(first) != set(second)


def test_depths_belong_to_positions_in_every_layout(set_101: Path) -> None:
    sampler = DepthSampler(
        distribution="poisson", mean_loops=8, backprop_loops=None, granularity="sequence", curriculum="none",
        curriculum_steps=0, seed=0, global_batch_size=16,
    )  # fmt: skip

    def depths(dp_size: int, num_nodes: int, micro_batch_size: int) -> dict[tuple[int, int], int]:
        found = {}
        for dp_rank in range(dp_size):
            with TrainLoader(make_config(set_101, 16), alone(dp_rank, dp_size, num_nodes)) as loader:
                for step in range(3):
                    batch = next(loader)
                    assert batch.tokens is not None
                    loops = sampler.draw(step).rows(batch.positions.numpy()).num_loops
                    order = np.argsort(-loops, kind="stable")
                    for start in range(0, len(order), micro_batch_size):
                        rows = order[start : start + micro_batch_size]
                        for row, number in zip(rows, numbers(batch.tokens[rows]), strict=True):
                            found[step, number] = int(loops[row])
        return found

    expected = depths(1, 1, 16)
    assert len(set(expected.values())) > 3
    for dp_size, num_nodes, micro_batch_size in ((1, 1, 4), (2, 1, 4), (2, 2, 8), (4, 2, 1), (8, 1, 2), (8, 2, 2)):
        assert depths(dp_size, num_nodes, micro_batch_size) == expected


def test_the_depth_of_a_row_is_independent_of_the_row(set_101: Path) -> None:
    """With one seed for order and depths, as a run has it, 40 epochs give every row the same law of depths.

    One-way analysis of variance: F is 1 with a standard deviation of 0.14 (100 and 3,700 degrees of freedom) where
    depth and row are independent, a little below since the strata spread depths more evenly than chance; a row that
    kept its depth would make it infinite.
    """
    cfg = make_config(set_101)
    sampler = DepthSampler.from_config(
        RecurrenceConfig(mean_loops=8), seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size
    )
    by_row: dict[int, list[int]] = defaultdict(list)
    with TrainLoader(cfg, alone()) as loader:
        for step in range(40 * 12):
            batch = next(loader)
            loops = sampler.draw(step).rows(batch.positions.numpy()).num_loops
            for number, depth in zip(numbers(batch.tokens), loops.tolist(), strict=True):
                by_row[number].append(depth)
    groups = [np.array(depths) for depths in by_row.values()]
    everything = np.concatenate(groups)
    assert len(groups) == 101 and len(everything) == 40 * 96
    between = sum(len(g) * (g.mean() - everything.mean()) ** 2 for g in groups) / 100
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (len(everything) - 101)
    assert 0.55 < between / within < 1.45
    number = np.repeat(list(by_row), [len(g) for g in groups])
    assert abs(np.corrcoef(number, everything)[0, 1]) < 0.05


def test_the_part_that_a_node_reads_is_its_own(set_101: Path) -> None:
    """With canonical_nodes = nodes, the shards of two nodes overlap by the one that the border cuts."""
    shards = []
    for dp_rank in range(2):
        with TrainLoader(make_config(set_101, canonical_nodes=2), alone(dp_rank, 2, 2)) as loader:
            rows = [n for _ in range(12) for n in numbers(next(loader).tokens)]
            shards.append({number // 25 for number in rows})
    assert len(shards[0] & shards[1]) <= 1


def test_unshuffled_rows_come_in_order(set_101: Path) -> None:
    found = read_layout(make_config(set_101, shuffle=False), 2)
    assert [number for _, number in sorted(found.items())][:192] == [*range(96), *range(96)]


def test_left_out_rows_are_counted_and_logged_and_ranks_do_equal_steps(
    set_101: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for dp_rank in range(4):
        with TrainLoader(make_config(set_101), alone(dp_rank, 4)) as loader:
            for _ in range(25):
                assert next(loader).tokens.shape == (2, 9)  # type: ignore[union-attr]
            assert (loader.rows_per_epoch, loader.steps_per_epoch, loader.dropped_rows_per_epoch) == (101, 12, 5)
            assert (loader.epoch, loader.dropped_rows) == (2, 10)
    text = caplog.text
    assert "data: 101 rows = 12 steps per epoch, 5 rows of each epoch left out; starting at step 0 (epoch 0)" in text
    assert "epoch 1 of the data ends with step 23; rows left out since they do not fill a global batch: 5" in text


def test_a_rank_that_does_not_read_knows_its_positions(set_101: Path) -> None:
    with TrainLoader(make_config(set_101), alone(1, 2), reads=False, start_step=3) as loader:
        for step in range(3, 40):
            assert loader.step == step
            tokens, positions = next(loader)
            assert tokens is None and positions.tolist() == [1, 3, 5, 7]
        assert loader.bos_id == BOS


def test_fewer_steps_in_an_epoch_than_workers(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", numbered_rows(9), ONE_ROW)
    expected = read_layout(make_config(folder), 1, steps=12)
    found = read_layout(make_config(folder, num_workers=3), 1, steps=12)
    assert found == expected
    for epoch in epochs(found, steps_per_epoch=1):
        assert max(Counter(epoch).values()) == 1


def mixture(tmp_path: Path, weights: tuple[float, float]) -> list[SourceConfig]:
    """Sources of 100 rows numbered from 0 and of 40 rows numbered from 200."""
    for name, count, first in (("a", 100, 0), ("b", 40, 200)):
        write_set(tmp_path / name, numbered_rows(count, first), ONE_ROW)
    return [SourceConfig(path=str(tmp_path / n), weight=w) for n, w in zip("ab", weights, strict=True)]


def test_a_mixture_keeps_its_weights_and_its_order_in_every_layout(tmp_path: Path) -> None:
    sources = mixture(tmp_path, (1.0, 3.0))
    cfg = make_config(None, 4, sources=sources)
    with TrainLoader(cfg, alone()) as loader:
        assert (loader.rows_per_epoch, loader.steps_per_epoch) == (140, 35)
    reference = read_layout(cfg, 1, steps=71)
    first, second = epochs(reference, steps_per_epoch=35)
    for rows in (first, second):
        assert sum(n < 200 for n in rows) == 35 and sum(n >= 200 for n in rows) == 105
        counts = Counter(n for n in rows if n >= 200)
        assert set(counts) == set(range(200, 240)) and set(counts.values()) == {2, 3}
        assert max(Counter(n for n in rows if n < 200).values()) == 1
    assert {n for n in first if n < 200} != {n for n in second if n < 200}
    cfg.data.num_workers = 2
    assert read_layout(cfg, 2, 2, start_step=30, steps=20) == {k: n for k, n in reference.items() if 30 <= k[0] < 50}


def test_a_source_without_a_row_in_the_epoch_is_refused(tmp_path: Path) -> None:
    # streaming gives the row that rounding leaves over to a source by seed: here to the first.
    cfg = make_config(None, 4, sources=mixture(tmp_path, (1.0, 1e-9)), shuffle_seed=1)
    with pytest.raises(ConfigError, match=r"data\.sources\[1\]\.weight=1e-09: expected .* gives .*b at least"):
        TrainLoader(cfg, alone())


def test_state_survives_json_and_seeks(set_101: Path, reference: dict[tuple[int, int], int]) -> None:
    cfg = make_config(set_101, canonical_nodes=2, num_workers=1)
    with TrainLoader(cfg, alone()) as loader:
        for _ in range(15):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["step"], state["epoch"], state["row_in_epoch"], state["dropped_rows"]) == (15, 1, 24, 5)
        loader.seek(2)  # a rewind, with batches read ahead
        assert numbers(next(loader).tokens) == [reference[2, p] for p in range(8)]
    with TrainLoader(cfg, alone(1, 2)) as loader:
        loader.load_state_dict(state)
        assert numbers(next(loader).tokens) == [reference[15, p] for p in (1, 3, 5, 7)]
        assert loader.step == 16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shuffle_seed": 1}, "data.shuffle_seed: checkpoint 0, now 1"),
        ({"shuffle": False}, "data.shuffle: checkpoint True, now False"),
        ({"canonical_nodes": 4}, "data.canonical_nodes"),
        ({"shuffle_block_rows": 64}, "data.shuffle_block_rows"),
        ({"global_batch_size": 4}, "train.global_batch_size: checkpoint 8, now 4"),
    ],
)
def test_a_state_of_another_order_is_refused(set_101: Path, changes: dict[str, Any], named: str) -> None:
    with TrainLoader(make_config(set_101), alone()) as loader:
        state = loader.state_dict()
    with TrainLoader(make_config(set_101, **changes), alone()) as loader, pytest.raises(CheckpointError) as error:
        loader.load_state_dict(state)
    assert named in str(error.value)
    assert ("digest: checkpoint" in str(error.value)) == ("global_batch_size" not in changes)


def test_a_rebuilt_data_set_is_refused_and_a_moved_one_is_not(set_101: Path, tmp_path: Path) -> None:
    with TrainLoader(make_config(set_101), alone()) as loader:
        state = loader.state_dict()
    moved = shutil.copytree(set_101, tmp_path / "moved")
    with TrainLoader(make_config(moved), alone()) as loader:
        loader.load_state_dict(state)
    other = write_set(tmp_path / "other", numbered_rows(101, 1), numbered_rows(13))
    with TrainLoader(make_config(other), alone()) as loader, pytest.raises(CheckpointError, match="sources: "):
        loader.load_state_dict(state)


def test_the_global_generator_is_left_alone(set_101: Path) -> None:
    before = torch.get_rng_state()
    with TrainLoader(make_config(set_101, num_workers=1), alone()) as loader:
        next(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_uint32_ids_above_uint16_arrive_unchanged(tmp_path: Path) -> None:
    rows = np.full((8, 9), 1)
    rows[0, :3] = 65_535, 65_536, 119_546
    folder = write_set(tmp_path / "set", rows, rows[:1], vocab_size=120_000)
    with TrainLoader(make_config(folder, vocab_size=120_000, shuffle=False), alone()) as loader:
        assert next(loader).tokens.tolist() == rows.tolist()  # type: ignore[union-attr]


def million_rows(folder: Path) -> Path:
    """2^20 rows: one shard of 2^16 rows, sixteen times over under other names."""
    write_set(folder, numbered_rows(2**16), ONE_ROW, shard_rows=2**17)
    train = folder / "train"
    index = json.loads((train / "index.json").read_text())
    (shard,) = index["shards"]
    index["shards"] = [json.loads(json.dumps(shard)) for _ in range(16)]
    for i, entry in enumerate(index["shards"]):
        entry["raw_data"]["basename"] = f"shard.{i:05}.mds"
        if i:
            (train / f"shard.{i:05}.mds").hardlink_to(train / "shard.00000.mds")
    (train / "index.json").write_text(json.dumps(index))
    data = json.loads((folder / "manifest.json").read_text())
    for key in ("tokens", "rows", "shards"):
        data["splits"]["train"][key] *= 16
    (folder / "manifest.json").write_text(json.dumps(data))
    assert read_manifest(folder).splits["train"].rows == 2**20
    return folder


def test_resume_far_into_a_large_set_starts_as_fast_as_afresh(tmp_path: Path) -> None:
    folder = million_rows(tmp_path / "set")
    cfg = make_config(folder, 16, num_workers=1, shuffle_block_rows=262_144)

    def seconds_to_first_batch(step: int) -> float:
        start = time.perf_counter()
        with TrainLoader(cfg, alone(), start_step=step) as loader:
            next(loader)
            return time.perf_counter() - start

    fresh, resumed = seconds_to_first_batch(0), seconds_to_first_batch(900_000 // 16)
    logging.getLogger(__name__).info("first batch after %.2f s, at row 900,000 after %.2f s", fresh, resumed)
    assert resumed < fresh + 5
