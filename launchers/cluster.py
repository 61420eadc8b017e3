"""SLURM's side of the launcher: the batch script through submitit, sbatch's own check of it, and the submission."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launchers.commands import call
from launchers.job import TrainJob
from pretrain.errors import ConfigError
from pretrain.foreign import ONE_LINE, is_one_line

REPOSITORY = Path(__file__).resolve().parents[1]
COMMAND_SEC = 60
TIME_FORMS = "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES[:SECONDS] or UNLIMITED"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What a job asks SLURM for. None leaves a matter to the cluster."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    max_requeues: int = 0
    stop_sec: int = 120
    """Seconds before the time limit at which SLURM sends USR2."""
    array_parallelism: int | None = None
    extra: dict[str, str | bool] = field(default_factory=dict)
    """Further options of sbatch."""


class TrainExecutor(SlurmExecutor):
    """submitit's executor; `script` shows what it would submit, on machines without SLURM too.

    The batch script's shell survives TERM, so that after the tasks its last line, launchers/requeue.py, can decide.
    """

    def __init__(self, folder: Path, allocation: Allocation) -> None:
        _require_one_line({"folder": str(folder), **asdict(allocation), **allocation.extra, "python": sys.executable})
        super().__init__(folder)
        ask, python = allocation, shlex.quote(sys.executable)
        srun = ["--kill-on-bad-exit=1", "--open-mode=append", "--distribution=block"]
        # Not handed down from sbatch since SLURM 22.05.
        srun.append(f"--cpus-per-task={ask.cpus_per_task}")
        if ask.gpus_per_node:
            srun.append("--gpu-bind=none")  # every task sees the node's GPUs and takes number LOCAL_RANK
        last = ["-m", "launchers.requeue", "--folder", str(self.folder), "--max-requeues", str(ask.max_requeues)]
        self.update_parameters(
            job_name=ask.name, partition=ask.partition, time=ask.time, account=ask.account, nodes=ask.nodes,
            ntasks_per_node=ask.tasks_per_node, gpus_per_node=ask.gpus_per_node or None,
            cpus_per_task=ask.cpus_per_task, signal_delay_s=ask.stop_sec, wckey=None, srun_args=srun,
            setup=["trap : TERM", f"export PYTHONPATH={shlex.quote(str(REPOSITORY))}${{PYTHONPATH:+:$PYTHONPATH}}"],
            teardown=[f"exec {python} {shlex.join(last)} --status $?"],
            array_parallelism=ask.array_parallelism or 256,
            additional_parameters={("requeue" if ask.max_requeues else "no-requeue"): True, **ask.extra},
        )  # fmt: skip

    @classmethod
    def affinity(cls) -> int:
        """submitit's score of this machine; it refuses to be built where there is no srun."""
        return 1

    def script(self, jobs: int) -> str:
        """The batch script of `jobs` jobs (more than one: an array)."""
        if jobs > 1:
            self.parameters["map_count"] = jobs
        try:
            return self._make_submission_file_text(self._submitit_command_str, "")
        finally:
            self.parameters.pop("map_count", None)


def _require_one_line(texts: Mapping[str, object]) -> None:
    """ConfigError where a text that goes into the batch script has a line break or another control character."""
    for name, text in texts.items():
        if isinstance(text, str) and not is_one_line(text):
            raise ConfigError(f"batch script: {name}={text!r}: expected {ONE_LINE}")


def check_with_scheduler(script: str) -> str | None:
    """SLURM's forecast of when and where `script` would start; None where there is no sbatch.

    Errors: ConfigError with the scheduler's own words where it refuses.
    """
    if shutil.which("sbatch") is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        done = call("sbatch", "--test-only", file.name, timeout_sec=COMMAND_SEC)
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
    words = "; ".join(line for line in lines if line.strip())
    if done.returncode == 0:
        return re.sub(r"^Job \d+ ", "", words)  # the number of a job that will never be
    found = call("sinfo", "--noheader", "--format=%P", timeout_sec=COMMAND_SEC)
    partitions = " ".join(found.stdout.split()) or "unknown"
    raise ConfigError(f"SLURM refuses this job: {words} (from sbatch --test-only; partitions: {partitions})")


def submit(executor: TrainExecutor, jobs: Sequence[TrainJob]) -> list[str]:
    """Submits the jobs, several as one array; returns their ids. Errors: ConfigError with sbatch's words."""
    try:
        submitted: list[SlurmJob[None]] = executor.submit_array(jobs)  # type: ignore[assignment]
    except FailedJobError as error:
        raise ConfigError(f"SLURM refuses this job: {str(error).strip()}") from error
    return [job.job_id for job in submitted]


def time_limit_sec(text: str) -> float:
    """Seconds of a time limit as sbatch reads it (a bare number is minutes). Errors: ConfigError with the forms."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ConfigError(f"--time {text}: expected {TIME_FORMS}")
    days, first, second, third = (int(part) if part is not None else None for part in found.groups())
    if days is not None or third is not None:
        return (days or 0) * 86_400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    return (first or 0) * 60 + (second or 0)


def leave_surrounding_job() -> None:
    """Inside of another job (salloc) its variables would become settings of the new one."""
    if "SLURM_JOB_ID" in os.environ:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "SRUN_", "SBATCH_")) and name != "SLURM_CONF":
                del os.environ[name]
