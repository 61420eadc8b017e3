"""The batches of one rank, read ahead by its loader processes, whose failures all show where a batch is asked for."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from streaming import StreamingDataLoader
from torch import Tensor
from torch.utils.data import get_worker_info

from pretrain.config.schema import DataConfig
from pretrain.data.dataset import RowDataset
from pretrain.data.node import SHARED_MEMORY
from pretrain.data.shared_memory import MORE_SHARED_MEMORY
from pretrain.data.worker import set_up_worker, signals_held
from pretrain.errors import DataError

DEATH_SEC = 1.0
"""How long a process whose connection broke may take to be seen as ended."""

KILL_SEC = 5.0
"""How long a killed process is waited for: one that hangs in a file system ends later."""


class Batches:
    """int64 [B, S + 1] for the steps `dataset.start_step`, the next one, ... for ever. Ended by `close`.

    Errors: DataError where a row cannot be read, where a batch cannot be handed over, and where a loader process ends,
    by whatever cause.
    """

    def __init__(self, dataset: RowDataset, num_rows: int, cfg: DataConfig) -> None:
        self._loader = _Loader(
            dataset,
            batch_size=num_rows,
            num_workers=cfg.num_workers,
            prefetch_factor=cfg.prefetch_factor if cfg.num_workers else None,
            # Forked workers share the node folder's lock, so that a killed run's memory is not freed under them.
            multiprocessing_context="fork" if cfg.num_workers else None,
            collate_fn=_stack,
            worker_init_fn=set_up_worker,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # DataLoader draws a seed for its workers; not from the global one
        )
        self._batches = iter(self._loader)

    def __next__(self) -> Tensor:
        if self._has_failed():  # also where the batches read ahead would last for some steps
            raise DataError(self._ending())
        try:
            return next(self._batches)
        except DataError as error:
            # DataLoader hands a worker's error on with the worker's traceback as its message.
            raise DataError(str(error).rpartition(f"{DataError.__qualname__}: ")[2].strip()) from error
        except torch.AcceleratorError:  # of pinning: another device's matter than the data's
            raise
        except (RuntimeError, OSError, EOFError, MemoryError, multiprocessing.ProcessError) as error:
            failure = f"the data loader failed: {type(error).__name__}: {error}"
            raise DataError(self._ending() or failure) from error

    def close(self) -> None:
        """Ends the processes and threads. May be called twice."""
        self._loader.end(in_order=not self._has_failed())
        self._batches.close()  # type: ignore[attr-defined]  # a generator

    def _has_failed(self) -> bool:
        # A process ends with 0 after it has put its reader's error into the queue, behind other batches.
        return any(process.exitcode not in (None, 0) for process in self._loader.processes)

    def _ending(self) -> str | None:
        """How a loader process has ended, in words; None where all run."""
        processes = self._loader.processes
        multiprocessing.connection.wait([process.sentinel for process in processes], DEATH_SEC if processes else 0.0)
        for process in sorted(processes, key=lambda process: process.exitcode == 0):
            code = process.exitcode
            if code is None:
                continue
            if code >= 0:
                return f"loader process {process.pid} ended with exit code {code}; its own error tells why"
            text = f"loader process {process.pid} was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGBUS:
                return f"{text}, as where /dev/shm is full: {MORE_SHARED_MEMORY}"
            return (
                f"{text}. A loader process that was killed usually means that the host ran out of memory (see dmesg): "
                "lower data.num_workers or data.prefetch_factor"
            )
        return None


class _Loader(StreamingDataLoader):
    """StreamingDataLoader without torch's handler of SIGCHLD.

    That raises a RuntimeError in the middle of whatever the main thread does when a worker has died: a layer, a save,
    code that catches exceptions. Without it torch looks at its workers where it waits for a batch, every 5 s.
    """

    _running: Any = None

    def _get_iterator(self) -> Any:
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            with signals_held():
                self._running = super()._get_iterator()
        finally:
            signal.signal(signal.SIGCHLD, handler)
        return self._running

    @property
    def processes(self) -> Sequence[Any]:
        """The loader processes; none before the first batch is asked for, and with num_workers=0."""
        return getattr(self._running, "_workers", ())

    def end(self, *, in_order: bool) -> None:
        """Ends the processes and threads; not in order means by SIGKILL.

        torch's orderly end takes locks, which a process that was killed may hold for ever.
        """
        if not in_order:
            for process in self.processes:
                process.kill()
                process.join(KILL_SEC)
            self._running._shutdown = True
        elif self.processes:
            self._running._shutdown_workers()


def _stack(rows: Sequence[NDArray[Any]]) -> Tensor:
    """Rows [S + 1] of the stored type -> int64 [B, S + 1], in shared memory where a loader process hands it over.

    Else torch would move it there in a thread of the queue, which drops what it fails to move: the training process
    would wait for that batch for ever.
    """
    batch = torch.from_numpy(np.stack(rows).astype(np.int64))
    if get_worker_info() is None:
        return batch
    try:
        return batch.share_memory_()
    except RuntimeError as error:
        if left := re.search("<(/torch_[^>]*)>", str(error)):  # torch leaves the file that it could not enlarge
            Path(f"{SHARED_MEMORY}{left[1]}").unlink(missing_ok=True)
        raise DataError(
            f"a batch of {batch.nbytes} bytes could not be put into /dev/shm ({error}): {MORE_SHARED_MEMORY}"
        ) from error
