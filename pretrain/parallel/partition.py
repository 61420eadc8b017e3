"""Where ZeRO keeps the elements of each parameter, and how to bring a parameter together on one rank and back.

ZeRO gives every data-parallel rank a flat fp32 partition per parameter group. Stages 1 and 2 lay a group's parameters
end to end and cut the line into equal parts; stage 3 cuts every parameter. A `Partition` says for all ranks which
elements lie where, so that whatever needs whole tensors (Muon, checkpoints) is written once for all stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Piece:
    """`numel` elements of a flattened parameter from `param_start`, kept from `flat_start` of a rank's partition."""

    param_start: int
    flat_start: int
    numel: int


Pieces = list[list[Piece]]
"""[data rank][parameter]; a piece may be empty."""


def contiguous_pieces(numels: Sequence[int], partition_numel: int, num_ranks: int) -> Pieces:
    """Stages 1 and 2: the parameters end to end, rank r keeping elements [r, r + 1) * partition_numel of the line."""
    starts = [sum(numels[:i]) for i in range(len(numels))]

    def piece(rank: int, start: int, numel: int) -> Piece:
        low = max(start, rank * partition_numel)
        high = min(start + numel, (rank + 1) * partition_numel)
        return Piece(low - start, low - rank * partition_numel, high - low) if low < high else Piece(0, 0, 0)

    return [[piece(r, s, n) for s, n in zip(starts, numels, strict=True)] for r in range(num_ranks)]


def sliced_pieces(numels: Sequence[int], num_ranks: int) -> Pieces:
    """Stage 3: every parameter in `num_ranks` slices of ceil(numel / num_ranks); the last slices may be short."""
    slices = [math.ceil(n / num_ranks) for n in numels]
    starts = [sum(slices[:i]) for i in range(len(slices))]

    def piece(rank: int, numel: int, size: int, flat_start: int) -> Piece:
        low, high = min(rank * size, numel), min((rank + 1) * size, numel)
        return Piece(low, flat_start, high - low)

    return [[piece(r, *x) for x in zip(numels, slices, starts, strict=True)] for r in range(num_ranks)]


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of a partition, with the shape of this rank's tensor-parallel shard."""

    name: str
    shape: torch.Size
    tensor_dim: int | None
    """Dimension sharded over tensor-parallel ranks. None: replicated."""

    def whole_shape(self, tensor_size: int) -> torch.Size:
        """Shape of the parameter that `tensor_size` tensor-parallel ranks hold."""
        return torch.Size(n * tensor_size if dim == self.tensor_dim else n for dim, n in enumerate(self.shape))

    @property
    def cost(self) -> int:
        """Work of orthogonalising it, up to a factor: numel x smaller dimension."""
        return self.shape.numel() * (min(self.shape) if len(self.shape) > 1 else 1)


@dataclass(frozen=True)
class _Route:
    """What one rank sends to the owners and receives as an owner; `distribute` goes the other way."""

    outgoing: list[Piece]
    """This rank's pieces, by owner."""
    incoming: list[tuple[int, Piece]]
    """Parameter and piece of everything an owner receives, by source rank."""
    sent: list[int]
    """Elements to each rank."""
    received: list[int]
    """Elements from each rank."""


class Partition:
    """One flat fp32 tensor of this data-parallel rank, and the parameters whose pieces it holds.

    Every parameter has one owner among the data-parallel ranks (the same on all, balanced by cost), where `collect`
    brings it together. Both collectives move each element once and must be called by the whole data-parallel group.
    """

    def __init__(
        self, flat: torch.Tensor, specs: Sequence[ParamSpec], pieces: Pieces, group: dist.ProcessGroup
    ) -> None:
        self.flat = flat
        self.specs = list(specs)
        self.pieces = pieces
        self.group = group
        self.rank = dist.get_rank(group)

    @property
    def local_pieces(self) -> list[Piece]:
        """This rank's piece of every parameter."""
        return self.pieces[self.rank]

    @cached_property
    def owners(self) -> list[int]:
        """Data-parallel rank that owns each parameter: the costliest first, each to the least loaded rank."""
        loads = [0] * len(self.pieces)
        owners = [0] * len(self.specs)
        for i in sorted(range(len(self.specs)), key=lambda i: (-self.specs[i].cost, i)):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += self.specs[i].cost
        return owners

    @cached_property
    def _route(self) -> _Route:
        ranks = range(len(self.pieces))
        owned_by = [[i for i, owner in enumerate(self.owners) if owner == rank] for rank in ranks]
        incoming = [[(i, self.pieces[source][i]) for i in owned_by[self.rank]] for source in ranks]
        return _Route(
            outgoing=[self.local_pieces[i] for rank in ranks for i in owned_by[rank]],
            incoming=[entry for from_source in incoming for entry in from_source],
            sent=[sum(self.local_pieces[i].numel for i in owned_by[rank]) for rank in ranks],
            received=[sum(piece.numel for _, piece in from_source) for from_source in incoming],
        )

    def collect(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Whole tensors of the parameters this rank owns, by index in `specs`, from every rank's `values`.

        `values`: shaped like `flat`. On a single rank the tensors are views of it. Collective over the group.
        """
        if len(self.pieces) == 1:
            whole = zip(self.specs, self.local_pieces, strict=True)
            views = (values[p.flat_start : p.flat_start + p.numel].view(spec.shape) for spec, p in whole)
            return dict(enumerate(views))
        route = self._route
        send = torch.cat([values[p.flat_start : p.flat_start + p.numel] for p in route.outgoing])
        buffer = values.new_empty(sum(route.received))
        dist.all_to_all_single(buffer, send, route.received, route.sent, group=self.group)
        tensors = {i: values.new_empty(self.specs[i].shape) for i, _ in route.incoming}
        received = buffer.split([piece.numel for _, piece in route.incoming])
        for (i, piece), part in zip(route.incoming, received, strict=True):
            tensors[i].view(-1)[piece.param_start : piece.param_start + piece.numel] = part
        return tensors

    def distribute(self, tensors: dict[int, torch.Tensor], out: torch.Tensor) -> None:
        """The way back: fills the parameters' elements of `out` (like `flat`) from their owners' whole tensors.

        Collective over the group.
        """
        route = self._route
        wanted = [tensors[i].reshape(-1)[p.param_start : p.param_start + p.numel] for i, p in route.incoming]
        back = torch.cat(wanted) if wanted else out.new_empty(0)
        buffer = out.new_empty(sum(route.sent)) if len(self.pieces) > 1 else back
        if len(self.pieces) > 1:
            dist.all_to_all_single(buffer, back, route.sent, route.received, group=self.group)
        for piece, part in zip(route.outgoing, buffer.split([p.numel for p in route.outgoing]), strict=True):
            out[piece.flat_start : piece.flat_start + piece.numel] = part
