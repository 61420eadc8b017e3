"""Threads that a process cannot do without: where one fails, the process ends instead of going on without it."""

from __future__ import annotations

import os
import threading
import traceback
from typing import NoReturn

from pretrain.messages import error_prefix
from pretrain.processes import write_stderr

EXIT_CODE = 1


class VitalThread(threading.Thread):
    """A thread whose exception ends the process with exit code 1, for it is a bug.

    Python itself only prints such an exception: a watchdog or a reader of signals would be missing without a word.
    """

    def run(self) -> None:
        """What the thread does, called in it by `start`."""
        try:
            super().run()
        except BaseException:
            end_process(f"thread {self.name} failed: {traceback.format_exc()}")


def end_process(text: str) -> NoReturn:
    """Says why and ends the process at once, from any thread. One write to stderr: another thread may hold any lock."""
    write_stderr(f"{error_prefix()}: {text.rstrip()}\n")
    os._exit(EXIT_CODE)
