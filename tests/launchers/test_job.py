"""What a task sees: its variables, its port, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.ending import Ending, describe, is_worth_a_restart, read_ending, write_ending
from launchers.job import FIRST_PORT, PORTS, PORTS_PER_JOB, TrainJob, check_start, master_port, task_environment
from pretrain.errors import STOPPED_EXIT_CODE, DistributedError
from tests.helpers import REPOSITORY, free_port

TASK = {
    "SLURM_JOB_ID": "81234", "SLURM_STEP_NODELIST": "gpu[007,012]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_CPUS_PER_TASK": "12",
}  # fmt: skip


def test_the_environment_of_a_task() -> None:
    environment = task_environment(TASK, None)
    assert environment == {
        "RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "8",
        "MASTER_ADDR": "gpu007", "MASTER_PORT": str(master_port(81234, 0)), "OMP_NUM_THREADS": "12",
    }  # fmt: skip
    again = task_environment(TASK | {"SLURM_RESTART_COUNT": "1"}, None)
    assert again["MASTER_PORT"] != environment["MASTER_PORT"]
    assert task_environment(TASK, 29_500)["MASTER_PORT"] == "29500"


@given(st.integers(1, 2**26), st.integers(1, 1000), st.integers(0, 15), st.integers(0, 15))
def test_ports_of_neighbouring_jobs_and_of_starts_differ(job: int, distance: int, one: int, other: int) -> None:
    assert FIRST_PORT <= master_port(job, one) < FIRST_PORT + PORTS
    assert distance * PORTS_PER_JOB < PORTS - PORTS_PER_JOB
    assert master_port(job, one) != master_port(job + distance, other)
    assert (master_port(job, one) == master_port(job, other)) == (one == other)


def test_a_taken_port_is_named_with_its_option() -> None:
    with socket.create_server(("", free_port())) as server:
        port = server.getsockname()[1]
        environment = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
        with pytest.raises(DistributedError, match=f"port {port} of .* is taken .*--master-port"):
            check_start(environment, 0, needs_gpu=False)
        check_start(environment | {"RANK": "1"}, 0, needs_gpu=False)
    check_start(environment, 0, needs_gpu=False)


def test_more_starts_than_allowed_are_refused() -> None:
    environment = {"RANK": "1", "MASTER_PORT": "29500", "SLURM_RESTART_COUNT": "3"}
    check_start(environment, 3, needs_gpu=False)
    with pytest.raises(DistributedError, match="requeued this job 3 times, more than --requeue 2"):
        check_start(environment, 2, needs_gpu=False)


def test_a_node_without_its_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setitem(sys.modules, "torch", torch)
    environment = {"RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    check_start(environment, 0, needs_gpu=True)
    with pytest.raises(DistributedError, match=f"{socket.gethostname()} shows 2 GPUs to local rank 2: .*exclude=NODE"):
        check_start(environment | {"LOCAL_RANK": "2"}, 0, needs_gpu=True)


@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_ending_of_a_start_is_kept(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no hard links here")))
    first = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "9", "RANK": "5"}
    assert read_ending(tmp_path, first) is None
    write_ending(tmp_path, first, 6)
    write_ending(tmp_path, first | {"RANK": "1"}, 137)
    assert read_ending(tmp_path, first) == Ending(6, 5, socket.gethostname())
    again = first | {"SLURM_RESTART_COUNT": "1"}
    assert read_ending(tmp_path, again) is None
    write_ending(tmp_path, again, STOPPED_EXIT_CODE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7_2_start0_ending.json", "7_2_start1_ending.json"]


def test_what_is_worth_a_restart() -> None:
    assert [code for code in range(8) if is_worth_a_restart(code)] == [1, 5, 7]
    assert is_worth_a_restart(STOPPED_EXIT_CODE) and is_worth_a_restart(137)


def test_endings_in_words() -> None:
    assert describe(6) == "failed with exit code 6"
    assert describe(STOPPED_EXIT_CODE) == "stopped on request, after a save"
    assert "SIGKILL" in describe(137) and "memory" in describe(137)
    assert describe(134) == "was ended by SIGABRT"
    assert describe(250) == "failed with exit code 250"


def test_a_task_refuses_a_bad_configuration_and_records_it(tmp_path: Path) -> None:
    """As submitit runs it: unpickled in a process of its own. srun gets the exit code, the record says which rank."""
    job = TrainJob(("--config", str(tmp_path / "absent.yaml")), str(tmp_path), 0, needs_gpu=False)
    path = tmp_path / "job.pkl"
    path.write_bytes(pickle.dumps(job))
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=REPOSITORY, env=os.environ | TASK, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "error on rank 9" in done.stderr and "no such file" in done.stderr
    assert json.loads((tmp_path / "81234_start0_ending.json").read_text())["rank"] == 9
