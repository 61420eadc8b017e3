"""One folder, one process that changes it: whoever comes second is told who works there, and touches nothing.

Two locks together, since each alone has a gap. `lock.json` is locked by the kernel (flock): it is free the moment its
process is gone, by whatever signal, but some network file systems keep such locks within one machine, or have none.
`lock.lease` is a file that exists while the folder is in use and that its process touches every LEASE_SEC / 3 seconds:
it works on every file system and on all machines, but outlives a process that is killed. Such a one is taken over at
once where the process is known to be dead, which takes the same machine and the same space of process ids (containers
may share a host's name); elsewhere after LEASE_SEC without a touch, by the clock of the one who waits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, SoftFileLease, Timeout

from pretrain.errors import CheckpointError
from pretrain.files import failure_text

log = logging.getLogger(__name__)

LOCK_NAME, LEASE_NAME = "lock.json", "lock.lease"
LEASE_SEC = 30.0
KERNEL_SEC = 5.0
"""A process that is being killed lets go once its memory is freed, which takes a moment where there is much of it."""
_NO_KERNEL_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderLock:
    """The right of this process to change `folder`, which is made where it is absent. A context, for the main thread.

    Errors: CheckpointError that names who holds it, or why the folder takes no lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / LOCK_NAME
        self._kernel = FileLock(self._path, timeout=KERNEL_SEC, thread_local=False, fallback_to_soft=False)
        self._lease = SoftFileLease(folder / LEASE_NAME, lease_duration=LEASE_SEC, thread_local=False)
        self._made = False

    def take(self) -> None:
        """Takes the lock, or raises."""
        try:
            self._made = not self.folder.exists()
            self._take()
        except OSError as error:  # Timeout is one
            holder = self._holder()
            self.close()
            if isinstance(error, Timeout):
                raise CheckpointError(
                    f"{self.folder}: in use by {holder}: wait for its end, stop it, or choose another folder"
                ) from None
            raise CheckpointError(f"the folder cannot be locked: {failure_text(self._path, error)}") from error

    def check(self) -> None:
        """Raises CheckpointError where the lock was lost: a process that stood still for LEASE_SEC may be replaced."""
        if (lost := self._lease.compromise) is not None:
            raise CheckpointError(
                f"{self.folder}: no longer this process's alone ({LEASE_NAME}: {lost.reason}); {LOCK_NAME} names "
                f"{self._holder()}. Nothing more is written there"
            )

    def close(self) -> None:
        """Lets go of what was taken, and leaves no trace of it."""
        lost = self._lease.compromise is not None
        if self._lease.is_locked:
            if not lost:
                self._path.unlink(missing_ok=True)  # before others can have it
            self._lease.release()
        self._kernel.release()
        if self._made:
            with contextlib.suppress(OSError):  # it holds something by now
                self.folder.rmdir()

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> None:
        try:
            self._kernel.acquire()
        except OSError as error:
            if error.errno not in _NO_KERNEL_LOCKS:
                raise
            log.info("%s: no locks of the kernel (%s): %s alone protects the folder", self.folder, error, LEASE_NAME)
        try:
            self._lease.acquire(timeout=0)
        except Timeout:
            log.warning(
                "%s: in use by %s, or left by it without an end: waiting up to %.0f s to see whether it lives",
                self.folder, self._holder(), LEASE_SEC,
            )  # fmt: skip
            self._lease.acquire(timeout=LEASE_SEC + self._lease.poll_interval + KERNEL_SEC)
        self._path.write_text(json.dumps(_self()) + "\n", encoding="utf-8")

    def _holder(self) -> str:
        """Who holds the lock, in words."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            job = f", SLURM job {found['job']}" if found["job"] else ""
            return f"process {found['pid']} on {found['host']}{job}, since {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "a process that has not said yet who it is"


def _self() -> dict[str, str | int | None]:
    """What lock.json says. The keys are read by people and by `_holder`."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": since}
