"""Jobs of the launcher as a user has them: submitted by the command line, looked at through files and scontrol."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.helpers import REPOSITORY
from tests.slurm.cluster import PrivateSlurm, running_processes, wait_until

log = logging.getLogger(__name__)

DETERMINED = ("step", "loss", "grad_norm", "lr", "tokens", "num_loops_mean", "skipped_steps", "val_loss")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
PATIENCE_SEC = 900
"""Four processes import torch on what may be one busy core."""


def launch(slurm: PrivateSlurm, config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The launcher's exit code and words. Threads would only compete here."""
    command = [sys.executable, "launchers/slurm.py", "--config", str(config), *arguments]
    environment = os.environ | slurm.environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"WANDB_MODE": "disabled"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


def submit(slurm: PrivateSlurm, config: Path, *arguments: str) -> str:
    """The id of a job that the launcher has submitted."""
    done = launch(slurm, config, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("job ")[2].partition(":")[0]


class Job:
    """Job `job_id` (ID, or ARRAY_INDEX), whose run is in `folder` and whose logs are in `logs`."""

    def __init__(self, slurm: PrivateSlurm, job_id: str, folder: Path, logs: Path) -> None:
        self.slurm, self.job_id, self.folder, self.logs = slurm, job_id, folder, logs

    @property
    def state(self) -> dict[str, str]:
        """What scontrol says, by name."""
        return self.slurm.job(self.job_id)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What of metrics.jsonl does not depend on time."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [{name: row[name] for name in DETERMINED if name in row} for row in map(json.loads, lines)]

    @property
    def steps(self) -> int:
        """The last step that has been measured."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def words(self) -> str:
        """Everything that the batch script and the tasks have said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob(f"{self.job_id}_*_log.*")))

    def wait_for_training(self, restarts: int = 0) -> None:
        """Returns once start number `restarts` trains: 10 steps further than what it found."""
        self._wait(lambda: self._is_running(restarts), f"start {restarts}")
        found = max((int(p.name.removeprefix("step_")) for p in self.folder.glob("checkpoints/step_*")), default=0)
        self._wait(lambda: self._is_running(restarts) and self.steps >= found + 10, f"step {found + 10}")

    def wait_for(self, state: str) -> float:
        """Seconds until the job is in `state` and no process of it is left."""
        return self._wait(lambda: self.state["JobState"] == state and not self.processes(), state)

    def wait_for_requeue(self, restarts: int) -> float:
        """Seconds until the job is queued again; SLURM's wait of two minutes is then cut to what cleaning up takes."""
        seconds = self._wait(
            lambda: self.state["JobState"] == "PENDING" and self.state["Restarts"] == str(restarts), "a requeue"
        )
        self._wait(lambda: not self._has_daemons(), "the end of its steps")
        time.sleep(3)  # slurmd revokes what was allowed up to the second of the requeue
        self.slurm.run("scontrol", "update", f"JobId={self.job_id}", "StartTime=now")
        return seconds

    def processes(self) -> dict[int, int]:
        """Rank of each process of the job that runs pretrain/main.py, by process id; loader processes included."""
        own_id = self.state["JobId"]
        return {
            process.id: int(process.variables["SLURM_PROCID"])
            for process in running_processes()
            # srun has the same words in its command line.
            if "submitit.core._submit" in process.command and not process.command[0].endswith("srun")
            if process.variables["SLURM_JOB_ID"] == own_id
        }

    def freeze(self) -> None:
        """Stops every process where it is, so that the run is not over before SLURM acts; its signals continue it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)

    def main_process(self, rank: int) -> int:
        """The process id of a task; its loader processes are its children."""
        own = [pid for pid, owner in self.processes().items() if owner == rank]
        parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in own}
        (pid,) = (pid for pid in own if parents[pid] not in own)
        return pid

    def _has_daemons(self) -> bool:
        title = f"slurmstepd: [{self.state['JobId']}."
        return any(process.command[0].startswith(title) for process in running_processes())

    def _is_running(self, restarts: int) -> bool:
        state = self.state
        assert state["JobState"] not in ENDED, f"{state}\n{self.words[-6000:]}"
        return state["JobState"] == "RUNNING" and state["Restarts"] == str(restarts)

    def _wait(self, condition: Any, what: str) -> float:
        what = f"{what} of job {self.job_id}"
        try:
            seconds = wait_until(condition, PATIENCE_SEC, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state}\n{self.words[-6000:]}") from None
        log.info("waited %.0f s for %s", seconds, what)
        return seconds
