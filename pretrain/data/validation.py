"""The validation rows: the first rows of the validation split, held in memory, the same for every layout."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.format import Reader
from streaming.base.world import World
from torch import Tensor

from pretrain.config.schema import Config, SourceConfig
from pretrain.data.manifest import COLUMN, HASH
from pretrain.data.place import DataPlace, Node
from pretrain.data.sources import open_sources, shard_path
from pretrain.errors import DataError
from pretrain.preflight import apportion

logger = logging.getLogger(__name__)

SPLIT = "validation"
THIS_PROCESS = World(num_nodes=1, ranks_per_node=1, workers_per_rank=1, worker=0)


class ValidationBatch(NamedTuple):
    """B rows of S + 1 tokens."""

    tokens: Tensor
    """int64 [B, S + 1] on the CPU."""
    positions: Tensor
    """int64 [B]: number of each row among the validation rows."""
    weights: Tensor
    """fp32 [B]: 1, or 0 for a row that only fills the batch."""


class ValidationRows:
    """The first `validation.rows` rows, row v at data-parallel rank v mod D; each rank keeps its share in memory.

    Sources that have a validation split share the rows in proportion to their weights, first source first. With
    `reads=False`, as of TrainLoader, no row is read and all tokens are 0. Building it is collective over all processes.
    Errors: as `open_sources`, and ConfigError where a source has too few rows.
    """

    def __init__(self, cfg: Config, place: DataPlace, *, reads: bool = True) -> None:
        node = Node.of(place)
        manifests = open_sources(cfg, place, node, folder=None)
        pairs = [p for p in zip(cfg.data.all_sources, manifests, strict=True) if SPLIT in p[1].splits]
        counts = apportion(cfg.validation.rows, [source.weight for source, _ in pairs])
        readers = [_Reader(source, count) for (source, _), count in zip(pairs, counts, strict=True)]

        def prepare() -> None:
            for reader in readers:
                reader.prepare()

        place.on_leaders(prepare, node.is_leader)
        self.num_rows = cfg.validation.rows
        self._place = place
        self._mine = np.arange(place.dp_rank, self.num_rows, place.dp_size)
        if not reads:
            self._tokens = np.zeros((1 + len(self._mine), cfg.model.context_length + 1), dtype=np.int64)
            return
        # Row 0 fills incomplete batches, also of a rank that has no row of its own.
        bounds = np.cumsum([0, *counts])
        self._tokens = np.stack([_row(readers, bounds, v) for v in (0, *self._mine)])
        largest = int(self._tokens.max())
        if largest >= cfg.model.vocab_size:
            raise DataError(f"validation rows hold id {largest}, but model.vocab_size={cfg.model.vocab_size}")

    def num_batches(self, rows_per_batch: int) -> int:
        """Batches of `rows_per_batch` rows that every rank yields."""
        return -(-self.num_rows // (self._place.dp_size * rows_per_batch))

    def num_padding_rows(self, rows_per_batch: int) -> int:
        """Rows of weight 0 over all ranks."""
        return self.num_batches(rows_per_batch) * self._place.dp_size * rows_per_batch - self.num_rows

    def batches(self, rows_per_batch: int) -> Iterator[ValidationBatch]:
        """This rank's rows in order, filled up with rows of weight 0, so that all ranks yield equally many batches."""
        for batch in range(self.num_batches(rows_per_batch)):
            own = np.arange(batch * rows_per_batch, (batch + 1) * rows_per_batch)
            real = own < len(self._mine)
            tokens = self._tokens[np.where(real, own + 1, 0)].astype(np.int64)
            positions = self._place.dp_rank + own * self._place.dp_size
            yield ValidationBatch(
                torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(real.astype(np.float32))
            )


class _Reader:
    """The first `count` validation rows of a source, by number."""

    def __init__(self, source: SourceConfig, count: int) -> None:
        self._source = source
        self._stream = Stream(
            local=source.path, remote=source.remote, split=SPLIT, validate_hash=HASH,
            download_retry=2, download_timeout=60, keep_zip=False,
        )  # fmt: skip
        self._shards = self._stream.get_shards(THIS_PROCESS, allow_unsafe_types=False)
        self._first_rows = np.cumsum([0, *map(len, self._shards)])
        self._num_needed = int(np.searchsorted(self._first_rows, count))

    def prepare(self) -> None:
        """Downloads the shards needed into the cache of a remote source, which other runs may fill too."""
        if self._source.remote is None:
            return
        with FileLock(Path(self._source.path) / ".validation.lock"):
            for shard in self._shards[: self._num_needed]:
                with _naming(shard):
                    self._stream.prepare_shard(shard)

    def __getitem__(self, row: int) -> NDArray[Any]:
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        shard = self._shards[number]
        with _naming(shard):
            return shard[row - int(self._first_rows[number])][COLUMN]


@contextlib.contextmanager
def _naming(shard: Reader) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a broken shard can fail in any way
        raise DataError(
            f"{shard_path(shard)}: validation shard cannot be read ({type(error).__name__}: {error}); check the data "
            "set with data_prep/verify_shards.py"
        ) from error


def _row(readers: list[_Reader], bounds: NDArray[np.int64], number: int) -> NDArray[Any]:
    source = int(np.searchsorted(bounds, number, side="right")) - 1
    return readers[source][number - int(bounds[source])]
