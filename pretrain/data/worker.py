"""What a loader process does about signals and failures of its threads.

It ends with the training process, or because it can go on no more, which the training process then sees.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.queues import Queue
from typing import Any

from pretrain.processes import STOPPING, end_with_parent
from pretrain.threads import VitalThread, end_process

SHOW_THREADS = signal.SIGRTMIN + 1
"""Makes a loader process write to stderr where its threads are, whatever they do. No scheduler sends it."""

IGNORED = tuple(number for number in STOPPING if number != signal.SIGTERM)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """While loader processes are forked: until `set_up_worker` they would end by a signal of the job."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*IGNORED, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_up_worker(worker: int) -> None:
    """DataLoader's `worker_init_fn`, in a process forked within `signals_held`.

    SLURM, and a terminal, signal every process of a job. The training process then saves and stops by itself, and needs
    its workers until it does; only a SIGTERM that it sends itself counts. Where it dies, the kernel kills the worker:
    one that lived on would keep the run's memory and locks, and torch's own check waits for the row being read.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with_parent(parent.pid, signal.SIGKILL)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    faulthandler.register(SHOW_THREADS, file=2)
    # Held in every thread, SIGTERM waits for the one that asks who sent it.
    VitalThread(target=_end_on_parents_word, args=(parent.pid,), name="end", daemon=True).start()
    _end_where_a_thread_fails()


def _end_where_a_thread_fails() -> None:
    """Python would print the exception and go on, and the training process wait for a batch that never comes.

    The thread of a queue catches what it meets itself: a batch that it cannot pickle, or whose file it cannot pass on
    because this process has too many open. Its hook is there for libraries to replace (concurrent.futures does).
    """
    threading.excepthook = _end_after
    Queue._on_queue_feeder_error = staticmethod(_end_without_batch)  # type: ignore[attr-defined]


def _end_after(failure: threading.ExceptHookArgs) -> None:
    name = "unknown" if failure.thread is None else failure.thread.name
    trace = "".join(traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback))
    end_process(f"thread {name} of loader process {os.getpid()} failed: {trace}")


def _end_without_batch(error: Exception, batch: Any) -> None:
    end_process(f"loader process {os.getpid()} could not hand over a batch: {type(error).__name__}: {error}")


def _end_on_parents_word(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
