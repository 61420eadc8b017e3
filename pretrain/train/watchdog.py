"""The hang detector: a run whose step does not end shows where every rank stands, and ends.

A hang on one rank soon holds all of them: the others wait for it in the step's collectives. Each rank therefore watches
itself. All began the step together, so all their limits pass together, and each shows its own threads, whether its main
thread sleeps, computes, reads data or waits in a collective. They stay for some seconds more, because the first process
to end makes the launcher kill the others. What only one rank does has no longer limit than a step: the others would end
the job before that rank has shown anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Self

from pretrain.config.schema import GuardsConfig
from pretrain.data.worker import SHOW_THREADS
from pretrain.errors import DistributedError
from pretrain.messages import error_prefix
from pretrain.processes import write_stderr
from pretrain.threads import VitalThread

POLL_SEC = 1.0
GRACE_SEC = 10.0
"""From showing the threads to the end of the process: by then the other ranks have shown theirs."""
STUCK_SEC = 20.0
"""How much later the C library's timer ends a process in which no Python thread can run any more."""


class Watchdog:
    """Ends the process (exit code 5) where what it was told to expect last does not end in time.

    A thread compares the clock with the limit. Where C code hangs without giving up Python's lock no thread can run; a
    timer of faulthandler, which needs no lock, then shows the threads and ends the process with 1.
    """

    def __init__(self, guards: GuardsConfig) -> None:
        self._guards = guards
        self._pending: tuple[float, str] | None = None
        self._closed = threading.Event()
        self._thread = VitalThread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        faulthandler.enable(file=2)  # crashes in C, and NCCL's abort at parallel.timeout_sec, show Python's stacks too
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def expect(self, what: str, limit: Literal["step_sec", "first_step_sec"] = "first_step_sec") -> None:
        """`what` begins now, in place of what was expected before, and has to end within guards.`limit`."""
        limit_sec: float | None = getattr(self._guards, limit)
        if limit_sec is None:
            self._pending = None
            faulthandler.cancel_dump_traceback_later()
        else:
            text = f"{what} has taken longer than guards.{limit}={limit_sec:g} s"
            self._pending = (time.monotonic() + limit_sec, text)
            faulthandler.dump_traceback_later(limit_sec + GRACE_SEC + STUCK_SEC, exit=True, file=2)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SEC):
            pending = self._pending
            if pending is not None and time.monotonic() > pending[0]:
                _end(pending[1])


def _end(text: str) -> None:
    """Shows `text` and all threads, here and in the loader's processes, and ends the process.

    Straight to stderr, in one write: the main thread may hold any lock, of logging too.
    """
    who = error_prefix()
    lines = [f"{who}: {text}. This rank's threads, innermost call first:", *_threads()]
    write_stderr("\n".join([*lines, ""]))
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid or 0, SHOW_THREADS)
    time.sleep(GRACE_SEC)
    write_stderr(f"{who}: ending with exit code {DistributedError.exit_code}; the last checkpoint is kept\n")
    os._exit(DistributedError.exit_code)


def _threads() -> Iterator[str]:
    """The calls of every thread but this one, the main thread's first. Reads no file: its file system may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == own:
            continue
        yield f"thread {names.get(ident, 'of a library')}:"  # autograd's are C++ threads
        for inner, line in traceback.walk_stack(frame):
            yield f'  File "{inner.f_code.co_filename}", line {line} in {inner.f_code.co_qualname}'
