"""Calls of SLURM's own commands. Stdlib only."""

from __future__ import annotations

import subprocess


def call(*command: str, timeout_sec: float) -> subprocess.CompletedProcess[str]:
    """The command's result; one that is missing or does not answer counts as failed, and its stderr says why."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_sec)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
