"""A run's private place on a node: names of shared memory, locks and files that no other run, live or dead, can meet.

streaming numbers its shared memory from 0 and takes the first number that looks free. A killed run's leftovers, two
runs that start together, or two nodes of one machine then collide. Here each start draws its own number, and a folder
beside the shared memory tells live runs from dead ones: every process holds a shared lock on a file in it, which the
kernel drops when the last one dies, by whatever signal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import streaming.base.dataset as streaming_dataset
from streaming.base.constant import LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory
from streaming.base.world import World

from pretrain.data.place import DataPlace, Node
from pretrain.errors import ConfigError, DataError, DistributedError

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
ALIVE = "alive.lock"
CACHE_LOCK = ".looped-pretrain.lock"
CACHE_WAIT_SEC = 10.0
"""The loader processes of a killed run hold its locks until the kernel has ended them too."""


class NodeFolder:
    """The folder `path`, shared by the run's processes on this node, and the number `prefix` of its shared memory.

    Building it is collective over all processes. It first removes what dead runs of the same user left on the node.
    """

    def __init__(self, place: DataPlace, node: Node) -> None:
        token = place.gather(secrets.randbits(40))[0]
        self.prefix = token * node.count + node.index
        self._root = SHARED_MEMORY / f"looped-pretrain-{os.getuid()}"
        self.path = self._root / str(self.prefix)
        self._node = node
        self._held: list[_Lock] = []
        place.on_leaders(self._create, node.is_leader)
        if not node.is_leader:
            self._join()

    def lock_cache(self, folder: Path) -> None:
        """Makes this run the only one on the node that fills `folder`; DataError if another one keeps it.

        To be called by the node's leader. streaming's bookkeeping of downloads and evictions covers one run only.
        """
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + CACHE_WAIT_SEC
        while True:
            try:
                self._held.append(_Lock(folder / CACHE_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB))
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{folder}: another run (or another node, if the folder is shared) uses this cache of remote "
                        "shards; give each its own folder as data.sources[].path"
                    ) from None
            time.sleep(0.2)

    @contextlib.contextmanager
    def streaming_world(self) -> Iterator[None]:
        """While a StreamingDataset is built: it takes this node for the world, and `prefix` for its shared memory.

        streaming reads RANK, WORLD_SIZE and LOCAL_WORLD_SIZE to elect the process that fetches indexes and fills the
        shared memory; the deepspeed launcher does not set the last one. Ranks of other nodes do not matter to it,
        since rows are assigned by `rank_positions`.
        """
        node = self._node
        own = {"RANK": node.rank_of_node, "LOCAL_RANK": node.rank_of_node}
        own |= {"WORLD_SIZE": node.ranks_of_node, "LOCAL_WORLD_SIZE": node.ranks_of_node}
        before = {name: os.environ.get(name) for name in own}
        find_prefix = streaming_dataset.get_shm_prefix
        try:
            os.environ.update({name: str(value) for name, value in own.items()})
            streaming_dataset.get_shm_prefix = self._prefix
            yield
        finally:
            streaming_dataset.get_shm_prefix = find_prefix
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """Lets go of the locks; the last process of the node removes the folder."""
        for lock in self._held:
            lock.release()
        self._held.clear()
        if self._root.is_dir():
            _require_private(self._root)
            with _Lock(self._root / "lock", fcntl.LOCK_EX):
                _remove_if_dead(self.path)

    def _create(self) -> None:
        if not SHARED_MEMORY.is_dir():
            raise ConfigError(f"{SHARED_MEMORY}: expected the shared memory of this machine; mount a tmpfs there")
        with contextlib.suppress(FileExistsError):
            self._root.mkdir(mode=0o700)
        _require_private(self._root)
        with _Lock(self._root / "lock", fcntl.LOCK_EX):
            for folder in self._root.iterdir():
                _remove_if_dead(folder)
            self.path.mkdir(mode=0o700)
            self._held.append(_Lock(self.path / ALIVE, fcntl.LOCK_SH))

    def _join(self) -> None:
        try:
            self._held.append(_Lock(self.path / ALIVE, fcntl.LOCK_SH, create=False))
        except FileNotFoundError as error:
            raise DistributedError(
                f"{self.path}: gone, as where the first process of this node has ended; its own error tells why"
            ) from error

    def _prefix(
        self, streams_local: list[str], streams_remote: list[str | None], world: World, retry: int = 100
    ) -> tuple[int, SharedMemory]:
        """Stands in for streaming's `get_shm_prefix`; the memory it returns only has to exist."""
        return self.prefix, SharedMemory(name=f"{self.prefix:06}_{LOCALS}", size=8)


class _Lock:
    """A lock on a file, held until `release`; forked children hold it too, until they end.

    Errors: DataError where `path` is a link, FileNotFoundError where it is missing and `create` is false.
    """

    def __init__(self, path: Path, operation: int, *, create: bool = True) -> None:
        try:
            # Who may write to the folder could have put a link here, to a file that is not to be touched.
            self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DataError(f"{path}: is a link, expected a file of this project; remove it") from error
            raise
        try:
            fcntl.flock(self._file, operation)
        except BaseException:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Gives the lock up, unless a child holds it too."""
        os.close(self._file)

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _require_private(folder: Path) -> None:
    """DataError unless `folder` is a folder of this user's in which no other user can put anything.

    Its name is known to everybody, and everybody may write beside it.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise DataError(f"{folder}: is a link, expected a folder of this user's; remove it")
    if found.st_uid != os.getuid():
        raise DataError(f"{folder}: belongs to another user, who must remove it")
    if not stat.S_ISDIR(found.st_mode):
        raise DataError(f"{folder}: is a file, expected a folder; remove it")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise DataError(
            f"{folder}: has mode {mode:04o}, expected 0700, so that no other user can change what is in it; where "
            f"nobody has, chmod 700 {folder}, else remove it"
        )


def _remove_if_dead(folder: Path) -> None:
    """Removes a run's folder and shared memory if no process of it is left. The caller holds the root's lock.

    What holds no lock file is not a run's folder, and is left alone.
    """
    if not folder.name.isdecimal() or folder.is_symlink():
        return
    try:
        lock = _Lock(folder / ALIVE, fcntl.LOCK_EX | fcntl.LOCK_NB, create=False)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError, DataError):
        return
    with lock:
        for name in SHM_TO_CLEAN:
            segment = SHARED_MEMORY / f"{int(folder.name):06}_{name}"
            if segment.is_file() and not segment.is_symlink() and segment.stat().st_uid == os.getuid():
                logger.info("removing %s, left by a run that has ended", segment)
                segment.unlink(missing_ok=True)
        shutil.rmtree(folder)
