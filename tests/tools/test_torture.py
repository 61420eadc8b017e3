"""The short form of tools/torture.py, and that it sees what it is there to see."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pretrain.train.checkpoint.folders import checkpoints_folder, step_folder
from pretrain.train.metrics import METRICS_NAME
from tests.helpers import REPOSITORY, end_processes
from tests.train.checkpoints import save, slices, state, writer
from tools.torture import differences, is_saving, newest_complete


@pytest.fixture
def straight(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 10 and 20."""
    folder = tmp_path / "straight"
    save(folder, 10, 20)
    rows = ({"step": step, "loss": 1 / step, "step_sec": 0.1, "val_loss": {"1": 0.5}} for step in range(1, 21))
    (folder / METRICS_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_differences_of_one_bit_are_named(straight: Path, tmp_path: Path) -> None:
    own = shutil.copytree(straight, tmp_path / "own")
    assert list(differences(own, straight)) == []
    metrics = own / METRICS_NAME
    good = metrics.read_text()
    metrics.write_text(good.replace("0.1}", "0.2}").replace('"step_sec": 0.1', '"step_sec": 7'))
    assert list(differences(own, straight)) == []  # times may differ
    metrics.write_text(good.replace('"loss": 0.25,', '"loss": 0.25000000000000006,'))
    (found,) = differences(own, straight)
    assert "0.25000000000000006" in found and '"step": 4' in found
    metrics.write_text(good + good.splitlines()[-1] + "\n")
    assert list(differences(own, straight)) == [f"own: 21 rows in {METRICS_NAME}, expected 20"]


def test_other_weights_moments_and_leftovers_are_named(straight: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    save(own, 10)
    shutil.copy(straight / METRICS_NAME, own)
    other = list(slices(20))
    (changed,) = (piece for piece in other if (piece.name, piece.kind) == ("scale", "exp_avg"))
    changed.tensor.neg_()
    writer(own).save(other, state(20))
    (checkpoints_folder(own) / ".step_00000030.partial").mkdir()
    assert is_saving(own) and not is_saving(straight)
    moment, left = differences(own, straight)
    assert moment == "own: scale (exp_avg) differs"
    assert left.startswith("own: checkpoints holds ['.step_00000030.partial', ")


def test_the_newest_complete_checkpoint_is_found_independently(straight: Path, tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none") is None
    assert newest_complete(straight) == 20
    (step_folder(checkpoints_folder(straight), 20) / "index.json").unlink()
    assert newest_complete(straight) == 10


@pytest.mark.torture
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "tools.torture", "--processes", "2"),
        pytest.param(("tools/check_layouts.py", "--families", "parcae"), marks=pytest.mark.slow),
    ],
    ids=["torture", "check_layouts"],
)
def test_a_killed_command_leaves_no_process(command: tuple[str, ...]) -> None:
    process = subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, start_new_session=True)
    deadline = time.monotonic() + 200
    try:
        while len(group(process.pid)) < 3:  # its ranks are forks
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.kill()
        process.wait()
        while group(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for pid in group(process.pid):
            os.kill(pid, signal.SIGKILL)
        end_processes([process])


def group(leader: int) -> list[int]:
    """The processes of a process group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.torture
@pytest.mark.parametrize(
    "settings", [(), ("zero.stage=3", "checkpoint.background=true", "train.max_steps=30")], ids=["zero1", "zero3"]
)
def test_five_kills_and_two_second_starts_lose_nothing(settings: tuple[str, ...]) -> None:
    numbers = ["--kills", "5", "--in-save", "2", "--second-starts", "2", "--minutes", "5"]
    command = [sys.executable, "-m", "tools.torture", *numbers, *settings]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = r"^2 second starts; [5-9] kills, [2-9] of them inside a save, .* 0 mismatches"
    assert re.search(expected, done.stdout, re.MULTILINE)
