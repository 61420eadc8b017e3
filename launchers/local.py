"""A run on this machine: one process per task, watched as SLURM would: the first that fails ends the others."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launchers.ending import describe
from launchers.requeue import reason_to_stay_away
from pretrain.errors import STOPPED_EXIT_CODE
from pretrain.processes import Children

MAIN = Path(__file__).resolve().parents[1] / "pretrain" / "main.py"
POLL_SEC = 0.1


class LocalRun:
    """`tasks` processes of pretrain/main.py that form one world, started anew up to `max_requeues` times."""

    def __init__(
        self, arguments: Sequence[str], tasks: int, *, max_requeues: int, port: int | None, say: Callable[[str], None]
    ) -> None:
        self._command = [sys.executable, str(MAIN), *arguments]
        self._tasks, self._max_requeues, self._port, self._say = tasks, max_requeues, port, say
        self._children = Children()

    @property
    def asked_to_stop(self) -> bool:
        """Whether a signal has come that asks the run to save and stop."""
        return self._children.asked_to_stop

    def run(self) -> int:
        """The exit code of the first process that ended otherwise than with 0; 0 if all did their work.

        What asks this process to stop is handed to every process; they save, and no new start follows. They do so too
        where this process is killed.
        """
        with self._children:
            for restarts in range(self._max_requeues + 1):
                exit_code = self._run_once()
                if exit_code == 0 or self.asked_to_stop:
                    break
                reason = reason_to_stay_away(exit_code, restarts, self._max_requeues)
                self._say(f"started again ({restarts + 1} of {self._max_requeues})" if reason is None else reason)
                if reason is not None:
                    break
        return exit_code

    def _run_once(self) -> int:
        port = _free_port() if self._port is None else self._port
        tasks, threads = str(self._tasks), max(1, (os.cpu_count() or 1) // self._tasks)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        environment |= {"WORLD_SIZE": tasks, "LOCAL_WORLD_SIZE": tasks, "LOCAL_SIZE": tasks}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            for rank in range(self._tasks):
                self._children.start(self._command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            return self._watch()
        finally:
            self._children.end()

    def _watch(self) -> int:
        """Returns at the first failure, or when all have ended."""
        while True:
            codes = [process.poll() for process in self._children.processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0, STOPPED_EXIT_CODE):
                    exit_code = 128 - code if code < 0 else code
                    self._say(f"rank {rank} ({socket.gethostname()}) {describe(exit_code)}; the others are ended")
                    return exit_code
            if None not in codes:
                return max(code or 0 for code in codes)
            time.sleep(POLL_SEC)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
