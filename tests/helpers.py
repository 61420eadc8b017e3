"""Helpers of the tests: processes that form a world on 127.0.0.1, ended by their own process groups."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

_BOOTSTRAP = """
import importlib, json, pathlib, sys
module, function, arguments, result = sys.argv[1:]
value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
pathlib.Path(result).write_text(json.dumps(value))
"""


def exit_code_of(main: Callable[[list[str]], int], *arguments: object) -> int:
    """What a command that runs in this process ends with, also where argparse ends it."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_processes(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kills the processes that still run, each with its children (they were started in sessions of their own)."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_ranks(world: int, target: str, *, timeout_sec: float = 240.0, **arguments: Any) -> list[Any]:
    """What `target` ("module:function") returned in each of `world` processes that form one world; JSON both ways.

    The function gets `arguments` and finds RANK, WORLD_SIZE, ... in its environment. Raises AssertionError, with every
    failed rank's output, if a process fails or the time is up; no process outlives the call.
    """
    module, function = target.split(":")
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.json" for rank in range(world)]
        logs = [path.with_suffix(".log") for path in results]
        shared = {"WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared |= {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
        processes = []
        for rank in range(world):
            own = {str(k): str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            command = [sys.executable, "-c", _BOOTSTRAP, module, function, json.dumps(arguments), str(results[rank])]
            with logs[rank].open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=REPOSITORY,
                        env=os.environ | own,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            _wait(processes, timeout_sec)
        finally:
            end_processes(processes)
        codes = [process.returncode for process in processes]
        if any(codes):
            outputs = (f"--- rank {r}, exit code {codes[r]}\n{logs[r].read_text()[-6000:]}" for r in range(world))
            raise AssertionError(f"{target} failed with exit codes {codes}\n" + "\n".join(outputs))
        return [json.loads(path.read_text()) for path in results]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_sec: float) -> None:
    """Returns when all have ended, one has failed (the others would wait for it), or the time is up."""
    deadline = time.monotonic() + timeout_sec
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


@contextlib.contextmanager
def mounted_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of `size` (as mount writes it) at the new folder `path`; skips the test where only root may."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
