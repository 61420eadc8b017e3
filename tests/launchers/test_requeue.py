"""The batch script's last line, with a scontrol that says what the test wants."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from launchers import requeue
from launchers.ending import write_ending
from pretrain.errors import STOPPED_EXIT_CODE

RUNNING = "JobId=9 JobName=a b=c JobState=RUNNING Reason=None Requeue=1 PreemptTime=2030-01-01T00:00:00"
OUT_OF_TIME = "JobId=9 JobState=COMPLETING Reason=TimeLimit"
CANCELLED = "JobId=9 JobState=COMPLETING Reason=None"


class Scontrol:
    """A program that answers `show job` with `state` and notes what else it is asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.failures = folder, RUNNING, 0

    def install(self) -> None:
        program = self.folder / "scontrol"
        program.write_text(
            f'#!/bin/sh\nif [ "$2" = show ]; then echo "$4" >> {self.folder}/shown; echo "{self.state}"; exit 0; fi\n'
            f'echo "$@" >> {self.folder}/asked\n[ $(wc -l < {self.folder}/asked) -gt {self.failures} ] && exit 0\n'
            'echo "no such job" >&2\nexit 1\n'
        )
        program.chmod(0o755)

    @property
    def asked(self) -> list[str]:
        return self._lines("asked")

    @property
    def shown(self) -> list[str]:
        """The jobs that `show job` was asked about."""
        return self._lines("shown")

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(requeue, "SCONTROL_WAIT_SEC", 0)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    return Scontrol(tmp_path)


def run(scontrol: Scontrol, status: int, max_requeues: int = 2) -> int:
    scontrol.install()
    arguments = ["--folder", scontrol.folder, "--max-requeues", max_requeues, "--status", status]
    return requeue.main([str(argument) for argument in arguments])


def record(scontrol: Scontrol, exit_code: int, restarts: int = 0) -> None:
    environment = {"SLURM_JOB_ID": "9", "RANK": "3", "SLURM_RESTART_COUNT": str(restarts)}
    write_ending(scontrol.folder, environment, exit_code)


def test_a_finished_job_is_left_alone(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(scontrol, 0) == 0
    assert scontrol.asked == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("state", [RUNNING, OUT_OF_TIME])
def test_a_stopped_job_is_requeued(scontrol: Scontrol, capsys: pytest.CaptureFixture[str], state: str) -> None:
    """srun saw only tasks that ended well."""
    scontrol.state = state
    record(scontrol, STOPPED_EXIT_CODE)
    assert run(scontrol, 0) == STOPPED_EXIT_CODE
    assert scontrol.asked == ["requeue 9"]
    assert capsys.readouterr().out == "job 9: the run stopped on request, after a save\njob 9: requeued (1 of 2)\n"


def test_a_cancelled_job_is_not(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    scontrol.state = CANCELLED
    record(scontrol, STOPPED_EXIT_CODE)
    assert run(scontrol, 0) == STOPPED_EXIT_CODE
    assert scontrol.asked == [] and "not requeued: SLURM has already ended the job" in capsys.readouterr().out


def test_a_run_of_a_sweep_is_requeued_alone(scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run of an array has the array's id, which stands for all of its runs."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "9")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert run(scontrol, 137) == 137
    assert scontrol.asked == ["requeue 9_2"] and scontrol.shown == ["9_2"]


def test_a_killed_task_is_a_reason_to_start_again(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(scontrol, 137) == 137
    assert scontrol.asked == ["requeue 9"]
    assert "a task was ended by SIGKILL" in capsys.readouterr().out


def test_an_error_that_would_come_again_is_final(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    """srun returns 137, of the tasks that it killed after the first failure."""
    record(scontrol, 6)
    assert run(scontrol, 137) == 6
    said = capsys.readouterr().out
    assert scontrol.asked == [] and "not requeued: the next start would meet the same error" in said
    assert f"rank 3 ({socket.gethostname()}), the first to report, failed with exit code 6\n" in said


def test_a_peer_of_a_killed_task_reports_first(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    record(scontrol, 1)
    assert run(scontrol, 137) == 1
    said = capsys.readouterr().out
    assert scontrol.asked == ["requeue 9"] and "failed with exit code 1" in said and "srun's messages name it" in said


@pytest.mark.parametrize("restarts, max_requeues, reason", [(2, 2, "--requeue 2 is used up"), (0, 0, "not given")])
def test_the_bound_holds(
    scontrol: Scontrol,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    max_requeues: int,
    reason: str,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    record(scontrol, STOPPED_EXIT_CODE, restarts)
    assert run(scontrol, 0, max_requeues) == STOPPED_EXIT_CODE
    assert scontrol.asked == [] and reason in capsys.readouterr().out


def test_what_scontrol_refuses_is_said(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    scontrol.failures = requeue.SCONTROL_TRIES
    assert run(scontrol, 1) == 1
    assert "not requeued: scontrol requeue 9: no such job" in capsys.readouterr().out


def test_a_controller_that_does_not_answer_at_once(scontrol: Scontrol, capsys: pytest.CaptureFixture[str]) -> None:
    scontrol.failures = 2
    assert run(scontrol, 1) == 1
    assert scontrol.asked == ["requeue 9"] * 3 and "requeued (1 of 2)" in capsys.readouterr().out


def test_a_controller_that_never_answers(
    scontrol: Scontrol, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's own code is returned, and what is the matter said."""

    def silent(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, requeue.SCONTROL_SEC)

    monkeypatch.setattr(subprocess, "run", silent)
    record(scontrol, STOPPED_EXIT_CODE)
    assert run(scontrol, 0) == STOPPED_EXIT_CODE
    said = capsys.readouterr().out
    assert "not requeued: scontrol show job 9: " in said and "timed out after 60 seconds" in said
