"""Signals that ask a run to stop: the first one is remembered for the trainer, a second TERM or INT ends the process.

Python runs signal handlers in the main thread, between two bytecodes: not while that waits in a collective for a rank
that is gone. So the signals are read from a pipe by a thread of their own.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType

from pretrain.processes import STOPPING, stopping_signals, write_stderr
from pretrain.threads import VitalThread

ENDING = (signal.SIGTERM, signal.SIGINT)
ECHO_SEC = 1.0
"""A repetition within this time is the same request: at a time limit SLURM sends TERM itself and through srun, measured
up to 0.1 s apart."""

log = logging.getLogger(__name__)


class StopSignals:
    """The process's requests to stop. One per process, from the main thread."""

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._last_at: dict[int, float] = {}

    def install(self) -> None:
        """From here on STOPPING signals ask the run to stop, instead of ending the process. An ignored HUP stays so."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        for number in stopping_signals():
            signal.signal(number, _leave_to_thread)
            signal.siginterrupt(number, False)  # C libraries need not expect interrupted system calls
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        VitalThread(target=self._read, args=(reader,), name="stop-signals", daemon=True).start()

    def stop_requested(self) -> str | None:
        """The first signal in words; None if there was none."""
        return None if self._first is None else f"{self._first.name} received"

    def _read(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in STOPPING:
                    self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        before, self._last_at[number] = self._last_at.get(number), now
        if self._first is None:
            self._first = number
            log.warning("%s received: the run saves and stops after this step", number.name)
        elif number in ENDING and before is not None and now - before >= ECHO_SEC:
            write_stderr(f"{number.name} received again: ending at once\n")
            os._exit(128 + number)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Python writes the number into the pipe before it calls this."""
