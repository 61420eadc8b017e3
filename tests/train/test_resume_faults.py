"""Damaged checkpoints and full disks, met by whole runs: what is gone on from, what is said, the exit code."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.train.checkpoint.folders import checkpoints_folder, list_steps, step_folder
from tests.helpers import mounted_disk
from tests.train.forked import Run, train
from tests.train.patches import before_step
from tests.train.test_checkpoint_faults import DAMAGES, spoil
from tests.train.test_run import determined

FILES = (
    "manifest.json", "index.json", "state.json", "config.yaml", "tensors_00000_00000.safetensors",
    "tensors_00001_00000.safetensors",
)  # fmt: skip
SETTINGS = ("train.max_steps=5", "checkpoint.every_steps=2", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def stopped(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two processes with checkpoints of steps 2 and 4, stopped there. Not to be changed."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return train(config, folder, *SETTINGS, "train.stop_step=4", world=2).check()


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run to its end."""
    return train(config, tmp_path_factory.mktemp("finished") / "run", *SETTINGS, world=2).check()


def cases() -> list[Any]:
    """Every kind of file with every kind of damage, two of them outside of `make test-torture`."""
    quick = {("manifest.json", "emptied"), ("tensors_00001_00000.safetensors", "middle byte")}
    return [
        pytest.param(
            *case, id="-".join(case).replace(" ", "_"), marks=[] if case in quick else pytest.mark.torture
        )
        for case in itertools.product(FILES, ("truncated", "emptied", "middle byte", "deleted"))
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), cases())
def test_a_damaged_file_costs_the_steps_since_the_one_before(
    name: str, kind: str, stopped: Run, finished: Run, config: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    path = step_folder(checkpoints_folder(folder), 4) / name
    spoil(path, DAMAGES[kind])
    resumed = train(config, folder, *SETTINGS, world=2).check()
    new = resumed.log.removeprefix(stopped.log)
    assert f"skipping checkpoint {path.parent}: " in new and str(path) in new
    assert f"resuming from {step_folder(checkpoints_folder(folder), 2)} (step 2)" in new
    assert determined(resumed) == determined(finished)
    assert list_steps(checkpoints_folder(folder)) == [2, 4, 5]
    assert [p.name for p in (checkpoints_folder(folder) / "abandoned").iterdir()] == ["step_00000004"]


def test_with_none_left_or_another_asked_for_the_run_ends_and_changes_nothing(
    stopped: Run, config: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    asked = train(config, folder, *SETTINGS, "run.resume=step", "run.resume_step=3", world=2)
    assert asked.codes == [4, 4]
    assert "run.resume_step=3: " in asked.outputs[1] and "step_00000003 does not exist" in asked.outputs[1]
    assert f"Complete checkpoints in {checkpoints_folder(folder)}: 2, 4" in asked.outputs[1]
    for step, name in ((2, "index.json"), (4, "tensors_00001_00000.safetensors")):
        spoil(step_folder(checkpoints_folder(folder), step) / name, DAMAGES["middle byte"])
    lost = train(config, folder, *SETTINGS, world=2)
    assert lost.codes == [4, 4]
    for output in lost.outputs:
        assert "none of the checkpoints in" in output and "will not start over" in output
        assert "step_00000002/index.json" in output and "step_00000004/tensors_00001_00000" in output
        assert "Traceback" not in output
    assert lost.rows == stopped.rows
    assert list_steps(checkpoints_folder(folder)) == [2, 4]


# --- disks ---

WIDE = ("model.vocab_size=4096", "model.width=128", *SETTINGS[:2])
"""A checkpoint of 21.2 MiB: two and no three fit."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB."""
    with mounted_disk(tmp_path / "disk", "50m") as path:
        yield path


def fill_the_disk_in_step_3() -> None:
    """A patch: leaves FREE_BYTES on the disk of the run's folder."""

    def fill() -> None:
        with Path(os.environ["FILLER"]).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            file.truncate(max(0, file.tell() - int(os.environ["FREE_BYTES"])))

    before_step(3, fill)


def test_a_disk_that_is_too_small_is_refused_at_start(disk: Path, config: Path) -> None:
    run = train(config, disk / "run", *WIDE, world=2)
    assert run.codes == [2, 2]
    for output in run.outputs:
        assert "has 50.0 MiB free, but 3 more checkpoints of 21.2 MiB need 63.6 MiB" in output
        assert "checkpoint.keep_last=3 and one being written; 0 exist" in output
        assert "Traceback" not in output
    assert not run.rows and not checkpoints_folder(run.folder).exists()


@pytest.mark.parametrize("free_bytes", [5_000_000, 0], ids=["in_the_save", "before_it"])
def test_a_disk_that_fills_up(free_bytes: int, disk: Path, config: Path) -> None:
    """The last good one and `latest` stay; with space again, the same command goes on."""
    settings = (*WIDE, "checkpoint.keep_last=1")
    filler = disk / "filler"
    run = train(
        config, disk / "run", *settings, world=2, patch=f"{__name__}:fill_the_disk_in_step_3",
        FILLER=str(filler), FREE_BYTES=str(free_bytes),
    )  # fmt: skip
    assert run.codes[0] == 4
    assert "No space left on device" in run.outputs[0] and "MiB free)" in run.outputs[0]
    assert "Traceback" not in run.outputs[0]
    if free_bytes:
        assert run.codes == [4, 4]
        assert "the checkpoint of step 4 was not saved, earlier ones are untouched" in run.outputs[1]
    checkpoints = checkpoints_folder(run.folder)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000002"]
    assert (checkpoints / "latest").read_text() == "step_00000002\n"
    filler.unlink()
    resumed = train(config, disk / "run", *settings, world=2).check()
    assert "(step 2)" in resumed.log.partition("resuming from")[2]
    assert [row["step"] for row in resumed.rows if "loss" in row] == [1, 2, 3, 4, 5]
