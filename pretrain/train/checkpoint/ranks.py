"""Agreement among the processes that save or load together; a world of one needs no process group."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from pretrain.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """The processes of one group, and their small exchanges. Every method is collective over the group."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = rank, size
        self._group = group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of `group` (None: the world); this process alone where there is no process group."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def for_thread(self, timeout_sec: float) -> Ranks:
        """The same ranks on a gloo group of its own: a thread's exchanges must not mix with the main thread's."""
        if self.size == 1:
            return self
        members = None if self._group is None else dist.get_process_group_ranks(self._group)
        group = dist.new_group(members, timeout=timedelta(seconds=timeout_sec), backend="gloo")
        return Ranks(self.rank, self.size, cast(dist.ProcessGroup, group))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        values = [value]
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]

    def raise_any(self, error: str | None) -> None:
        """CheckpointError on every rank if any rank has an error; nothing otherwise."""
        found = self.gather(None if error is None else (self.rank, socket.gethostname(), error))
        if lines := [f"rank {x[0]} on {x[1]}: {x[2]}" for x in found if x is not None]:
            raise CheckpointError(error if self.size == 1 else "\n".join(lines))
