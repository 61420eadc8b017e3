"""Which checkpoint a run starts from: rank 0 lists, all ranks check a share of the files, and all agree."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError
from pretrain.train.checkpoint.folders import (
    LATEST_NAME,
    checkpoints_folder,
    list_steps,
    looks_complete,
    step_folder,
)
from pretrain.train.checkpoint.format import MANIFEST_NAME
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader

log = logging.getLogger(__name__)


def find_checkpoint(
    run_folder: Path, run: RunConfig, ranks: Ranks, *, whole: bool = True
) -> CheckpointReader | None:
    """The checkpoint that `run.resume` asks for, checked to the last byte; None: the run starts from step 0.

    Without `whole` (a dry run) the sizes of its files are checked, and not what is in the large ones.

    auto   the newest complete one; those after it are skipped with a warning. None where no step has a folder.
    step   exactly `run.resume_step`.
    never  None.

    Errors, on every rank: CheckpointError where the request cannot be met (with the steps that exist), where folders
    exist but none is complete, where `never` finds any, or where a rank does not see rank 0's folder. Collective.
    """
    checkpoints = checkpoints_folder(run_folder)
    steps = agreed_steps(checkpoints, ranks)
    if run.resume == "step":
        assert run.resume_step is not None
        return _exactly(checkpoints, run.resume_step, steps, ranks, whole)
    if not steps:
        return None
    if run.resume == "never":
        raise CheckpointError(
            f"{checkpoints} holds checkpoints of steps {_list(steps)}, and run.resume=never starts from step 0: choose "
            "another run.name, move the folder away, or set run.resume=auto"
        )
    return _newest(checkpoints, steps, ranks, whole)


def agreed_steps(checkpoints: Path, ranks: Ranks) -> list[int]:
    """What rank 0 lists, on every rank, and CheckpointError on all of them where it cannot. Collective."""
    steps, error = [], None
    if ranks.rank == 0:
        try:
            steps = list_steps(checkpoints)
        except CheckpointError as caught:
            error = str(caught)
    ranks.raise_any(error)
    return ranks.broadcast(steps)


def open_checkpoint(path: Path, *, whole: bool = True) -> CheckpointReader:
    """The checkpoint in `path`, checked to the last byte: a step's folder, or a run's (its newest complete one).

    `whole` as in `find_checkpoint`.

    Errors: CheckpointError that names the file and what is wrong with it.
    """
    if (path / MANIFEST_NAME).is_file() or not os.path.lexists(checkpoints_folder(path)):
        reader = CheckpointReader(path)
        if whole:
            reader.verify()
        return reader
    found = find_checkpoint(path, RunConfig(resume="auto"), Ranks(), whole=whole)
    if found is None:
        raise CheckpointError(f"{checkpoints_folder(path)} holds no checkpoint")
    return found


def _exactly(checkpoints: Path, step: int, steps: list[int], ranks: Ranks, whole: bool) -> CheckpointReader:
    if step in steps:
        reader, problem = _open(step_folder(checkpoints, step), ranks, whole)
        if reader is not None:
            return reader
    else:
        problem = f"{step_folder(checkpoints, step)} does not exist"
    complete = [s for s in steps if s != step and looks_complete(step_folder(checkpoints, s))]
    raise CheckpointError(
        f"run.resume_step={step}: {problem}. Complete checkpoints in {checkpoints}: {_list(complete)}"
    )


def _newest(checkpoints: Path, steps: list[int], ranks: Ranks, whole: bool) -> CheckpointReader:
    problems = []
    for step in reversed(steps):
        folder = step_folder(checkpoints, step)
        reader, problem = _open(folder, ranks, whole)
        if reader is not None:
            if ranks.rank == 0:
                _compare_latest(checkpoints, folder.name)
            return reader
        problems.append(f"{folder.name}: {problem}")
        if ranks.rank == 0:
            log.warning("skipping checkpoint %s: %s", folder, problem)
    raise CheckpointError(
        f"none of the checkpoints in {checkpoints} is complete, and the run will not start over in a folder that holds "
        "some: restore the missing files, or move the folder away\n" + "\n".join(problems)
    )


def _open(folder: Path, ranks: Ranks, whole: bool) -> tuple[CheckpointReader | None, str]:
    """The reader of a complete checkpoint, or None and what is wrong with it; the same on all ranks."""
    seen = ranks.gather(os.path.isfile(folder / MANIFEST_NAME))  # False also where the disk fails: all go on together
    if seen[0] and not all(seen):
        ranks.raise_any(None if seen[ranks.rank] else not_shared(folder))
    reader, problem = None, None
    try:
        reader = CheckpointReader(folder)
        if whole:
            reader.verify(ranks.rank, ranks.size)
        if folder != step_folder(folder.parent, reader.step):
            problem = f"{folder / MANIFEST_NAME}: is of step {reader.step}"
    except CheckpointError as error:
        problem = str(error)
    problems = [p for p in ranks.gather(problem) if p is not None]
    return (None, problems[0]) if problems else (reader, "")


def not_shared(folder: Path) -> str:
    """The message for a folder that rank 0 sees and this rank does not."""
    return f"{folder} is not visible here, but on rank 0: run.dir must be on a file system that all nodes share"


def _compare_latest(checkpoints: Path, chosen: str) -> None:
    path = checkpoints / LATEST_NAME
    try:
        found = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        found = "absent"
    except OSError as error:  # it is there for people
        found = f"not readable ({error})"
    if found != chosen:
        log.warning("%s is %s; the newest complete checkpoint is %s, and is used", path, found or "empty", chosen)


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
