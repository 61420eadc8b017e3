"""Runs of pretrain/main.py in forked processes: torch, DeepSpeed and megatron-core are imported once, by a fork server.

A run's ranks form a world on 127.0.0.1. Each is a process of its own with fresh state, so runs cannot disturb each
other, and exit codes and messages are the real ones.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing.forkserver
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.train.metrics import read_metrics
from tests.helpers import free_port

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
_PRELOAD = f"{__package__}.preload"
_server = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Run:
    """What a run has left: of each rank the exit code, stdout and stderr; its folder as it was at the end."""

    codes: list[int | None]
    outputs: list[str]
    folder: Path
    rows: list[dict[str, Any]]
    """metrics.jsonl"""
    log: str
    """log.txt"""

    def check(self) -> Run:
        """The run itself, if every rank ended with 0."""
        assert not any(self.codes), f"exit codes {self.codes}\n" + "\n".join(self.outputs)
        return self

    def column(self, name: str) -> list[Any]:
        """One field of the rows that have it."""
        return [row[name] for row in self.rows if name in row]


def train(
    config: Path, folder: Path, *overrides: str, world: int = 1, patch: str | None = None, timeout_sec: float = 300.0,
    last_sec: float = 1.0, **environment: str,
) -> Run:  # fmt: skip
    """A finished run of `config` with `overrides` in `folder`, by `world` processes; it may have failed.

    `patch` ("module:function") is called in every process before it starts; it finds `environment`. After one rank's
    failure the others get `last_sec` to end by themselves, and are then killed, as a launcher does.
    """
    logs = folder.with_name(folder.name + ".logs")
    logs.mkdir(parents=True, exist_ok=True)
    arguments = ["--config", str(config), f"run.dir={folder.parent}", f"run.name={folder.name}", *overrides]
    variables = {"WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    _start_server()
    for rank in range(world):
        own = {k: str(v) for k, v in (variables | {"RANK": rank, "LOCAL_RANK": rank} | environment).items()}
        output = logs / f"{rank}.txt"
        process = _server.Process(target=_rank, args=(arguments, own, str(output), patch))
        process.start()
        processes.append(process)
    try:
        _wait(processes, timeout_sec, last_sec)
    finally:
        for process in processes:
            process.kill()
            process.join()
    outputs = [(logs / f"{rank}.txt").read_text() for rank in range(world)]
    codes, log = [process.exitcode for process in processes], folder / "log.txt"
    return Run(codes, outputs, folder, read_metrics(folder / "metrics.jsonl"), log.read_text() if log.exists() else "")


def _start_server() -> None:
    """Starts the fork server, once; it keeps the environment that it starts with.

    A process has one, and data preparation uses it too: a server that an earlier test of that has left is ended, since
    it has none of a run's imports.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if _PRELOAD not in server._preload_modules:
        server._stop()
    _server.set_forkserver_preload([_PRELOAD])
    before = dict(os.environ)
    try:
        os.environ.update(_ENVIRONMENT)
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait(processes: list[Any], timeout_sec: float, last_sec: float) -> None:
    deadline = time.monotonic() + timeout_sec
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline, last_sec = min(deadline, time.monotonic() + last_sec), math.inf
        time.sleep(0.02)


def _rank(arguments: list[str], environment: dict[str, str], output: str, patch: str | None) -> None:
    """One rank, in its own process."""
    os.environ.update(_ENVIRONMENT | environment)
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # multiprocessing's own streams may be buffers that another process has filled.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    from pretrain.main import leave, main
    from pretrain.messages import set_up_console

    set_up_console()  # before a patch imports libraries that have something to say
    if patch is not None:
        module, function = patch.split(":")
        getattr(importlib.import_module(module), function)()
    with contextlib.suppress(KeyboardInterrupt):
        leave(main(arguments))
