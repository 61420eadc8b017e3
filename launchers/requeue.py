"""The last line of a job's batch script: puts the job back into the queue where that can help, and says why or why not.

The batch script decides, since it outlives the tasks: a task that is killed can do nothing more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from launchers.commands import call
from launchers.ending import describe, is_worth_a_restart, job_name, read_ending, restart_count
from pretrain.arguments import integer, pathname
from pretrain.errors import STOPPED_EXIT_CODE

SCONTROL_SEC, SCONTROL_TRIES, SCONTROL_WAIT_SEC = 60, 5, 3
"""A busy controller does not answer every call."""


def main(argv: Sequence[str]) -> int:
    """Returns the job's exit code: of the first task that ended otherwise than with 0, else srun's."""
    parser = argparse.ArgumentParser(prog="launchers.requeue", allow_abbrev=False)
    parser.add_argument("--folder", type=pathname, required=True, help="where the tasks recorded how they ended")
    parser.add_argument("--max-requeues", type=integer(), required=True)
    parser.add_argument("--status", type=integer(), required=True, help="srun's exit code")
    args = parser.parse_args(argv)
    first = read_ending(args.folder, os.environ)
    exit_code = args.status if first is None else first.exit_code
    if exit_code == 0:
        return 0
    who = "a task" if first is None else f"rank {first.rank} ({first.host}), the first to report,"
    if exit_code == STOPPED_EXIT_CODE:
        who = "the run"
    _say(f"{who} {describe(exit_code)}")
    if first is not None and args.status > 128 and is_worth_a_restart(exit_code):
        _say("a task that was killed cannot report; srun's messages name it: 'task RANK: Killed'")
    reason = reason_to_stay_away(exit_code, restart_count(os.environ), args.max_requeues)
    if reason is None:
        # One run of a sweep has the whole array's id in SLURM_JOB_ID: `scontrol requeue` of that would hit them all.
        reason = requeue(job_name(os.environ))
    done = restart_count(os.environ) + (reason is None)
    _say(f"requeued ({done} of {args.max_requeues})" if reason is None else f"not requeued: {reason}")
    return exit_code


def reason_to_stay_away(exit_code: int, restarts: int, max_requeues: int) -> str | None:
    """Why a job that ended with `exit_code` (not 0) must not be queued again; None if it may."""
    if not is_worth_a_restart(exit_code):
        return "the next start would meet the same error"
    if restarts >= max_requeues:
        return f"--requeue {max_requeues} is used up" if max_requeues else "--requeue N was not given"
    return None


def requeue(job_id: str) -> str | None:
    """Has SLURM queue the job (ID, or ARRAY_INDEX) again; returns None, or why the job is left alone."""
    shown = _scontrol("--oneliner", "show", "job", job_id)
    if shown.returncode:
        return f"scontrol show job {job_id}: {shown.stderr.strip()}"
    state = dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)
    if not may_be_requeued(state):
        return f"SLURM has already ended the job (state {state.get('JobState')}), by scancel or to requeue it itself"
    done = _scontrol("requeue", job_id)
    return f"scontrol requeue {job_id}: {done.stderr.strip()}" if done.returncode else None


def may_be_requeued(state: Mapping[str, str]) -> bool:
    """True while the job runs (also while it is preempted) and after its time limit; False after scancel."""
    return state.get("JobState") == "RUNNING" or state.get("Reason") == "TimeLimit"


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    for tries in range(SCONTROL_TRIES):
        time.sleep(SCONTROL_WAIT_SEC if tries else 0)
        done = call("scontrol", *arguments, timeout_sec=SCONTROL_SEC)
        if done.returncode == 0:
            break
    return done


def _say(text: str) -> None:
    sys.stdout.write(f"job {job_name(os.environ)}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
