"""What is broken stops the run and is named; what other runs own is left alone."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming.base.dataset as streaming_dataset
import streaming.base.util as streaming_util

from pretrain.config.schema import Config, SourceConfig
from pretrain.data import node
from pretrain.data.loader import TrainLoader
from pretrain.errors import ConfigError, DataError
from tests.data.sets import CONTEXT, alone, make_config, numbered_rows, numbers, write_set
from tests.helpers import REPOSITORY

VALIDATION = numbered_rows(2)


@pytest.fixture(autouse=True)
def no_pause_between_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """streaming waits 1 to 1.5 s before it tries again."""
    monkeypatch.setattr(streaming_util, "sleep", lambda seconds: None)


@pytest.fixture
def copy_101(set_101: Path, tmp_path: Path) -> Path:
    """The set of 101 rows, to be broken."""
    return shutil.copytree(set_101, tmp_path / "set")


def read_epoch(cfg: Config) -> list[int]:
    """Numbers of all rows of an epoch."""
    with TrainLoader(cfg, alone()) as loader:
        return [number for _ in range(loader.steps_per_epoch) for number in numbers(next(loader).tokens)]


def shard(folder: Path, number: int = 2, suffix: str = "") -> Path:
    return folder / "train" / f"shard.{number:05}.mds{suffix}"


# Before the first row


def test_a_missing_or_truncated_shard_is_named_at_start(copy_101: Path) -> None:
    path = shard(copy_101)
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(DataError, match=rf"shard\.00002\.mds: {len(data) - 10} bytes, index\.json says {len(data)}"):
        TrainLoader(make_config(copy_101), alone())
    path.unlink()
    with pytest.raises(DataError, match=r"shard\.00002\.mds: shard is missing"):
        TrainLoader(make_config(copy_101), alone())


def test_a_set_without_its_index_is_refused(copy_101: Path) -> None:
    (copy_101 / "train" / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"train/index\.json: missing"):
        TrainLoader(make_config(copy_101), alone())


def test_settings_that_would_delete_the_only_copy_are_refused(set_101: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache_limit_bytes=1000000: expected null"):
        TrainLoader(make_config(set_101, cache_limit_bytes=1_000_000), alone())
    source = SourceConfig(path=str(set_101), remote=str(set_101))
    with pytest.raises(ConfigError, match=r"expected another folder than path"):
        TrainLoader(make_config(None, sources=[source]), alone())


def test_more_canonical_nodes_than_rows_are_refused(set_101: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.canonical_nodes=102: expected at most the 101 rows"):
        TrainLoader(make_config(set_101, canonical_nodes=102), alone())


def test_a_compressed_set_needs_a_cache(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", numbered_rows(30), VALIDATION, compression="zstd:3")
    with pytest.raises(ConfigError, match=r"its shards are compressed.*data\.sources\[\]\.remote"):
        TrainLoader(make_config(folder), alone())


# While reading


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_that_breaks_during_the_run_is_named(copy_101: Path, num_workers: int) -> None:
    breaks = {
        "removed": lambda path: path.unlink(),
        "truncated": lambda path: os.truncate(path, path.stat().st_size - 200),
        "overwritten": lambda path: path.write_bytes(path.read_bytes()[:-40] + b"\xff" * 40),
    }
    for kind, break_it in breaks.items():
        folder = shutil.copytree(copy_101, copy_101.with_name(kind))
        with TrainLoader(make_config(folder, num_workers=num_workers), alone()) as loader:
            break_it(shard(folder))
            with pytest.raises(DataError, match=rf"^\S*{kind}/train/shard\.00002\.mds: \S.*\S$") as error:
                for _ in range(12):
                    next(loader)
            assert "Traceback" not in str(error.value)
            if kind == "overwritten":
                assert "id 65535 where model.vocab_size=1000" in str(error.value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("compression", "suffix"), [(None, ""), ("zstd:3", ".zstd")])
def test_a_bad_remote_shard_stops_the_run(
    tmp_path: Path, num_workers: int, compression: str | None, suffix: str
) -> None:
    """streaming alone would end the epoch early, with exit code 0."""
    origin = write_set(tmp_path / "origin", numbered_rows(101), VALIDATION, compression=compression)
    bad = shard(origin, suffix=suffix)
    data = bad.read_bytes()
    for kind in ("missing", "truncated", "flipped"):
        bad.unlink()
        if kind != "missing":
            bad.write_bytes(data[:-10] if kind == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
        source = SourceConfig(path=str(tmp_path / f"cache_{kind}"), remote=str(origin))
        with pytest.raises(DataError, match=rf"cache_{kind}/train/shard\.00002\.mds: shard cannot be read"):
            read_epoch(make_config(None, sources=[source], num_workers=num_workers))
        bad.write_bytes(data)


def test_a_background_thread_that_dies_stops_the_run(set_101: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: object, it: object) -> None:
        raise MemoryError("no thread any more")

    monkeypatch.setattr(streaming_dataset.StreamingDataset, "_prepare_thread", dies)
    for num_workers in (0, 1):
        with pytest.raises(DataError, match=r"^reading ahead failed \(MemoryError: no thread any more\)$"):
            read_epoch(make_config(set_101, num_workers=num_workers))


def test_workers_outlive_the_signals_of_a_job(set_101: Path) -> None:
    with TrainLoader(make_config(set_101, num_workers=2), alone()) as loader:
        next(loader)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        for name in ("INT", "TERM", "USR1", "USR2"):
            subprocess.run(["kill", "-s", name, *(str(worker.pid) for worker in workers)], check=True)
        for _ in range(20):
            next(loader)
    assert not multiprocessing.active_children()


# Remote sets and their caches


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_a_remote_set_is_read_through_a_bounded_cache(tmp_path: Path, compression: str | None) -> None:
    origin = write_set(tmp_path / "origin", numbered_rows(600), VALIDATION, compression=compression)
    size = sum(f.stat().st_size for f in (origin / "train").glob("shard*"))
    raw = 2 * (CONTEXT + 1) * 25
    source = SourceConfig(path=str(tmp_path / "cache"), remote=str(origin))
    limit = (origin / "train" / "index.json").stat().st_size + 8 * (raw + 900)
    cfg = make_config(None, sources=[source], cache_limit_bytes=limit, num_workers=1, predownload_rows=16)
    rows = read_epoch(cfg)
    assert sorted(rows) == list(range(600))
    assert size == sum(f.stat().st_size for f in (origin / "train").glob("shard*"))
    cached = list((tmp_path / "cache" / "train").glob("*.mds"))
    assert 0 < len(cached) < 24
    for path in cached:  # cut by a kill or a full disk
        os.truncate(path, 100)
    assert read_epoch(cfg) == rows


def test_two_runs_share_a_local_set_but_not_a_cache(
    set_101: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "CACHE_WAIT_SEC", 0.3)
    local = make_config(set_101, num_workers=1)
    with TrainLoader(local, alone()) as one, TrainLoader(local, alone()) as two:
        for _ in range(13):
            assert numbers(next(one).tokens) == numbers(next(two).tokens)
    source = SourceConfig(path=str(tmp_path / "cache"), remote=str(set_101))
    remote = make_config(None, sources=[source])
    with TrainLoader(remote, alone()) as one:
        with pytest.raises(DataError, match=r"cache: another run .* uses this cache"):
            TrainLoader(remote, alone())
        next(one)
    assert len(read_epoch(remote)) == 96


# Ends of runs, and what they leave

CRASH = """
import sys
from pathlib import Path
from pretrain.data.loader import TrainLoader
from tests.data.sets import alone, make_config
loader = TrainLoader(make_config(Path(sys.argv[1]), num_workers=2), alone())
next(loader)
raise SystemExit(7)
"""


def test_a_run_that_ends_without_closing_ends_its_workers(set_101: Path) -> None:
    command = [sys.executable, "-c", CRASH, str(set_101)]
    assert subprocess.run(command, cwd=REPOSITORY, timeout=120).returncode == 7


def read_for_ever(origin: Path, cache: Path, prefixes: Any) -> None:
    """A run; its first message is the number of its shared memory."""
    source = SourceConfig(path=str(cache), remote=str(origin))
    loader = TrainLoader(make_config(None, sources=[source], num_workers=2), alone())
    next(loader)
    prefixes.send(loader._folder.prefix)
    while True:
        next(loader)
        time.sleep(0.02)


def start_run(origin: Path, cache: Path) -> tuple[multiprocessing.Process, int]:
    """A run that reads for ever, and the number of its shared memory."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=read_for_ever, args=(origin, cache, theirs))
    process.start()
    assert ours.poll(60)
    return process, ours.recv()


