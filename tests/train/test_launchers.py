"""The three launchers on CPU: the same losses, and an exit code that is not 0 when a rank fails."""

from __future__ import annotations

import os
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
    "torchrun": ([str(BIN / "torchrun"), "--nproc_per_node", "2"], ["--master_port"]),
    "deepspeed": ([str(BIN / "deepspeed"), "--num_gpus", "2"], ["--master_port"]),
}


def launch(
    launcher: str, *arguments: str, script: str = "pretrain/main.py", timeout_sec: float = 300.0, **environment: str
) -> tuple[int, str]:
    """Exit code of the launcher, and all output."""
    command, port_option = LAUNCHERS[launcher]
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


@pytest.mark.parametrize(
    "launcher", ["torchrun", "deepspeed", pytest.param("python", marks=pytest.mark.slow)]
)
def test_same_losses_until_one_rank_fails(launcher: str, config: Path, tmp_path: Path) -> None:
    """Two steps like those of any other start; then a rank raises, and the launcher's exit code says so."""
    alone = train(config, tmp_path / "alone", "train.max_steps=3").check()
    patch = "tests.train.patches:fail_in_step_3_on_the_last_rank"
    own = arguments(config, tmp_path / "run", "train.max_steps=3")
    code, output = launch(launcher, *own, script="tests/train/launched.py", PATCH=patch)
    assert code != 0, output
    rank = 0 if launcher == "python" else 1
    assert f"error on rank {rank} (" in output and "): after step 2: Traceback" in output, output
    assert "a fault of the test" in output
    losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
    assert losses == pytest.approx(alone.column("loss")[:2], rel=1e-5), output


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_missing_configuration_fails(launcher: str) -> None:
    code, output = launch(launcher, "--config", "configs/tinny.yaml")
    assert code != 0, output
    assert "configs/tinny.yaml: no such file; nearest: configs/tiny.yaml" in output


def test_a_run_by_python_ends_with_0_and_says_only_what_is_news(config: Path, tmp_path: Path) -> None:
    code, output = launch("python", *arguments(config, tmp_path / "run", "train.max_steps=2"))
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("run  ") and lines[-1].startswith("stopped after step 2 of 2"), output
    known = ("step", "the first step", "checkpoint", "ZeRO", "data: ", "stopped")
    assert all(line.startswith(known) for line in lines[12:]), output
    code, output = launch("python", *arguments(config, tmp_path / "run", "data.path=nowhere"))
    assert code == 2 and "nowhere: no such folder" in output
