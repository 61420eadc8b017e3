"""The training loader: for every step, the rows of the global batch that this data-parallel rank trains on.

Its position is the step. Nothing is replayed: row i of step s is a look-up in the epoch's order, for any number of
nodes, ranks and workers.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.batches import Batches
from pretrain.data.dataset import RowDataset
from pretrain.data.node import NodeFolder
from pretrain.data.place import DataPlace, Node, rank_positions
from pretrain.data.shared_memory import require_shared_memory
from pretrain.data.sources import fingerprint, open_sources
from pretrain.errors import CheckpointError

logger = logging.getLogger(__name__)


class RankBatch(NamedTuple):
    """One rank's share of a global batch. B rows of S + 1 tokens: inputs are tokens[:, :-1], targets tokens[:, 1:]."""

    tokens: Tensor | None
    """int64 [B, S + 1] on the CPU, pinned where CUDA is present; None where the rank does not read."""
    positions: Tensor
    """int64 [B]: p in 0..N-1 of each row in the global batch."""


class TrainLoader:
    """Yields the RankBatch of step `start_step`, `start_step` + 1, ... for ever; steps count from 0.

    Epochs follow each other without a gap. Each epoch has its own shuffle; its rows beyond the last full global batch,
    `dropped_rows_per_epoch`, are left out, which is logged when the epoch ends and counted in `dropped_rows`.

    Building it is collective over all processes (torch.distributed initialised where there are several); afterwards
    there are no collectives and ranks read at their own pace. With `reads=False` (a pipeline stage without embedding
    or head) no row is read and `tokens` is None. To be used from the main thread: workers end with the thread that
    started them.
    Errors: ConfigError and DataError as `open_sources` and `require_shared_memory`; DataError as `Batches` while
    reading, naming the shard where that fails.
    """

    def __init__(self, cfg: Config, place: DataPlace, *, start_step: int = 0, reads: bool = True) -> None:
        self._cfg = cfg.data
        self._logs = place.rank == 0
        node = Node.of(place)
        all_positions = rank_positions(cfg.train.global_batch_size, place.dp_size, node.data_nodes)
        self.all_positions: NDArray[np.int64] = all_positions
        """[dp_size, B] positions of every data-parallel rank's rows, the same in every step."""
        self._folder = NodeFolder(place, node)
        try:
            manifests = open_sources(cfg, place, node, self._folder)
            require_shared_memory(cfg, place, node, manifests, len(all_positions[place.dp_rank]) if reads else 0)
            with self._folder.streaming_world():
                self._dataset = RowDataset(cfg, all_positions[place.dp_rank], self._folder)
        except BaseException:
            self._folder.close()
            raise
        self.bos_id = manifests[0].tokenizer.bos_id
        self._prints = [fingerprint(s, m) for s, m in zip(cfg.data.all_sources, manifests, strict=True)]
        self._settings = _order_settings(cfg, self._dataset)
        self._positions = torch.from_numpy(all_positions[place.dp_rank])
        self._reads = reads
        self._batches: Batches | None = None
        self.step = start_step
        self._log_start()

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch's order: all rows of all sources, or as many, mixed by weight."""
        return self._dataset.epoch_size

    @property
    def steps_per_epoch(self) -> int:
        """Full global batches of an epoch."""
        return self._dataset.steps_per_epoch

    @property
    def dropped_rows_per_epoch(self) -> int:
        """Rows at the end of an epoch's order that do not fill a global batch."""
        return self._dataset.dropped_rows_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self.step // self.steps_per_epoch

    @property
    def dropped_rows(self) -> int:
        """Rows left out at the ends of the epochs before the next step."""
        return self.epoch * self.dropped_rows_per_epoch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RankBatch:
        tokens = self._read() if self._reads else None
        self.step += 1
        if self._logs and self.step % self.steps_per_epoch == 0:
            logger.info(
                "epoch %d of the data ends with step %d; rows left out since they do not fill a global batch: %d",
                self.epoch - 1, self.step - 1, self.dropped_rows_per_epoch,
            )  # fmt: skip
        return RankBatch(tokens, self._positions)

    def seek(self, step: int) -> None:
        """Makes `step` the next one; workers that read ahead for another step are stopped."""
        self._stop()
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """The position and what fixes the order of rows, as JSON values; the same on every rank."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "row_in_epoch": self.step % self.steps_per_epoch * self._dataset.global_batch_size,
            "dropped_rows": self.dropped_rows,
            "order": self._settings | {"sources": self._prints, "digest": self._dataset.order_digest(self.epoch)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seeks to the saved step. CheckpointError naming what differs if the order of rows is not the saved one."""
        self.seek(state["step"])
        own, saved = self.state_dict()["order"], state["order"]
        different = [
            f"{key}: checkpoint {saved.get(key)!r}, now {own.get(key)!r}"
            for key in sorted(own.keys() | saved.keys())
            if own.get(key) != saved.get(key)
        ]
        if different:
            raise CheckpointError(
                "the order of training rows is not the checkpoint's, so rows would be repeated or left out: "
                f"{'; '.join(different)}. Restore the data sets, settings and package versions (numpy, streaming) of "
                "the run, or start a new run from its weights (checkpoint.initial_weights)"
            )

    def close(self) -> None:
        """Ends worker processes and threads and frees shared memory and locks. May be called twice. Not collective."""
        self._stop()
        self._dataset.release()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Tensor:
        if self._batches is None:
            self._dataset.start_step = self.step
            self._batches = Batches(self._dataset, len(self._positions), self._cfg)
        return next(self._batches)

    def _stop(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _log_start(self) -> None:
        if self._logs:
            logger.info(
                "data: %d rows = %d steps per epoch, %d rows of each epoch left out; starting at step %d (epoch %d)",
                self.rows_per_epoch, self.steps_per_epoch, self.dropped_rows_per_epoch, self.step, self.epoch,
            )  # fmt: skip


def _order_settings(cfg: Config, dataset: RowDataset) -> dict[str, Any]:
    return {
        "train.global_batch_size": cfg.train.global_batch_size,
        "data.shuffle": cfg.data.shuffle,
        "data.shuffle_seed": dataset.shuffle_seed,
        "data.shuffle_block_rows": cfg.data.shuffle_block_rows,
        "data.canonical_nodes": cfg.data.canonical_nodes,
        "data.sources[].weight": [source.weight for source in cfg.data.all_sources],
    }
