"""The three launchers on CPU: the same losses, and an exit code that is not 0 when a rank fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.train.metrics import read_metrics
from tests.helpers import REPOSITORY, end_processes, free_port
from tests.train.forked import train

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "python": ([sys.executable], []),
    "torchrun": ([str(BIN / "torchrun"), "--nproc_per_node", "WORLD"], ["--master_port"]),
    "deepspeed": ([str(BIN / "deepspeed"), "--num_gpus", "WORLD"], ["--master_port"]),
}


def launch(
    launcher: str, *arguments: str, script: str = "pretrain/main.py", world: int = 2, timeout_sec: float = 300.0,
    **environment: str,
) -> tuple[int, str]:  # fmt: skip
    """Exit code of the launcher, and all output. `world`: processes of those that start several."""
    command, port_option = LAUNCHERS[launcher]
    command = [str(world) if part == "WORLD" else part for part in command]
    port = [*port_option, str(free_port())] if port_option else []
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"} | environment
    if launcher == "deepspeed":
        clean.pop("CUDA_VISIBLE_DEVICES")  # its runner refuses it together with --num_gpus
    process = subprocess.Popen(
        [*command, *port, script, *arguments], cwd=REPOSITORY, env=clean, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_sec)
    finally:
        end_processes([process])
    return process.returncode, output.decode(errors="replace")


def arguments(config: Path, folder: Path, *overrides: str) -> list[str]:
    return ["--config", str(config), f"run.dir={folder.parent}", f"run.name={folder.name}", *overrides]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def slow(launcher: str) -> pytest.ParameterSet:
    return pytest.param(launcher, marks=pytest.mark.slow)


@pytest.mark.parametrize("launcher", ["torchrun", slow("deepspeed"), slow("python")])
def test_same_losses_exit_code_0_and_no_noise(launcher: str, config: Path, tmp_path: Path) -> None:
    alone = train(config, tmp_path / "alone", "train.max_steps=2").check()
    code, output = launch(launcher, *arguments(config, tmp_path / "run", "train.max_steps=2"))
    assert code == 0, output
    assert losses(tmp_path / "run") == pytest.approx(alone.column("loss"), rel=1e-5)
    lines = [line for line in output.splitlines() if not (launcher == "deepspeed" and line.startswith("["))]
    begin = next(i for i, line in enumerate(lines) if line.startswith("device"))
    assert lines[0].startswith("run  ") and begin < 15, output
    known = ("ZeRO stage", "data: ", "step", "the first step was done", "checkpoint of", "stopped after step 2 of 2")
    assert all(line.startswith(known) for line in lines[begin + 1 :]), output


@pytest.mark.parametrize("launcher", ["deepspeed", slow("torchrun"), slow("python")])
def test_a_rank_that_fails_in_step_3(launcher: str, config: Path, tmp_path: Path) -> None:
    """Rank 1 alone raises: the launcher's exit code says so, and the first error is that rank's, with its step."""
    patch = "tests.train.patches:fail_in_step_3_on_the_last_rank"
    own = arguments(config, tmp_path / "run", "train.max_steps=3")
    code, output = launch(launcher, *own, script="tests/train/launched.py", PATCH=patch)
    assert code != 0, output
    rank = 0 if launcher == "python" else 1
    errors = [line for line in output.splitlines() if line.startswith("error on rank")]
    assert re.match(rf"error on rank {rank} \(.+\): after step 2: Traceback", errors[0]), output
    assert "ValueError: a fault of the test" in output
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_missing_configuration(launcher: str) -> None:
    code, output = launch(launcher, "--config", "configs/tinny.yaml")
    assert code != 0, output
    assert "configs/tinny.yaml: no such file; nearest: configs/tiny.yaml" in output
