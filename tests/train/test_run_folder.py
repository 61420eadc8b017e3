"""The run's folder as whole runs meet it: in use by another process, and with links in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pretrain.folder_lock import FolderLock
from pretrain.train.checkpoint.folders import checkpoints_folder, list_steps, step_folder
from tests.train.forked import Run, train
from tests.train.test_run import assert_same_checkpoint, determined

SETTINGS = ("train.max_steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=2", "validation.every_steps=null")


@pytest.fixture(scope="module")
def stopped(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that stopped after step 2 of 4. Not to be changed."""
    return train(config, tmp_path_factory.mktemp("stopped") / "run", *SETTINGS, "train.stop_step=2").check()


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run to its end."""
    return train(config, tmp_path_factory.mktemp("finished") / "run", *SETTINGS).check()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, links followed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_in_use_is_refused_untouched_on_every_rank(stopped: Run, config: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    (checkpoints_folder(folder) / ".step_00000003.partial").mkdir()
    (tmp_path / "other_name").symlink_to(folder)
    with FolderLock(folder):
        before = contents(folder)
        for name in ("run", "other_name"):
            refused = train(config, tmp_path / name, *SETTINGS, world=2)
            assert refused.codes == [4, 4]
            for output in refused.outputs:
                assert f"{tmp_path / name}: in use by process {os.getpid()} on " in output and ", since 20" in output
                assert "Traceback" not in output
        dry = train(config, folder, *SETTINGS, "--dry-run")
        assert dry.codes == [0] and "parameters" in dry.outputs[0]
        assert contents(folder) == before
    assert checkpoints_folder(folder).joinpath(".step_00000003.partial").is_dir()


def test_a_run_that_has_lost_its_folder_ends_before_it_writes(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    patch = "tests.train.guard_patches:lose_the_folder_in_step_3"
    run = train(config, folder, *SETTINGS, patch=patch, FOLDER=str(folder))
    assert run.codes == [4]
    assert "no longer this process's alone (lock.lease: owner-changed); lock.json names process 1" in run.outputs[0]
    assert run.column("step") == [1, 2] and list_steps(checkpoints_folder(folder)) == [1, 2]
    assert "elsewhere" in (folder / "lock.json").read_text() and (folder / "lock.lease").is_file()


def test_a_checkpoint_on_another_disk_stays_there(stopped: Run, finished: Run, config: Path, tmp_path: Path) -> None:
    """A link is gone on from; retention removes it alone, and so does a start after a removal that was cut short."""
    folder, disk = shutil.copytree(stopped.folder, tmp_path / "run"), tmp_path / "disk"
    disk.mkdir()
    checkpoints = checkpoints_folder(folder)
    for step in (1, 2):
        shutil.move(step_folder(checkpoints, step), disk)
        step_folder(checkpoints, step).symlink_to(disk / f"step_{step:08d}")
    (checkpoints / ".step_00000001.deleted").symlink_to(disk / "step_00000001")
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to("step_00000002")
    before = contents(disk)
    resumed = train(config, folder, *SETTINGS).check()
    assert "(step 2)" in resumed.log and determined(resumed) == determined(finished)
    assert_same_checkpoint(resumed, finished)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000003", "step_00000004"]
    assert (checkpoints / "latest").read_text() == "step_00000004\n" and not (checkpoints / "latest").is_symlink()
    assert "is a link: only the link is removed" in resumed.log
    assert contents(disk) == before


def test_folders_of_a_run_may_be_links(stopped: Run, finished: Run, config: Path, tmp_path: Path) -> None:
    """To other disks: checkpoints, abandoned, metrics.jsonl; a relative link that is set aside leads where it led."""
    folder, disk = shutil.copytree(stopped.folder, tmp_path / "run"), tmp_path / "disk"
    disk.mkdir()
    for name in ("checkpoints", "metrics.jsonl"):
        shutil.move(folder / name, disk)
        (folder / name).symlink_to(disk / name)
    (disk / "other").mkdir()
    checkpoints = checkpoints_folder(folder)
    (checkpoints / "abandoned").symlink_to(disk / "other")
    shutil.move(step_folder(checkpoints, 2), disk / "moved")
    step_folder(checkpoints, 2).symlink_to("../moved")
    resumed = train(config, folder, *SETTINGS, "run.resume=step", "run.resume_step=1").check()
    assert determined(resumed) == determined(finished)
    assert (folder / "metrics.jsonl").is_symlink() and (folder / "checkpoints").is_symlink()
    assert (disk / "other" / "step_00000002" / "manifest.json").is_file()
    assert list_steps(disk / "checkpoints") == [3, 4]


@pytest.mark.parametrize(
    "kind",
    [
        "link that leads nowhere",
        pytest.param("file", marks=pytest.mark.slow),
        pytest.param("link to itself", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_that_cannot_be_listed_are_not_none(
    kind: str, stopped: Run, config: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    shutil.move(folder / "checkpoints", tmp_path / "elsewhere")
    if kind == "file":
        (folder / "checkpoints").touch()
    else:
        (folder / "checkpoints").symlink_to("checkpoints" if kind == "link to itself" else tmp_path / "unmounted")
    before = contents(folder)
    refused = train(config, folder, *SETTINGS, world=2)
    assert refused.codes == [4, 4]
    for output in refused.outputs:
        assert f"{folder / 'checkpoints'}: cannot be listed (" in output and "Traceback" not in output
        assert ("is that mounted?" in output) == (kind != "file")
    assert {n: text for n, text in contents(folder).items() if n != "log.txt"} == {
        n: text for n, text in before.items() if n != "log.txt"
    }


def test_a_step_that_leads_nowhere_is_set_aside_with_a_warning(stopped: Run, config: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    checkpoints = checkpoints_folder(folder)
    step_folder(checkpoints, 3).symlink_to(tmp_path / "unmounted")
    resumed = train(config, folder, *SETTINGS).check()
    assert f"skipping checkpoint {step_folder(checkpoints, 3)}: " in resumed.log and "(step 2)" in resumed.log
    assert os.readlink(checkpoints / "abandoned" / "step_00000003") == str(tmp_path / "unmounted")
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()
    step_folder(checkpoints, 3).symlink_to(tmp_path / "unmounted")
    refused = train(config, folder, *SETTINGS)
    assert refused.codes == [4] and "will not start over" in refused.outputs[0]
