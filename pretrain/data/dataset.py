"""StreamingDataset with rows assigned by step and position, without end, and with failures that stop the run.

Of streaming this keeps shards, downloads, cache, decompression, mixtures and shuffling. Its own division of an epoch
among ranks and workers, and its barriers in shared memory, are replaced: a worker knows its rows from the step alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from time import sleep, time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _ShardState
from streaming.base.shuffle import get_shuffle
from torch.utils.data import get_worker_info

from pretrain.config.schema import Config
from pretrain.data.manifest import COLUMN, HASH
from pretrain.data.node import NodeFolder
from pretrain.data.order import interleave, shared_order
from pretrain.data.sources import shard_path
from pretrain.errors import DataError

SHUFFLE = "py1e"
SAMPLING_GRANULARITY_ROWS = 64
"""Rows of a shard that a mixture takes together. At 1, streaming's loop over rows takes 1 s per million (measured)."""


class RowDataset(StreamingDataset):
    """Rows of tokens [S + 1] (uint16 or uint32) for steps `start_step`, `start_step` + 1, ... for ever.

    Step s (from 0) trains on rows s N to (s + 1) N of the epochs' orders one after another; the rows of an epoch that
    do not fill a global batch of N rows are left out. `positions` are this rank's rows of each global batch. Worker w
    of W yields the steps start_step + w, start_step + w + W, ..., as DataLoader asks for them.

    Building it is collective over all processes, within `NodeFolder.streaming_world`.
    """

    def __init__(self, cfg: Config, positions: NDArray[np.int64], folder: NodeFolder) -> None:
        data, rank_rows = cfg.data, len(positions)
        self.start_step = 0
        self.global_batch_size = cfg.train.global_batch_size
        self._positions = positions
        self._folder = folder
        self._vocab_size = cfg.model.vocab_size
        self._rows_ahead = 8 * rank_rows if data.predownload_rows is None else data.predownload_rows
        self._failure: Exception | None = None
        super().__init__(
            streams=_streams(cfg),
            batch_size=rank_rows,
            predownload=self._rows_ahead,
            cache_limit=data.cache_limit_bytes,
            num_canonical_nodes=data.canonical_nodes,
            sampling_granularity=SAMPLING_GRANULARITY_ROWS,
            shuffle=data.shuffle,
            shuffle_algo=SHUFFLE,
            shuffle_seed=cfg.train.seed if data.shuffle_seed is None else data.shuffle_seed,
            shuffle_block_size=data.shuffle_block_rows,
        )
        self._cache_filelock_path = str(folder.path / "cache.lock")
        self.steps_per_epoch = self.epoch_size // self.global_batch_size

    @property
    def dropped_rows_per_epoch(self) -> int:
        """Rows at the end of an epoch's order that do not fill a global batch."""
        return self.epoch_size - self.steps_per_epoch * self.global_batch_size

    def order(self, epoch: int) -> NDArray[np.uint32 | np.int64]:
        """[rows per epoch] row numbers of the epoch in the order of training, the same for every layout."""
        return shared_order(self._folder.path, epoch, lambda: self._make_order(epoch))

    def order_digest(self, epoch: int) -> str:
        """Changes with the order of the epoch; from 4,096 rows at regular distances."""
        order = self.order(epoch)
        chosen = np.linspace(0, len(order) - 1, 4_096).astype(np.int64)
        return hashlib.sha256(order[chosen].astype("<i8").tobytes()).hexdigest()

    def __iter__(self) -> Iterator[NDArray[Any]]:  # type: ignore[override]  # streaming: rows are dicts
        """Yields this worker's rows, step by step, over all epochs. Raises DataError naming the shard that failed."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        step = self.start_step + worker
        while True:
            self._epoch = step // self.steps_per_epoch
            self._steps = range(step, (self._epoch + 1) * self.steps_per_epoch, num_workers)
            yield from super().__iter__()  # type: ignore[misc]  # rows are what get_item returns
            if self._failure is not None:
                raise self._failure
            step += len(self._steps) * num_workers

    def get_item(self, sample_id: int, retry: int = 7) -> NDArray[Any]:
        """The tokens of row `sample_id`, with every id below the vocabulary size."""
        try:
            tokens = super().get_item(sample_id, retry)[COLUMN]
            largest = int(tokens.max())
            if largest >= self._vocab_size:
                raise ValueError(f"id {largest} where model.vocab_size={self._vocab_size}")
        except Exception as error:  # a broken shard can fail in any way, and always stops the run
            raise self._fail(error, sample_id) from error
        return tokens

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Downloads and unpacks the shard unless its rows can be read already."""
        if not blocking and self._can_be_read(shard_id):
            # The background threads ask for every row, and streaming would take a file lock each time:
            # 0.6M tokens/s at 256 tokens a row (measured), against 1.1M this way.
            self._shard_access_times[shard_id] = time_ns()
            return
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:
            # streaming leaves the shard marked as being prepared, and other readers would wait for it for ever.
            self._shard_states[shard_id] = _ShardState.REMOTE
            raise DataError(f"{self._path(shard_id)}: shard cannot be read ({error})") from error

    def release(self) -> None:
        """Stops the reading threads and frees the shared memory. Not collective."""
        if hasattr(self, "_iterator"):
            self._iterator.exit()
        scalars = (self._next_epoch, self._cache_usage)
        arrays = (self._shard_states, self._shard_access_times, self._shared_barrier._arr)
        for memory in (self._locals_shm, *(scalar.arr.shm for scalar in scalars), *(array.shm for array in arrays)):
            memory.cleanup()

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        shuffle_units, rows = self.resample_streams(epoch)
        assert self.num_canonical_nodes is not None and self.shuffle_block_size is not None
        if self.shuffle:
            rows = rows[
                get_shuffle(
                    self.shuffle_algo, shuffle_units, self.num_canonical_nodes, self.shuffle_seed, epoch,
                    self.shuffle_block_size,
                )
            ]  # fmt: skip
        return interleave(rows, self.num_canonical_nodes)

    def _resume_incr_epoch(self) -> tuple[int, int]:
        return self._epoch, 0

    def _get_work(self, epoch: int, sample_in_epoch: int) -> NDArray[np.int64]:
        first_rows = (np.asarray(self._steps) - epoch * self.steps_per_epoch) * self.global_batch_size
        return self.order(epoch)[first_rows[:, None] + self._positions].astype(np.int64).ravel()

    def _prepare_thread(self, it: _Iterator) -> None:
        self._guarded(super()._prepare_thread, it)

    def _ready_thread(self, it: _Iterator) -> None:
        self._guarded(self._follow, it)

    def _follow(self, it: _Iterator) -> None:
        """Advances `it.ready_index` over rows that can be read.

        streaming's own thread waits for ever on a shard that another process began to download and could not get.
        """
        while it.ready_index < it.total and not it.should_exit() and not self._event.is_set():
            if it.ready_index - it.yield_index > self._rows_ahead:
                sleep(TICK)
                continue
            shard_id, _ = self.spanner[it.sample_ids[it.ready_index]]
            while not self._can_be_read(shard_id):
                self.prepare_shard(shard_id)
            it.ready_index += 1
        it.on_exit()

    def _guarded(self, thread: Callable[[_Iterator], None], it: _Iterator) -> None:
        """Runs a background thread of streaming's, which would end the epoch early and in silence where it fails."""
        try:
            thread(it)
        except Exception as error:  # kept for the reader, which raises it
            if not isinstance(error, DataError):
                failure = DataError(f"reading ahead failed ({type(error).__name__}: {error})")
                failure.__cause__, error = error, failure
            self._fail(error)
            it.on_exit()

    def _fail(self, error: Exception, sample_id: int | None = None) -> Exception:
        """Records the first failure, tells the threads to end, and returns it."""
        if self._failure is None:
            if sample_id is not None and not isinstance(error, DataError):
                error = self._row_error(error, sample_id)
            self._failure = error
        self._event.set()
        return self._failure

    def _row_error(self, error: Exception, sample_id: int) -> DataError:
        shard_id, row = self.spanner[sample_id]
        return DataError(
            f"{self._path(shard_id)}: row {row} cannot be read ({type(error).__name__}: {error}); check the data set "
            "with data_prep/verify_shards.py"
        )

    def _can_be_read(self, shard_id: int) -> bool:
        """False also for a shard of which only the compressed file is there, which streaming calls local too."""
        return self._shard_states[shard_id] == _ShardState.LOCAL and (
            self.shards[shard_id].compression is None or os.path.isfile(self._path(shard_id))
        )

    def _path(self, shard_id: int) -> str:
        return shard_path(self.shards[shard_id])


def _streams(cfg: Config) -> Sequence[Stream]:
    """One stream per source, in proportion to its weight where there are several."""
    sources = cfg.data.all_sources
    mixed = len(sources) > 1
    return [
        Stream(
            local=source.path, remote=source.remote, split="train", validate_hash=HASH,
            proportion=source.weight if mixed else None,
        )
        for source in sources
    ]  # fmt: skip
