"""The order of an epoch's rows: one permutation for all layouts, made once per node and shared as a file.

streaming chooses the rows (mixture weights) and shuffles them (py1e: within shards, and across the shards of a
block); what is ours is the cut into steps, which knows nothing of nodes, ranks and workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from pretrain.errors import DataError


def interleave(rows: NDArray[np.int64], canonical_nodes: int) -> NDArray[np.int64]:
    """[n] -> [n]: `rows` cut into contiguous parts, one per canonical node, and dealt one row of each in turn.

    Row i of the result is of part i mod C but for the last round, since parts differ by one row at most. Shuffling
    stays within a part, so a node that reads the rows i = a (mod M) needs the shards of the parts c = a (mod M) where M
    divides C, and of part a mod C where C divides M. Other numbers of nodes get the same order, and read every shard.
    """
    bounds = np.arange(canonical_nodes + 1) * len(rows) // canonical_nodes  # streaming's own (divide_spans)
    sizes = np.diff(bounds)
    rounds = np.full((sizes.max(), canonical_nodes), -1, dtype=np.int64)
    for part, (start, size) in enumerate(zip(bounds, sizes, strict=False)):
        rounds[:size, part] = rows[start : start + size]
    return rounds[rounds >= 0]


def shared_order(folder: Path, epoch: int, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.uint32 | np.int64]:
    """The array `make()` of this epoch, mapped from a file in `folder` that the first process to ask writes.

    The kernel frees the lock of a process that dies, so a killed maker holds up nobody.
    """
    path = folder / f"order_{epoch}.npy"
    with FileLock(folder / "order.lock"):
        if not path.exists():
            for other in folder.glob("order_*.npy"):
                # A reader may still be one epoch behind. Removal leaves mapped copies intact.
                if abs(int(other.stem.removeprefix("order_")) - epoch) > 1:
                    other.unlink()
            _write(path, make())
        # Mapped before the lock is given up: a process that is epochs ahead may remove the file.
        mapped: NDArray[np.uint32 | np.int64] = np.load(path, mmap_mode="r")
    return mapped


def _write(path: Path, order: NDArray[np.int64]) -> None:
    part = path.with_suffix(".part")
    narrow = order.astype(np.uint32) if order.max() < 2**32 else order
    try:
        with part.open("wb") as file:
            np.save(file, narrow)
    except OSError as error:
        raise DataError(
            f"{path}: cannot write the order of an epoch, {narrow.nbytes} bytes ({error}); shared memory must hold two "
            "such files (containers: --shm-size)"
        ) from error
    os.replace(part, path)
