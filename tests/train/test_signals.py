"""Signals of a process that polls for them, and of one that hangs in C as a rank does when a peer is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pretrain.train.signals import ECHO_SEC, STOPPING
from tests.helpers import REPOSITORY, end_processes

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
