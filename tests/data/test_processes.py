"""Loader processes that die or cannot hand a batch over, and shared memory that is too small: said, not waited for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.data import batches, node, shared_memory
from pretrain.data.loader import TrainLoader
from pretrain.errors import ConfigError, DataError
from tests.data.sets import CONTEXT, alone, make_config

Usage = namedtuple("Usage", "total used free")


def read_until_failure(cfg: Any) -> str:
    """What is raised where a batch is asked for."""
    with TrainLoader(cfg, alone()) as loader:
        with pytest.raises(DataError) as error:
            for _ in range(100):
                next(loader)
        return str(error.value)


# Ends of a loader process


@pytest.mark.parametrize(("number", "hint"), [("KILL", "host ran out of memory"), ("BUS", "/dev/shm is full")])
def test_a_process_that_dies_stops_the_run_at_the_next_batch(set_101: Path, number: str, hint: str) -> None:
    """torch's handler of SIGCHLD would raise in the middle of the work between two batches."""
    handler = signal.getsignal(signal.SIGCHLD)
    with TrainLoader(make_config(set_101, num_workers=2), alone()) as loader:
        next(loader)
        assert signal.getsignal(signal.SIGCHLD) is handler
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid or 0, signal.Signals[f"SIG{number}"])
        deadline = time.monotonic() + 60
        while os.waitid(os.P_PID, victim.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline
        words = rf"^loader process {victim.pid} was ended by SIG{number}\b.*{hint}.*lower "
        with pytest.raises(DataError, match=words):
            next(loader)
    assert not multiprocessing.active_children()


def test_a_process_that_dies_while_its_batch_is_awaited(set_101: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(rows: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(batches, "_stack", dies)
    assert "was ended by SIGKILL. A loader process that was killed" in read_until_failure(
        make_config(set_101, num_workers=2)
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_memory_that_runs_out_is_an_error_of_data(
    set_101: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    def stack(rows: Any) -> None:
        raise MemoryError("96 GiB for an array")

    monkeypatch.setattr(batches, "_stack", stack)
    words = r"^the data loader failed: MemoryError: (.*\n)*.*96 GiB for an array"
    assert re.search(words, read_until_failure(make_config(set_101, num_workers=num_workers)))


def test_locks_of_a_killed_process_hold_up_nobody(set_101: Path) -> None:
    with TrainLoader(make_config(set_101, num_workers=2), alone()) as loader:
        next(loader)
        event = loader._batches._loader._running._workers_done_event  # type: ignore[union-attr]
        event._cond.acquire()  # as a process may that is killed while it looks at the event
        victim = multiprocessing.active_children()[0]
        victim.kill()
        victim.join()
    assert not multiprocessing.active_children()


def raise_in_thread() -> None:
    """In a thread that nobody waits for."""

    def fail() -> None:
        raise ValueError("a fault of the test")

    threading.Thread(target=fail, name="helper").start()


def few_bytes() -> None:
    """As where /dev/shm is full: no file may grow to the size of a batch, while the order of the epoch still fits."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (550, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (raise_in_thread, r"^loader process \d+ ended with exit code 1; its own error tells why$"),
        (few_bytes, r"^a batch of 576 bytes could not be put into /dev/shm \(.*File too large.*lower data\.num"),
    ],
)
def test_a_failure_in_a_process_stops_the_run(
    set_101: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], break_it: Callable[[], None],
    words: str,
) -> None:  # fmt: skip
    set_up = batches.set_up_worker

    def broken(worker: int) -> None:
        set_up(worker)
        break_it()

    monkeypatch.setattr(batches, "set_up_worker", broken)
    text = read_until_failure(make_config(set_101, num_workers=2))
    assert re.search(words, text, re.DOTALL)
    if name := re.search("</(torch_[^>]+)>", text):
        assert not (node.SHARED_MEMORY / name[1]).exists()
    if break_it is raise_in_thread:
        assert re.search(
            r"error on rank 0 \(.+\): thread helper of loader process \d+ failed: Traceback(.*\n)*ValueError: a fault",
            capfd.readouterr().err,
        )


def test_a_batch_that_a_queue_drops_stops_the_run(
    set_101: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread prints what it meets, and the training process would wait for ever."""
    monkeypatch.setattr(batches, "_stack", lambda rows: threading.Lock())
    assert "ended with exit code 1" in read_until_failure(make_config(set_101, num_workers=1))
    assert re.search(
        r"error on rank 0 \(.+\): loader process \d+ could not hand over a batch: TypeError: cannot pickle",
        capfd.readouterr().err,
    )


# Room in shared memory


@pytest.mark.parametrize(
    ("data", "needed"),
    [
        # 5 or 13 batches of 8 rows, each on a page of its own; the orders of 2 epochs; 16 pages and one for the shards
        ({"num_workers": 2}, 5 + 2 + 17),
        ({"num_workers": 4, "prefetch_factor": 3}, 13 + 2 + 17),
        ({"num_workers": 0}, 2 + 17),
    ],
)
def test_too_little_shared_memory_is_refused(
    set_101: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, int], needed: int
) -> None:
    page = shared_memory.mmap.PAGESIZE
    free = needed * page - 1
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path)
    cfg = make_config(set_101, **data)
    words = rf"^/dev/shm of .+: .* free, expected at least .*data\.num_workers={data['num_workers']}.*--shm-size=SIZE"
    with pytest.raises(ConfigError, match=words):
        TrainLoader(cfg, alone())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]
    free += 1
    TrainLoader(cfg, alone()).close()


def test_the_need_is_what_a_run_takes(set_101: Path) -> None:
    """Batches of 96 rows, so that they outweigh pages: taken is never more than was asked for, and not much less."""
    cfg = make_config(set_101, 96, num_workers=2, prefetch_factor=3)
    asked = shared_memory.batch_bytes(cfg, 96)
    assert asked == 7 * 2 * shared_memory.mmap.PAGESIZE and 96 * (CONTEXT + 1) * 8 > shared_memory.mmap.PAGESIZE
    with TrainLoader(cfg, alone()) as loader:
        held = next(loader)
        most = 0
        deadline = time.monotonic() + 60
        while most < asked and time.monotonic() < deadline:
            pids = [os.getpid(), *(process.pid for process in multiprocessing.active_children())]
            most = max(most, sum(unlinked_segments(pids).values()))
        assert held.tokens is not None and most == asked


def unlinked_segments(pids: list[int | None]) -> dict[int, int]:
    """Bytes of torch's segments, which have lost their names, by inode: open ones, and mapped ones."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or closed the file meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/torch_" in line:
                    begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                    found[int(line.split()[4])] = end - begin
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "/dev/shm/torch_" in os.readlink(link):
                    found[link.stat().st_ino] = link.stat().st_blocks * 512
    return found
