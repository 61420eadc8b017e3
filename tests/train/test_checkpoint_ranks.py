"""Two processes save and load together: they write shares, and agree on every outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.train.checkpoint.find import open_checkpoint
from pretrain.train.checkpoint.folders import checkpoints_folder, list_steps
from tests.helpers import run_ranks
from tests.train.checkpoints import assert_holds


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a world of two ranks, and what each reports."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(2, "tests.train.rank_cases:run", timeout_sec=90, folder=str(folder))


World = tuple[Path, list[dict[str, Any]]]


def test_ranks_agree(world: World) -> None:
    assert world[1][0] == world[1][1]


def test_each_rank_writes_its_share(world: World) -> None:
    run = world[0] / "sharded"
    with open_checkpoint(run) as reader:
        assert_holds(reader, 20)
        files = {name[:13] for name in reader.manifest.files if name.startswith("tensors")}
    assert files == {"tensors_00000", "tensors_00001"}
    assert list_steps(checkpoints_folder(run)) == [20]


def test_background_failure_on_one_rank_reaches_all(world: World) -> None:
    run = world[0] / "background"
    (told,) = world[1][0]["background"]
    assert "step 20 was not saved" in told
    assert "tensors_00001_00000.safetensors: [Errno 28] No space left on device" in told
    assert list_steps(checkpoints_folder(run)) == [10, 30]
    with open_checkpoint(run) as reader:
        assert_holds(reader, 30)


def test_full_disk_on_one_rank_reaches_all(world: World) -> None:
    run = world[0] / "full_on_one"
    for rank, told in enumerate(world[1][0]["full_on_one"]):
        assert f"tensors_0000{rank}_00000.safetensors: [Errno 28] No space left on device" in told
    assert sorted(p.name for p in checkpoints_folder(run).iterdir()) == ["latest", "step_00000010"]
    with open_checkpoint(run) as reader:
        assert_holds(reader, 10)


def test_folders_that_are_not_shared_are_an_error(world: World) -> None:
    for told in world[1][0]["not_shared"]:
        assert told.startswith("rank 1 on ")
        assert "run.dir must be on a file system that all nodes share" in told


def test_resume_is_decided_together(world: World) -> None:
    exact, newest, refused = world[1][0]["found_together"]
    assert (exact, newest) == (10, 20)
    assert "resume_step=15" in refused and "10, 20" in refused


def test_damage_found_by_any_rank_counts_for_all(world: World) -> None:
    assert world[1][0]["damaged"] == [10] * 6
