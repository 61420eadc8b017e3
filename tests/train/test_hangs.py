"""A rank that hangs, is gone or never comes: every rank shows where it stands, and the job ends in time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.train.forked import train

PATCHES = "tests.train.guard_patches"
PLACES = {"python": "_sleep", "loader": "_sleep", "collective": "barrier", "lock": "_sleep_with_the_lock"}


@pytest.mark.parametrize(
    "how", ["loader", "lock", *(pytest.param(how, marks=pytest.mark.slow) for how in ("python", "collective"))]
)
def test_all_ranks_show_their_threads_where_one_hangs(how: str, config: Path, tmp_path: Path) -> None:
    """Rank 1 hangs in step 3, with Python's lock or without it, in a loader process or in a collective of its own."""
    settings = ("guards.step_sec=4", "validation.every_steps=null", f"data.num_workers={int(how == 'loader')}")
    run = train(config, tmp_path / "run", *settings, world=2, patch=f"{PATCHES}:hang", last_sec=20, HANG=how)
    assert run.codes == [5, 1 if how == "lock" else 5]
    waiting, hanging = run.outputs
    begin = r"error on rank {} \(.+\): step 3 has taken longer than guards.step_sec=4 s. This rank's threads, "
    assert re.search(begin.format(0), waiting) and re.search("in all_(reduce|gather)", waiting)
    assert f"in {PLACES[how]}" in hanging, hanging
    if how == "lock":
        assert hanging.splitlines()[0].startswith("Timeout")
    else:
        assert re.search(begin.format(1), hanging)
        assert re.search(r"error on rank 1 \(.+\): ending with exit code 5", hanging)
    if how == "loader":
        assert re.search(r"thread MainThread:(\n  File .*)* in TrainLoader._read\n", hanging)


def test_a_rank_that_is_killed_ends_the_others(config: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    run = train(config, tmp_path / "run", world=2, patch=f"{PATCHES}:die_in_step_3", last_sec=20)
    assert run.codes == [5, -9] and time.monotonic() - begin < 60
    assert "after step 2: another rank failed" in run.outputs[0]


def test_a_rank_that_never_comes(config: Path, tmp_path: Path) -> None:
    run = train(config, tmp_path / "run", "parallel.rendezvous_sec=2", WORLD_SIZE="2")
    assert run.codes == [5]
    assert "within parallel.rendezvous_sec=2 s" in run.outputs[0] and "Traceback" not in run.outputs[0]