def segments(prefix: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{prefix}_*")]


def test_a_killed_run_is_cleaned_up_and_a_live_one_left_alone(set_101: Path, tmp_path: Path) -> None:
    live, live_prefix = start_run(set_101, tmp_path / "live_cache")
    dead, dead_prefix = start_run(set_101, tmp_path / "cache")
    try:
        assert segments(dead_prefix) and len(segments(live_prefix)) == 6
        dead.kill()  # its workers must not keep the cache
        dead.join()
        source = SourceConfig(path=str(tmp_path / "cache"), remote=str(set_101))
        assert len(read_epoch(make_config(None, sources=[source]))) == 96
        TrainLoader(make_config(set_101), alone()).close()  # by now the workers of the killed run are gone for sure
        assert not segments(dead_prefix) and not folder_of(dead_prefix).exists()
        assert live.is_alive()
        assert len(segments(live_prefix)) == 6 and folder_of(live_prefix).exists()
    finally:
        for process in (live, dead):
            process.kill()
            process.join()


def folder_of(prefix: int) -> Path:
    return node.SHARED_MEMORY / f"looped-pretrain-{os.getuid()}" / str(prefix)


def test_shared_memory_that_is_full_is_named(set_101: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, array: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with (
        TrainLoader(make_config(set_101, num_workers=1), alone()) as loader,
        pytest.raises(DataError, match=r"order_0\.npy: cannot write the order of an epoch, 404 bytes .*--shm-size"),
    ):
        next(loader)


def test_nothing_is_left_behind(set_101: Path) -> None:
    environment = dict(os.environ)
    find_prefix = streaming_dataset.get_shm_prefix
    loader = TrainLoader(make_config(set_101, num_workers=1), alone())
    assert dict(os.environ) == environment and streaming_dataset.get_shm_prefix is find_prefix
    prefix = loader._folder.prefix
    next(loader)
    assert segments(prefix)
    loader.close()
    loader.close()
    assert not segments(prefix) and not folder_of(prefix).exists()
    assert not multiprocessing.active_children()
