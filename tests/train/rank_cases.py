"""What each rank of a test world runs, all in one process group. Returns what the tests assert."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError
from pretrain.train.checkpoint import find, folders
from pretrain.train.checkpoint import writer as writer_module
from pretrain.train.checkpoint.format import TensorSlice
from pretrain.train.checkpoint.ranks import Ranks
from tests.train.checkpoints import SHARDED, slices, state, writer


def run(folder: str) -> dict[str, Any]:
    """All cases, in an order that is the same on both ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = Ranks.of()
    cases = (sharded, background, full_on_one, not_shared, found_together, damaged)
    results = {case.__name__: case(Path(folder) / case.__name__, ranks) for case in cases}
    dist.destroy_process_group()
    return results


def own(step: int, ranks: Ranks) -> Iterator[TensorSlice]:
    """This tensor-parallel rank's slices; rank 0 also writes what is replicated. Collective, as under ZeRO."""
    halves = {name: 0 for name in SHARDED}
    for piece in slices(step, 2):
        if piece.name in halves:
            turn, halves[piece.name] = halves[piece.name], 1 - halves[piece.name]
        else:
            turn = 0
        ranks.gather(None)
        if turn == ranks.rank:
            yield piece


def sharded(run: Path, ranks: Ranks) -> None:
    """The parent reads what this saves."""
    one = writer(run, ranks=ranks, max_file_bytes=300, keep_last=1)
    one.start_from(0)
    for step in (10, 20):
        one.save(own(step, ranks), state(step))


def background(run: Path, ranks: Ranks) -> list[str]:
    """A save behind, one that fails on rank 1, and a good one; what every rank was told."""
    told = []
    one = writer(run, ranks=ranks, background=True)
    one.start_from(0)
    one.save(own(10, ranks), state(10))
    one.wait()
    with failing_on(1, ranks):
        one.save(own(20, ranks), state(20))
        while not one.failed:  # without any collective of the main thread
            time.sleep(0.01)
        told.append(raised(one.wait))
    one.save(own(30, ranks), state(30))
    one.wait()
    return told


def full_on_one(run: Path, ranks: Ranks) -> list[str]:
    """A disk that is full on one rank only, either of them; every rank is told, and the next save works."""
    one = writer(run, ranks=ranks, max_file_bytes=1)
    one.start_from(0)
    told = []
    for rank in (0, 1):
        with failing_on(rank, ranks):
            told.append(raised(lambda: one.save(own(10, ranks), state(10))))
    one.save(own(10, ranks), state(10))
    return told


def not_shared(run: Path, ranks: Ranks) -> list[str]:
    """Every rank has a folder of its own."""
    mine = run / str(ranks.rank)
    if ranks.rank == 0:
        writer(mine).save(slices(10), state(10))
    ranks.gather(None)
    with mock.patch.object(writer_module, "_SHARED_WAIT_SEC", 0.2):
        one = writer(mine, ranks=ranks)
        return [
            raised(lambda: find.find_checkpoint(mine, RunConfig(), ranks)),
            raised(lambda: one.start_from(10)),
            raised(lambda: one.save(own(20, ranks), state(20))),
        ]


def found_together(run: Path, ranks: Ranks) -> list[int | str]:
    """What both ranks decide to resume from."""
    one = writer(run, ranks=ranks)
    one.start_from(0)
    for step in (10, 20):
        one.save(own(step, ranks), state(step))
    exact = find.find_checkpoint(run, RunConfig(resume="step", resume_step=10), ranks)
    newest = find.find_checkpoint(run, RunConfig(), ranks)
    assert exact is not None and newest is not None
    refused = raised(lambda: find.find_checkpoint(run, RunConfig(resume="step", resume_step=15), ranks))
    return [exact.step, newest.step, refused]


def damaged(run: Path, ranks: Ranks) -> list[int | str]:
    """Each of the newest checkpoint's files damaged in turn, so that another rank finds it."""
    logging.getLogger("pretrain").setLevel(logging.ERROR)
    one = writer(run, ranks=ranks)
    one.start_from(0)
    for step in (10, 20):
        one.save(own(step, ranks), state(step))
    chosen: list[int | str] = []
    for path in sorted(folders.step_folder(folders.checkpoints_folder(run), 20).iterdir()):
        good = path.read_bytes()
        ranks.gather(None)
        if ranks.rank == 0:
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        ranks.gather(None)
        found = find.find_checkpoint(run, RunConfig(), ranks)
        assert found is not None
        chosen.append(found.step)
        refused = raised(lambda: find.find_checkpoint(run, RunConfig(resume="step", resume_step=20), ranks))
        assert path.name in refused
        if ranks.rank == 0:
            path.write_bytes(good)
        ranks.gather(None)
    return chosen


@contextlib.contextmanager
def failing_on(rank: int, ranks: Ranks) -> Iterator[None]:
    """Writes tensors to a full disk on one rank."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(writer_module, "write_tensors", fail) if ranks.rank == rank else contextlib.nullcontext():
        yield


def raised(call: Any) -> str:
    """The message of the CheckpointError that the call must raise."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")
