"""Faults for the guards; as tests/train/patches.py, with particulars from the environment."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain import folder_lock
from pretrain.data.dataset import RowDataset
from pretrain.data.node import SHARED_MEMORY
from pretrain.model import objective
from pretrain.train import watchdog
from pretrain.train.checkpoint import writer
from pretrain.train.signals import StopSignals
from pretrain.train.step import StepReport, StepRunner
from pretrain.train.trainer import Trainer
from tests.train.patches import before_step


def fail() -> None:
    raise ValueError("a fault of the test")


def scale_losses() -> None:
    """Multiplies the loss by FACTOR in STEPS (JSON) on FAULTY_RANK, or everywhere; fails before CRASH_STEP; at the end
    every rank says what its weights are.
    """
    factor, steps = float(os.environ["FACTOR"]), json.loads(os.environ["STEPS"])
    affected = os.environ.get("FAULTY_RANK", os.environ["RANK"]) == os.environ["RANK"]
    step = 0
    run, head_sums, fit = StepRunner.run, objective.head_sums, Trainer.fit

    def noted(self: StepRunner, number: int, *args: Any, **kwargs: Any) -> StepReport:
        nonlocal step
        step = number + 1
        return run(self, number, *args, **kwargs)

    def scaled(*args: Any) -> Any:
        sums = head_sums(*args)
        return sums._replace(cross_entropy=sums.cross_entropy * factor) if affected and step in steps else sums

    def told(self: Trainer) -> None:
        try:
            fit(self)
        finally:
            weights = b"".join(p.detach().numpy().tobytes() for p in self.engine.module.parameters())
            print(f"weights {zlib.crc32(weights):08x}")

    StepRunner.run, objective.head_sums, Trainer.fit = noted, scaled, told  # type: ignore[method-assign]
    if "CRASH_STEP" in os.environ:
        before_step(int(os.environ["CRASH_STEP"]), fail)


def hang() -> None:
    """Rank 1 hangs in step 3, in the way that HANG names; watchdogs are quick."""
    watchdog.POLL_SEC, watchdog.GRACE_SEC, watchdog.STUCK_SEC = 0.1, 1.0, 1.0
    how = os.environ["HANG"]
    if how == "loader":
        _hang_in_row(9)  # of 4 a step
    else:
        before_step(3, {"python": _sleep, "collective": dist.barrier, "lock": _sleep_with_the_lock}[how], rank=1)


def _sleep() -> None:
    time.sleep(3_600)


def _sleep_with_the_lock() -> None:
    """As in a C extension that does not release Python's lock."""
    ctypes.PyDLL(None).sleep(3_600)


def _hang_in_row(number: int) -> None:
    read, rows = RowDataset.get_item, 0

    def get_item(self: RowDataset, *args: Any) -> Any:
        nonlocal rows
        rows += 1
        if rows == number and os.environ["RANK"] == "1":
            _sleep()
        return read(self, *args)

    RowDataset.get_item = get_item  # type: ignore[method-assign]


def send_signal() -> None:
    """Every rank, or FAULTY_RANK alone, gets SIGNAL, in the middle of step 3 or (WHEN=save) of the first save."""
    if os.environ.get("FAULTY_RANK", os.environ["RANK"]) != os.environ["RANK"]:
        return

    def send() -> None:
        os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])
        time.sleep(0.3)  # until the thread that reads signals has seen it

    if os.environ["WHEN"] == "step":
        before_step(3, send, rank=int(os.environ["RANK"]))
        return
    write, sent = writer.write_tensors, False

    def write_tensors(*args: Any) -> Any:
        nonlocal sent
        if not sent:
            sent = True
            send()
        return write(*args)

    writer.write_tensors = write_tensors


def full_disk() -> None:
    """The first FAILURES writes of rank 1 fail, and all take a moment."""
    write, failures = writer.write_tensors, int(os.environ["FAILURES"])

    def write_tensors(path: Path, *args: Any) -> Any:
        nonlocal failures
        time.sleep(0.3)
        if failures and os.environ["RANK"] == "1":
            failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *args)

    writer.write_tensors = write_tensors


def lose_the_folder_in_step_3() -> None:
    """As a process that stood still for so long that one on another machine has taken the folder."""
    folder_lock.LEASE_SEC = 0.6

    def lose() -> None:
        lease = Path(os.environ["FOLDER"]) / folder_lock.LEASE_NAME
        lease.unlink()
        lease.write_text("filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=abc\nduration=0.6\nstart=5\n")
        lease.with_name(folder_lock.LOCK_NAME).write_text(
            '{"host": "elsewhere", "pid": 1, "job": null, "since": "2026-01-01T00:00:00"}'
        )
        time.sleep(3)

    before_step(3, lose)


def die_in_step_3() -> None:
    """Rank 1, as by the kernel where memory runs out."""
    before_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)


def die_after() -> None:
    """FAULTY_RANK, or (VICTIM=loader) a loader process of it, is killed SEC seconds after its start."""
    if os.environ["FAULTY_RANK"] != os.environ["RANK"]:
        return

    def kill() -> None:
        victim = os.getpid()
        if os.environ["VICTIM"] == "loader":
            while not (children := multiprocessing.active_children()):
                time.sleep(0.001)
            victim = children[0].pid or 0
        os.kill(victim, signal.SIGKILL)

    timer = threading.Timer(float(os.environ["SEC"]), kill)
    timer.daemon = True
    timer.start()


def die_in() -> None:
    """Rank 1 is killed where it calls the function that WHERE names (module:name, or module:class.name)."""
    if os.environ["RANK"] != "1":
        return
    module, name = os.environ["WHERE"].split(":")
    holder: Any = importlib.import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        holder = getattr(holder, part)
    setattr(holder, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))


def kill_a_loader_process_in_step_3() -> None:
    """Of rank 1, in the middle of the step: Python code runs, and a collective waits."""

    def kill() -> None:
        child = multiprocessing.active_children()[0].pid or 0
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        sum(range(100_000))  # where a handler of SIGCHLD would be called

    before_step(3, kill, rank=1)


def fail_in_thread() -> None:
    """The thread of rank 0 that WHERE names ("signals" or "watchdog") fails as soon as it starts."""
    threads: dict[str, tuple[Any, str]] = {"signals": (StopSignals, "_read"), "watchdog": (watchdog.Watchdog, "_watch")}
    if os.environ["RANK"] == "0":
        setattr(*threads[os.environ["WHERE"]], lambda *args: fail())


def little_shared_memory() -> None:
    """Free on this machine, as it seems to the run's start: 30 KiB."""
    usage = shutil.disk_usage

    def little(path: Any) -> Any:
        found = usage(path)
        return found._replace(free=30 << 10) if path == SHARED_MEMORY else found

    shutil.disk_usage = little


def own_shared_memory() -> None:
    """A tmpfs of SIZE on /dev/shm that only this process and its children see; from step 3 on others fill it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private_and_recursive = 0x20000, 0x44000  # CLONE_NEWNS; MS_PRIVATE | MS_REC
    assert libc.unshare(new_namespace) == 0 and libc.mount(b"none", b"/", None, private_and_recursive, None) == 0
    options = f"size={os.environ['SIZE']}".encode()
    assert libc.mount(b"tmpfs", str(SHARED_MEMORY).encode(), b"tmpfs", 0, options) == 0

    def fill() -> None:
        with (SHARED_MEMORY / "filling").open("wb", buffering=0) as file:
            while True:
                with contextlib.suppress(OSError):
                    file.write(bytes(4096))

    before_step(3, threading.Thread(target=fill, daemon=True).start)
