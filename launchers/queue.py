"""Which jobs of SLURM's queue train a run: submissions note their ids in the run's folder, squeue tells which live."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from launchers.commands import call
from pretrain.errors import ConfigError

JOBS_NAME = "slurm/jobs.txt"
"""In a run's folder: a line for each job that was submitted for it, ID or ARRAY_INDEX."""
SQUEUE_SEC = 60


def note_jobs(folders: Sequence[Path], job_ids: Sequence[str]) -> None:
    """Notes in each run's folder the job that will train it."""
    for folder, job_id in zip(folders, job_ids, strict=True):
        path = folder / JOBS_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(job_id + "\n")


def require_not_queued(folders: Sequence[Path], dependency: str) -> None:
    """Raises ConfigError where a job for one of the runs waits or runs already, unless the new one waits for its end.

    `dependency` is that of sbatch. Errors: ConfigError also where squeue does not answer.
    """
    noted = {folder: _noted_jobs(folder) for folder in folders}
    states = _states({job for jobs in noted.values() for job in jobs})
    for folder, jobs in noted.items():
        for job in jobs:
            awaited = "singleton" in dependency or job.partition("_")[0] in re.findall(r"\d+", dependency)
            if job in states and not awaited:
                raise ConfigError(
                    f"{folder}: job {job} ({states[job].lower()}) is for this run already: expected one job at a time; "
                    f"scancel {job}, or have this one wait for it: --sbatch dependency=afterany:{job}"
                )


def _noted_jobs(folder: Path) -> list[str]:
    path = folder / JOBS_NAME
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return [word for word in words if re.fullmatch(r"\d+(_\d+)?", word)]


def _states(jobs: set[str]) -> dict[str, str]:
    """State by job of those that are still in the queue and not about to leave it."""
    if not jobs:
        return {}
    command = ("squeue", "--noheader", "--array", "--format=%i %T", f"--jobs={','.join(sorted(jobs))}")
    done = call(*command, timeout_sec=SQUEUE_SEC)
    if done.returncode and "Invalid job id" not in done.stderr:  # SLURM has forgotten it
        raise ConfigError(f"SLURM does not say whether the run is queued already: squeue: {done.stderr.strip()}")
    lines = (line.split() for line in done.stdout.splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[1] != "COMPLETING"}
