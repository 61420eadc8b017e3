"""One folder, one process: refusals that name the holder, deaths, other machines, file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pretrain import folder_lock
from pretrain.errors import CheckpointError
from pretrain.folder_lock import LEASE_NAME, LOCK_NAME, FolderLock
from tests.helpers import REPOSITORY, end_processes

HOLD = """
import os, sys, time
from pathlib import Path
from pretrain.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
if "fork" in sys.argv:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of `folder`."""
    environment = os.environ | {"SLURM_JOB_ID": "4711"}
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *options], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        end_processes([child])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "KERNEL_SEC", 0.2)


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    """As on Lustre mounted without flock."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_the_second_is_told_who_holds_it_by_whatever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "a"
    with holder(folder) as other:
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        (tmp_path / "link").symlink_to(folder)
        (tmp_path / "runs2").symlink_to(tmp_path / "runs")
        monkeypatch.chdir(tmp_path / "runs")
        for name in (folder, Path("a"), Path("../link"), tmp_path / "runs2" / "a", tmp_path / "runs2/../runs/a"):
            with pytest.raises(CheckpointError) as refused:
                FolderLock(name).take()
            expected = rf"in use by process {other.pid} on \S+, SLURM job 4711, since 20\d\d-\d\d-\d\dT[\d:]+[+-]"
            assert re.search(expected, str(refused.value)) and str(refused.value).startswith(f"{name}: ")
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert json.loads((folder / LOCK_NAME).read_text())["pid"] == other.pid
    with FolderLock(folder):
        assert json.loads((folder / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("fork",)], ids=["alone", "with_a_child_that_lives_on"])
def test_death_frees_it_at_once(options: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holder(tmp_path, *options) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with FolderLock(tmp_path):
            pass
    assert not caplog.messages, "there was nothing to wait for"


def test_a_folder_that_is_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()
    with FolderLock(tmp_path / "out"):
        (tmp_path / "out" / "result").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["result"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="the folder cannot be locked: "):
        FolderLock(tmp_path / "file").take()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_kernel_locks_the_lease_protects(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "LEASE_SEC", 1.0)
    without_kernel_locks(monkeypatch, number)
    with FolderLock(tmp_path), pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on "):
        FolderLock(tmp_path).take()
    with FolderLock(tmp_path):
        pass


def of_another_machine(folder: Path) -> None:
    """What a process of another machine leaves."""
    marker = f"filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=abc\nduration={folder_lock.LEASE_SEC!r}\nstart=5\n"
    (folder / LEASE_NAME).write_text(marker)
    (folder / LOCK_NAME).write_text('{"host": "elsewhere", "pid": 1, "job": "81_3", "since": "2026-01-01T00:00:00"}')


@pytest.mark.parametrize("kernel_locks", [True, False], ids=["of_this_machine_only", "none"])
def test_a_holder_on_another_machine_is_known_by_its_touches(
    kernel_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_lock, "LEASE_SEC", 1.0)
    if not kernel_locks:
        without_kernel_locks(monkeypatch)
    of_another_machine(tmp_path)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(0.1):
            os.utime(tmp_path / LEASE_NAME)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by process 1 on elsewhere, SLURM job 81_3, since 2026"):
            FolderLock(tmp_path).take()
    finally:
        over.set()
        thread.join()
    assert "elsewhere" in (tmp_path / LOCK_NAME).read_text(), "its words are left alone"
    with FolderLock(tmp_path) as lock:
        lock.check()
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert sum("waiting up to 1 s to see whether it lives" in text for text in caplog.messages) == 2


def test_a_lock_that_is_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "LEASE_SEC", 0.6)
    with FolderLock(tmp_path) as lock:
        (tmp_path / LEASE_NAME).unlink()
        of_another_machine(tmp_path)
        deadline = time.monotonic() + 30
        with pytest.raises(CheckpointError, match=r"owner-changed\); lock.json names process 1 on elsewhere"):
            while time.monotonic() < deadline:
                lock.check()
                time.sleep(0.05)
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_NAME, LEASE_NAME}, "they are the other's"
