"""On a real SLURM of 2 nodes: a job to its end, and the same job preempted, out of time, and with a task killed.

The interrupted job must leave the trace of the uninterrupted one. The tests that share a job interrupt it in turn, in
their order here. Most of the time is that of starting Python: four tasks import torch on what may be two cores.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launchers.hosts import expand_hosts
from tests.slurm.cluster import PrivateSlurm
from tests.slurm.jobs import Job, launch, submit

pytestmark = pytest.mark.slurm

WORLD = ("--nodes", "2", "--tasks-per-node", "2")
SETTINGS = ("data.num_workers=1", "train.max_steps=120", "validation.every_steps=40", "checkpoint.every_steps=40")
STOPPED = "stopped on request, after a save"


def start(slurm: PrivateSlurm, config: Path, runs: Path, name: str, *arguments: str) -> Job:
    """A job on 2 nodes x 2 tasks."""
    job_id = submit(slurm, config, *WORLD, *arguments, *SETTINGS, f"run.dir={runs}", f"run.name={name}")
    return Job(slurm, job_id, runs / name, runs / name / "slurm")


@pytest.fixture(scope="module")
def interrupted(slurm: PrivateSlurm, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that may be requeued three times."""
    return start(slurm, config, tmp_path_factory.mktemp("runs"), "interrupted", "--requeue", "3", "--stop-sec", "45")


