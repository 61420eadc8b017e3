"""The folders below RUN/checkpoints: their names, which are kept, going back to an earlier step, and disk space."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from pretrain.config.schema import CheckpointConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.files import remove_tree, size_text, sync_folder, write_text
from pretrain.train.checkpoint.format import check_size, read_manifest

log = logging.getLogger(__name__)

LATEST_NAME = "latest"
ABANDONED_NAME = "abandoned"

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(partial|deleted)|\.latest\.\d+\.tmp|\.shared\.\w+")


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it gets its name."""
    return checkpoints / f".step_{step:08d}.partial"


def list_steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder or a link by their name, rising; whether these are complete is another question.

    Errors: CheckpointError where `checkpoints` is there and cannot be listed: it must not look like one without any.
    """
    if not os.path.lexists(checkpoints):
        return []
    try:
        names = os.listdir(checkpoints)
    except OSError as error:
        hint = f"; a link to {os.readlink(checkpoints)}: is that mounted?" if checkpoints.is_symlink() else ""
        raise CheckpointError(f"{checkpoints}: cannot be listed ({error}){hint}") from error
    matches = (_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def looks_complete(folder: Path) -> bool:
    """Whether the manifest is intact and every file has its size; the content is not read."""
    try:
        for name, record in read_manifest(folder).files.items():
            check_size(folder, name, record)
    except CheckpointError:
        return False
    return True


def publish(checkpoints: Path, step: int) -> None:
    """Gives a filled partial folder its name, durably, and points `latest` to it.

    The checkpoint is saved once it has its name: a `latest` that cannot be written afterwards is only warned about.
    """
    partial, folder = partial_folder(checkpoints, step), step_folder(checkpoints, step)
    sync_folder(partial)
    os.rename(partial, folder)
    try:
        sync_folder(checkpoints)
        point_latest(checkpoints, step)
    except OSError as error:
        log.warning("%s is saved, but %s could not be updated (%s)", folder, checkpoints / LATEST_NAME, error)


def point_latest(checkpoints: Path, step: int) -> None:
    """Makes `latest` name the step's folder."""
    write_text(checkpoints / LATEST_NAME, step_folder(checkpoints, step).name + "\n")


def remove(folder: Path) -> None:
    """Deletes a folder under another name, so that a kill in between leaves nothing that looks like a checkpoint."""
    hidden = folder.with_name("." + folder.name.strip(".").removesuffix(".partial") + ".deleted")
    if os.path.lexists(hidden):
        remove_tree(hidden)
    if folder.is_symlink():
        log.info("%s is a link: only the link is removed, and %s stays", folder, os.readlink(folder))
    os.rename(folder, hidden)
    remove_tree(hidden)


def remove_leftovers(checkpoints: Path) -> None:
    """Deletes what saves and deletions that were cut short have left."""
    for path in sorted(checkpoints.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            log.info("removing %s: a save or a deletion was cut short", path)
            remove_tree(path)


def remove_old(checkpoints: Path, newest: int, config: CheckpointConfig) -> None:
    """Deletes complete checkpoints that neither `keep_last` nor `keep_every_steps` keeps.

    `newest`, just saved, always stays, and so do folders that are not complete: they are left for a person to look at.
    """
    every = config.keep_every_steps
    complete = [s for s in list_steps(checkpoints) if s <= newest and looks_complete(step_folder(checkpoints, s))]
    for step in complete[: -config.keep_last]:
        if step != newest and (every is None or step % every):
            remove(step_folder(checkpoints, step))


def set_aside_after(checkpoints: Path, step: int) -> None:
    """Moves the folders of later steps to `abandoned/`, since a run that goes on from `step` will reach them anew.

    They are neither read nor deleted from then on. `latest` comes to name `step`, or goes with step 0.
    """
    if step:
        point_latest(checkpoints, step)
    else:
        (checkpoints / LATEST_NAME).unlink(missing_ok=True)
    abandoned = checkpoints / ABANDONED_NAME
    for later in reversed([s for s in list_steps(checkpoints) if s > step]):
        folder = step_folder(checkpoints, later)
        abandoned.mkdir(exist_ok=True)
        names = (folder.name + (f".{i}" if i else "") for i in range(1_000_000))
        target = next(abandoned / name for name in names if not os.path.lexists(abandoned / name))
        if folder.is_symlink():  # where it leads must not depend on where it is
            os.symlink(folder.parent.resolve() / os.readlink(folder), target)
            folder.unlink()
        else:
            shutil.move(folder, target)  # a rename, unless `abandoned` is a link to another disk
        log.warning("%s is later than step %d, from which the run goes on: moved to %s", folder, step, target)


def check_disk(
    checkpoints: Path, checkpoint_bytes: int, config: CheckpointConfig, start_step: int, last_step: int
) -> None:
    """ConfigError with numbers where the disk cannot hold the checkpoints that will exist at a time.

    These are `keep_last` and the one being written, less those that exist: complete, and not after `start_step`, since
    later ones are set aside and stay. Checkpoints kept for ever by `keep_every_steps` are only warned about: a person
    may move them away during the run.
    """
    existing = sum(s <= start_step and looks_complete(step_folder(checkpoints, s)) for s in list_steps(checkpoints))
    every = config.every_steps or last_step
    num_saves = -(-last_step // every) - start_step // every
    num_copies = min(num_saves, max(1, config.keep_last + 1 - existing))
    needed = num_copies * checkpoint_bytes
    place = next(path for path in (checkpoints, *checkpoints.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"run.dir: {place} has {size_text(free)} free, but {num_copies} more checkpoints of "
            f"{size_text(checkpoint_bytes)} need {size_text(needed)} (checkpoint.keep_last={config.keep_last} and one "
            f"being written; {existing} exist): free space, lower checkpoint.keep_last, or choose another run.dir"
        )
    if config.keep_every_steps is not None:
        num_kept = last_step // config.keep_every_steps - start_step // config.keep_every_steps
        if (total := needed + num_kept * checkpoint_bytes) > free:
            log.warning(
                "checkpoint.keep_every_steps=%d will keep %d checkpoints for ever; with the newest ones they need %s, "
                "and %s has %s free",
                config.keep_every_steps, num_kept, size_text(total), place, size_text(free),
            )  # fmt: skip
