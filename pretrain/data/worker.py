"""What a loader process does about signals: it ends with the training process, and by nothing else."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading

from pretrain.processes import STOPPING, end_with_parent

SHOW_THREADS = signal.SIGRTMIN + 1
"""Makes a loader process write to stderr where its threads are, whatever they do. No scheduler sends it."""


def set_up_worker(worker: int) -> None:
    """DataLoader's `worker_init_fn`.

    SLURM, and a terminal, signal every process of a job. The training process then saves and stops by itself, and needs
    its workers until it does; only a SIGTERM that it sends itself counts. Where it dies, the kernel kills the worker:
    one that lived on would keep the run's memory and locks, and torch's own check waits for the row being read.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with_parent(parent.pid, signal.SIGKILL)
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    faulthandler.register(SHOW_THREADS, file=2)
    # Threads started from here on inherit the mask, so that the signal waits for the one that asks who sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_on_parents_word, args=(parent.pid,), daemon=True).start()


def _end_on_parents_word(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
