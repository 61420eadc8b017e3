"""How processes end: which signals ask for it, and children that do not outlive the process that started them.

    python -m pretrain.processes COMMAND ...    # becomes COMMAND, which ends when the process that called it is gone

Standard library only, since launchers use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""What asks a run to save and stop: schedulers (TERM, USR1, USR2), Ctrl-C, a closing terminal, a limit of CPU time."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def stopping_signals() -> tuple[signal.Signals, ...]:
    """STOPPING without HUP where that is ignored: whoever started this process by nohup wants it to go on."""
    return tuple(n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Has the kernel send `number` to this process when its parent, process `parent`, is gone, by whatever signal.

    It holds across exec, and not for children of this process. The process ends here if the parent is gone already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(128 + number)


def write_stderr(text: str) -> None:
    """Writes to stderr at once, past Python's locks and buffers; a console that is gone is no error."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def start_resource_tracker() -> None:
    """Starts multiprocessing's process that frees shared memory, deaf to the signals that a whole job or terminal gets.

    It must outlive the others to do its work.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # inherited; here they wait
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Children:
    """Child processes that get what asks this process to stop, and end when it does. From the main thread.

    While the context is open, STOPPING signals to this process go to the children instead. At its end those that still
    run are killed. If this process itself is killed, they get TERM from the kernel: a run then saves and stops.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[Any]] = []
        self.asked_to_stop = False
        """Whether a signal has come."""
        self._before: dict[signal.Signals, Any] = {}

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a child; `options` are those of subprocess.Popen."""
        parent = os.getpid()
        # A session of its own: what a terminal sends to all of its processes comes once, from `_forward`.
        child = subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM), **options
        )
        self.processes.append(child)
        if self.asked_to_stop:  # between two children
            child.terminate()
        return child

    def end(self) -> None:
        """Kills the children that still run."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._forward) for number in stopping_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        _restore(self._before)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop = True
        for process in self.processes:
            process.send_signal(number)


def run(command: Sequence[str], **options: Any) -> int:
    """Exit code of a child as in `Children`; 128 + N where signal N ended it, as shells write it."""
    with Children() as children:
        code = children.start(command, **options).wait()
    return code if code >= 0 else 128 - code


def end_on_signals() -> None:
    """From here on STOPPING signals end this process as an exception does, so that it can clean up. Main thread."""
    for number in stopping_signals():
        signal.signal(number, _exit)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # one of C code, which Python cannot put back
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    end_with_parent(os.getppid(), signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])
