"""What the data of a run needs of a node's shared memory, and whether it is there."""

from __future__ import annotations

import mmap
import shutil
import socket
from collections.abc import Sequence

from pretrain.config.schema import Config
from pretrain.data.manifest import Manifest
from pretrain.data.node import SHARED_MEMORY
from pretrain.data.place import DataPlace, Node
from pretrain.errors import ConfigError
from pretrain.files import size_text

MORE_SHARED_MEMORY = (
    "lower data.num_workers (0: read in the training process) or data.prefetch_factor, or enlarge /dev/shm "
    "(docker run --shm-size=SIZE; as root: mount -o remount,size=SIZE /dev/shm)"
)
BOOKKEEPING_PAGES = 16
"""streaming's six segments and the files of the run's folder, a page or less each."""
SHARD_BYTES = 9
"""State and time of the last access of a shard, kept by streaming."""
TOKEN_BYTES = 8
"""Batches are int64."""


def batch_bytes(cfg: Config, rank_rows: int) -> int:
    """Shared memory that one rank's loader processes may hold: all batches read ahead, and the one in training."""
    data = cfg.data
    if data.num_workers == 0:
        return 0
    return (data.num_workers * data.prefetch_factor + 1) * _pages(
        rank_rows * (cfg.model.context_length + 1) * TOKEN_BYTES
    )


def order_bytes(manifests: Sequence[Manifest]) -> int:
    """Shared memory of a node for the orders of two epochs, which exist together where one ends and the next begins."""
    rows = sum(manifest.splits["train"].rows for manifest in manifests)
    return 2 * _pages(rows * (4 if rows <= 2**32 else 8))


def require_shared_memory(
    cfg: Config, place: DataPlace, node: Node, manifests: Sequence[Manifest], rank_rows: int
) -> None:
    """ConfigError on all processes unless every node has room for what its ranks will hold at once.

    `rank_rows`: rows of this rank's batches, 0 where it reads none. Collective over all processes.
    """
    of_all = place.gather(batch_bytes(cfg, rank_rows) if rank_rows else 0)
    first = place.rank - node.rank_of_node
    batches = sum(of_all[first : first + node.ranks_of_node])

    def check() -> None:
        orders = order_bytes(manifests)
        shards = sum(manifest.splits["train"].shards for manifest in manifests)
        need = batches + orders + BOOKKEEPING_PAGES * mmap.PAGESIZE + _pages(shards * SHARD_BYTES)
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < need:
            raise ConfigError(
                f"{SHARED_MEMORY} of {socket.gethostname()}: {size_text(free)} free, expected at least "
                f"{size_text(need)}: {size_text(batches)} for batches (data.num_workers={cfg.data.num_workers}, "
                f"data.prefetch_factor={cfg.data.prefetch_factor}, {node.ranks_of_node} processes of this node) and "
                f"{size_text(orders)} for the order of the rows; {MORE_SHARED_MEMORY}"
            )

    place.on_leaders(check, node.is_leader)


def _pages(num_bytes: int) -> int:
    """`num_bytes` in whole pages, as tmpfs counts them."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
