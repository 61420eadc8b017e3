"""Named tasks over several processes: each leaves a record, and a restart runs those without."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pretrain.errors import ConfigError, DataError, PretrainError
from pretrain.foreign import read_json

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A call that can be repeated: it replaces its own output and returns a JSON-able record."""

    name: str
    function: Callable[..., Record]
    args: tuple[Any, ...]
    size: int
    """For the progress bar."""


def run_tasks(
    tasks: Sequence[Task], records: Path, processes: int, label: str, unit: str
) -> list[Record]:
    """The record of every task, in order; tasks whose record is in the folder `records` are not run
    again.

    Output is on disk before its record is (`sync_folder` in the task, temp file and rename here),
    so that a kill at any moment leaves tasks that are done or tasks that run again.
    """
    records.mkdir(parents=True, exist_ok=True)
    paths = [records / f"{task.name}.json" for task in tasks]
    waiting = [i for i, path in enumerate(paths) if not path.exists()]
    done_size = sum(task.size for task in tasks) - sum(tasks[i].size for i in waiting)
    if len(waiting) < len(tasks):
        print(
            f"{label}: {len(tasks) - len(waiting)} of {len(tasks)} tasks were done before",
            flush=True,
        )
    calls = [(_recorded, (tasks[i], paths[i])) for i in waiting]
    with progress(label, sum(task.size for task in tasks), unit, done_size) as bar:
        for i, _ in parallel(calls, processes):
            bar.update(tasks[waiting[i]].size)
    mend = "remove it and run the command again"
    return [read_json(path, DataError, mend) for path in paths]


def parallel(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], processes: int
) -> Iterator[tuple[int, Any]]:
    """(index, result) of each call as it ends. One process: in this one, in order.

    Workers end when this process does, even by SIGKILL. Errors: the first error of a call; the rest
    is not started.
    """
    if processes == 1 or len(calls) <= 1:
        yield from ((i, function(*args)) for i, (function, args) in enumerate(calls))
        return
    context = multiprocessing.get_context("forkserver")
    count = min(processes, len(calls))
    with ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(function, *args): i for i, (function, args) in enumerate(calls)}
        try:
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was killed, probably for want of memory; finished work is kept: "
                "run the same command again, with fewer --processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def progress(label: str, total: int, unit: str, initial: int = 0) -> tqdm:
    """A progress bar on stderr: live on a terminal, a line every 30 s in a log file."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        desc=label,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=True,
        mininterval=interval,
        dynamic_ncols=True,
    )


@contextlib.contextmanager
def only_builder(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`, which ends with the process; ConfigError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{folder}: another build is at work; wait for it or choose another --out"
            ) from error
        except OSError as error:  # Lustre mounted without flock, for one
            print(
                f"{folder}: no file locks ({error}): see to it that only one build writes there",
                file=sys.stderr,
            )
        yield


def write_text(path: Path, text: str) -> None:
    """Writes `path` in full or not at all: temp file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Brings one file, or the entries of one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Brings every file below `folder` to disk, and the folder's own entries."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)


def default_processes() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def command(main: Callable[[], None]) -> None:
    """Runs a script's `main`; errors raised on purpose become a message and an exit code."""
    try:
        main()
    except PretrainError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


def _recorded(task: Task, path: Path) -> None:
    try:
        record = task.function(*task.args)
        write_text(path, json.dumps(record))
    except OSError as error:
        raise DataError(
            f"{task.name}: {error}; finished work is kept: mend the cause and run the command again"
        ) from error


def _end_with_parent() -> None:
    """Ends this worker with the process that started it; idle workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