@pytest.fixture(scope="module")
def sweep(slurm: PrivateSlurm, config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """Three runs of one task each, as an array; the last would not end."""
    folder = tmp_path_factory.mktemp("sweep")
    path = folder / "lr.yaml"
    path.write_text("- [optimizer.lr=1e-3]\n- [optimizer.lr=2e-3]\n- [optimizer.lr=4e-3, train.max_steps=100000]\n")
    arguments = ("--tasks-per-node", "1", "--array", str(path), "--requeue", "3", *SETTINGS)
    array = submit(slurm, config, *arguments, f"run.dir={folder}", "run.name=s", "train.max_steps=30")
    return [Job(slurm, f"{array}_{i}", folder / f"s-{i}", folder / "lr_slurm") for i in range(3)]


def test_preempted_and_requeued(slurm: PrivateSlurm, interrupted: Job) -> None:
    """SLURM sends TERM only, also to the loader's processes, and gives 5 minutes here."""
    interrupted.wait_for_training()
    interrupted.freeze()
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    interrupted.wait_for_requeue(restarts=1)
    saved = interrupted.steps
    assert (interrupted.folder / f"checkpoints/step_{saved:08d}").is_dir()
    assert f"the run {STOPPED}" in interrupted.words and "requeued (1 of 3)" in interrupted.words
    assert "SIGTERM received" in interrupted.words


def test_out_of_time_and_requeued(slurm: PrivateSlurm, interrupted: Job, request: pytest.FixtureRequest) -> None:
    restarts = int(interrupted.state["Restarts"])
    interrupted.wait_for_training(restarts)
    interrupted.freeze()
    # An end within --stop-sec: SLURM sends USR2 the next time it looks at the clock, which may take half a minute.
    slurm.run("scontrol", "update", f"JobId={interrupted.job_id}", f"EndTime={in_seconds(40)}")
    request.getfixturevalue("sweep")  # it starts meanwhile
    interrupted.wait_for_requeue(restarts + 1)
    slurm.run("scontrol", "update", f"JobId={interrupted.job_id}", "TimeLimit=UNLIMITED")
    assert "SIGUSR2 received" in interrupted.words and f"requeued ({restarts + 1} of 3)" in interrupted.words


def test_a_sweep_as_an_array_and_the_cancellation_of_one_run(slurm: PrivateSlurm, sweep: list[Job]) -> None:
    endless = sweep[2]
    endless.wait_for_training()
    slurm.run("scancel", endless.job_id)
    endless.wait_for("CANCELLED")
    assert (endless.folder / f"checkpoints/step_{endless.steps:08d}").is_dir()
    assert "SIGTERM received" in endless.words
    for job in sweep[:2]:
        job.wait_for("COMPLETED")
    assert [job.rows[0]["lr"] for job in sweep] == [1e-3, 2e-3, 4e-3]
    assert [job.steps for job in sweep[:2]] == [30, 30]
    time.sleep(3)  # a requeue, were there one, would show by now
    assert (endless.state["JobState"], endless.state["Restarts"]) == ("CANCELLED", "0")


def test_a_killed_task_ends_the_start_within_two_minutes(interrupted: Job) -> None:
    """The job goes back into the queue and resumes from the last checkpoint."""
    restarts = int(interrupted.state["Restarts"])
    interrupted.wait_for_training(restarts)
    os.kill(interrupted.main_process(rank=3), signal.SIGKILL)
    assert interrupted.wait_for_requeue(restarts + 1) < 120
    assert "srun: error: n1: task 3: Killed" in interrupted.words
    assert f"requeued ({restarts + 1} of 3)" in interrupted.words


def test_the_interrupted_job_leaves_the_same_trace(slurm: PrivateSlurm, interrupted: Job, config: Path) -> None:
    straight = start(slurm, config, interrupted.folder.parent, "straight")
    straight.wait_for("COMPLETED")
    interrupted.wait_for("COMPLETED")
    assert len(straight.rows) == 120 + 3
    assert interrupted.rows == straight.rows
    assert straight.state["Requeue"] == "0" and straight.state["ExitCode"] == "0:0"


def test_a_run_is_queued_once(slurm: PrivateSlurm, config: Path, tmp_path: Path) -> None:
    """Alone and as a member of a sweep; a job that is cancelled is in nobody's way."""
    path = tmp_path / "two.yaml"
    path.write_text("- [optimizer.lr=1e-3]\n- [optimizer.lr=2e-3]\n")
    held = ("--tasks-per-node", "1", f"run.dir={tmp_path}", "--sbatch", "hold")
    sweep = (*held, "--array", str(path), "run.name=s")
    array = submit(slurm, config, *sweep)
    for again in (sweep, (*held, "run.name=s-1")):
        done = launch(slurm, config, *again)
        assert done.returncode == 2 and f"job {array}_" in done.stderr and "(pending) is for this run" in done.stderr
    slurm.run("scancel", f"{array}_1")
    alone = submit(slurm, config, *held, "run.name=s-1")
    assert f"job {alone} (pending)" in launch(slurm, config, *held, "run.name=s-1").stderr
    behind = submit(slurm, config, *held, "run.name=s-1", "--sbatch", f"dependency=afterany:{alone}")
    slurm.run("scancel", array, alone, behind)
    slurm.run("scancel", submit(slurm, config, *sweep))


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("--partition", "nope", "invalid partition specified: nope"),
        ("--sbatch", "constraint=h100", "Invalid feature specification"),
        ("--nodes", "3", "Requested node configuration is not available"),
        ("--sbatch", "gres=gpu:3", "Requested node configuration is not available"),
    ],
)
def test_refused_in_the_schedulers_words(
    slurm: PrivateSlurm, config: Path, tmp_path: Path, option: str, value: str, words: str
) -> None:
    arguments = (*WORLD, option, value, f"run.dir={tmp_path}", "train.global_batch_size=24", "train.micro_batch_size=2")
    done = launch(slurm, config, *arguments)
    assert done.returncode == 2 and words in done.stderr and "main* high" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert slurm.run("squeue", "--noheader") == ""


def test_a_script_for_gpus_is_accepted(slurm: PrivateSlurm, config: Path, tmp_path: Path) -> None:
    arguments = ("--nodes", "2", "--gpus-per-node", "2", "--time", "1-00:00:00", f"run.dir={tmp_path}", "--dry-run")
    done = launch(slurm, config, *arguments)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=2\n" in done.stdout and "# SLURM accepts it: to start at" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", ["gpu7", "linux[1,2]", "n[08-11]", "rack[1-2]n[098-100,7],x", "a,b-1"])
def test_node_lists_as_scontrol_reads_them(slurm: PrivateSlurm, names: str) -> None:
    assert expand_hosts(names) == slurm.run("scontrol", "show", "hostnames", names).split()


def in_seconds(seconds: int) -> str:
    """A time of today as scontrol takes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
