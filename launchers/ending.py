"""How a job's processes end, told by the first of them, and whether starting the job again can help. Stdlib only.

srun's exit code is not enough: when one task fails, srun kills the others and returns the highest code, theirs (137).
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.errors import STOPPED_EXIT_CODE, CheckpointError, ConfigError, DataError, TrainingError

FINAL = frozenset(error.exit_code for error in (ConfigError, DataError, CheckpointError, TrainingError))
"""Exit codes of errors that a person must mend; the next start would meet them again."""

KILLED_HINT = ": where nobody sent it, often the kernel, because the host's memory ran out (see dmesg)"


@dataclass(frozen=True)
class Ending:
    """The first end of a task other than success."""

    exit_code: int
    rank: int
    host: str


def job_name(environment: Mapping[str, str]) -> str:
    """The job's id as submitit names its files: ID, or ARRAY_INDEX for a member of an array."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def restart_count(environment: Mapping[str, str]) -> int:
    """How often SLURM has requeued this job, for whatever reason."""
    return int(environment.get("SLURM_RESTART_COUNT", "0"))


def write_ending(folder: Path, environment: Mapping[str, str], exit_code: int) -> None:
    """Records this task's end unless another task of this start was first."""
    ending = Ending(exit_code, int(environment["RANK"]), socket.gethostname())
    temporary = folder / f".ending-{os.getpid()}-{ending.host}.tmp"
    temporary.write_text(json.dumps(asdict(ending)), encoding="utf-8")
    target = _path(folder, environment)
    try:
        os.link(temporary, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links: two that end at once may replace each other's
        if not target.exists():
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_ending(folder: Path, environment: Mapping[str, str]) -> Ending | None:
    """What the first task of this start recorded; None if none did: all succeeded, or a signal left no time."""
    path = _path(folder, environment)
    return Ending(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def is_worth_a_restart(exit_code: int) -> bool:
    """False after success and after errors that a person must mend.

    True after a stop on request, a lost process (5, a signal), and 1: a broken GPU or network first shows in an
    exception of torch.
    """
    return exit_code != 0 and exit_code not in FINAL


def describe(exit_code: int) -> str:
    """An exit code in words; 128 + N is how shells and srun write the signal N."""
    if exit_code == STOPPED_EXIT_CODE:
        return "stopped on request, after a save"
    if exit_code <= 128:
        return f"failed with exit code {exit_code}"
    try:
        name = signal.Signals(exit_code - 128).name
    except ValueError:
        return f"failed with exit code {exit_code}"
    return f"was ended by {name}" + (KILLED_HINT if name == "SIGKILL" else "")


def _path(folder: Path, environment: Mapping[str, str]) -> Path:
    return folder / f"{job_name(environment)}_start{restart_count(environment)}_ending.json"
