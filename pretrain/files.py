"""Whole files or none: what a resume depends on is written so that a kill leaves the old content or the new."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pretrain.errors import ConfigError


def require_writable(folder: Path, setting: str) -> None:
    """Raises ConfigError unless `folder` can be written, or made; `setting` says where its name comes from."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: expected a folder that can be written; {existing} cannot")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` by temporary file, fsync and rename; the folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Deletes a folder with all that is in it, or a file; of a link the link alone, never what it leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_text(num_bytes: int) -> str:
    """A size for people, in MiB or GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def failure_text(path: Path, error: Exception) -> str:
    """Why `path` could not be written, with the space that is left there."""
    if not path.parent.is_dir():
        return f"{path}: {error} (its folder is gone)"
    return f"{path}: {error} ({size_text(shutil.disk_usage(path.parent).free)} free)"
