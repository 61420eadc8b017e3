"""Signals of a process that polls for them, of one that hangs in C as a rank does when a peer is gone, and of runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrain.errors import STOPPED_EXIT_CODE
from pretrain.processes import STOPPING
from pretrain.train.signals import ECHO_SEC
from tests.helpers import REPOSITORY, end_processes
from tests.train.forked import train

POLLS = """
import sys, time
from pretrain.train.signals import StopSignals
signals = StopSignals()
signals.install()
print("ready", flush=True)
while (reason := signals.stop_requested()) is None:
    time.sleep(0.01)
print(reason, flush=True)
if sys.argv[1] == "leave":
    sys.exit(85)
import ctypes
mutex = (ctypes.c_byte * 64)()  # all zero: a new pthread mutex
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@contextmanager
def process(then: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a request to stop and then does as told."""
    child = subprocess.Popen(
        [sys.executable, "-c", POLLS, then], cwd=REPOSITORY, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        yield child
    finally:
        end_processes([child])


@pytest.mark.parametrize("number", STOPPING)
def test_each_signal_asks_to_stop(number: signal.Signals) -> None:
    with process("leave") as child:
        child.send_signal(number)
        output, errors = child.communicate(timeout=30)
    assert (output.decode(), child.returncode) == (f"{number.name} received\n", 85)
    assert f"{number.name} received: the run saves and stops" in errors.decode()


def test_a_second_term_ends_a_process_that_hangs_in_c() -> None:
    with process("hang") as child:
        child.send_signal(signal.SIGTERM)
        assert child.stdout is not None and child.stdout.readline() == b"SIGTERM received\n"
        time.sleep(ECHO_SEC)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    assert "SIGTERM received again: ending at once" in errors.decode()


def test_what_is_no_second_request_leaves_the_process_alone() -> None:
    """SLURM sends TERM twice in a row at a time limit, and USR2 some time before."""
    with process("hang") as child:
        child.send_signal(signal.SIGUSR2)
        assert child.stdout is not None and child.stdout.readline() == b"SIGUSR2 received\n"
        time.sleep(ECHO_SEC)
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
            child.send_signal(number)
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1.0)


RANKS = {"one": {"FAULTY_RANK": "1"}, "all": {}}


@pytest.mark.parametrize(
    ("name", "when", "who"),
    [
        ("SIGTERM", "step", "one"),
        ("SIGUSR2", "save", "all"),
        ("SIGHUP", "step", "all"),
        pytest.param("SIGINT", "step", "all", marks=pytest.mark.slow),
        pytest.param("SIGUSR1", "step", "one", marks=pytest.mark.slow),
        pytest.param("SIGTERM", "save", "one", marks=pytest.mark.slow),
        pytest.param("SIGUSR2", "save", "one", marks=pytest.mark.slow),
    ],
)
def test_a_run_saves_once_and_stops(name: str, when: str, who: str, config: Path, tmp_path: Path) -> None:
    """In step 3, or while step 2 is being saved: both ranks end after step 3, which is saved once."""
    every = "2" if when == "save" else "null"
    settings = (f"checkpoint.every_steps={every}", "validation.every_steps=null", "data.num_workers=1")
    patch = "tests.train.guard_patches:send_signal"
    run = train(config, tmp_path / "run", *settings, world=2, patch=patch, SIGNAL=name, WHEN=when, **RANKS[who])
    assert run.codes == [STOPPED_EXIT_CODE] * 2, run.outputs
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    assert saved == (["step_00000002"] if when == "save" else []) + ["step_00000003"]
    assert run.log.count("checkpoint of step 3: ") == 1 and "stopped after step 3 of 8" in run.log
    reason = f"({name} received)" if who == "all" else "(asked for by another rank)"
    assert reason in run.log
