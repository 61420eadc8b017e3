"""Which rows of the global batch a data-parallel rank reads, and which processes share a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from pretrain.errors import ConfigError, DataError, DistributedError, PretrainError


def rank_positions(global_batch_size: int, dp_size: int, num_nodes: int = 1) -> NDArray[np.int64]:
    """[dp_size, N / dp_size] positions p in the global batch of each rank's rows, ascending; the same in every step.

    Rank d is number l = d mod (D / M) of node a = d div (D / M), where D is `dp_size` and M is `num_nodes`, the nodes
    over which the ranks are spread. It reads the residue class p = a + M l (mod D); with one node, p = d (mod D). Node
    a thus holds p = a (mod M), whose rows lie in few shards (`order.interleave`), and the depths of `DepthSampler`
    are balanced over the residue classes of every D. It is streaming's own assignment.
    """
    if global_batch_size % dp_size:
        raise ConfigError(
            f"train.global_batch_size={global_batch_size}: expected a multiple of the {dp_size} data-parallel ranks"
        )
    node, rank_of_node = np.divmod(np.arange(dp_size), dp_size // num_nodes)
    return (node + num_nodes * rank_of_node)[:, None] + np.arange(0, global_batch_size, dp_size)


@dataclass(frozen=True, kw_only=True)
class DataPlace:
    """Where this process stands. Tensor ranks and pipeline stages of one data-parallel rank share `dp_rank`.

    `world_size` counts all processes; with more than one, torch.distributed must be initialised, and building loaders
    is a collective call of all of them.
    """

    dp_rank: int = 0
    dp_size: int = 1
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_nodes: int | None = None
    """Nodes that the data-parallel ranks are spread over. None: found by asking all processes."""

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, by rank. Collective over all processes."""
        if self.world_size == 1:
            return [value]
        if not dist.is_initialized():
            raise DistributedError("the data loader needs torch.distributed.init_process_group first")
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_leaders(self, action: Callable[[], None], leads: bool) -> None:
        """Runs `action` where `leads`; what it raises is raised on every process. Collective over all processes."""
        failure: PretrainError | None = None
        if leads:
            try:
                action()
            except PretrainError as error:
                failure = error
            except OSError as error:
                failure = DataError(str(error))
        for found in self.gather(failure):
            if found is not None:
                raise found


@dataclass(frozen=True, kw_only=True)
class Node:
    """The processes that share this machine, and over how many such nodes the data-parallel ranks are spread."""

    index: int
    count: int
    rank_of_node: int
    ranks_of_node: int
    data_nodes: int

    @property
    def is_leader(self) -> bool:
        """True on the first process of the node."""
        return self.rank_of_node == 0

    @staticmethod
    def of(place: DataPlace) -> Node:
        """Found from every process's local rank: local rank 0 starts a node. Collective over all processes."""
        heads: list[int] = []
        nodes: list[int] = []
        node_of_dp: dict[int, int] = {}
        for rank, (local_rank, dp_rank) in enumerate(place.gather((place.local_rank, place.dp_rank))):
            if local_rank == 0 or not heads:
                heads.append(rank)
            nodes.append(len(heads) - 1)
            node_of_dp.setdefault(dp_rank, nodes[-1])
        index = nodes[place.rank]
        return Node(
            index=index,
            count=len(heads),
            rank_of_node=place.rank - heads[index],
            ranks_of_node=nodes.count(index),
            data_nodes=place.num_nodes or _even_nodes([node_of_dp.get(d, 0) for d in range(place.dp_size)]),
        )


def _even_nodes(node_of_dp: list[int]) -> int:
    """Number of nodes if the ranks are spread evenly and in order; else 1, which is right too, but not node-local."""
    count = len(set(node_of_dp))
    even = len(node_of_dp) % count == 0 and all(
        node == node_of_dp[0] + d // (len(node_of_dp) // count) for d, node in enumerate(node_of_dp)
    )
    return count if even else 1
