"""Which box of which global tensor this rank holds, by tensor and pipeline parallelism. Names are global already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from pretrain.errors import CheckpointError
from pretrain.train.checkpoint.format import PARAMETER, Box, Shape, TensorSlice
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader

_SHOWN = 10


@dataclass(frozen=True)
class Place:
    """A rank's share of one parameter and of its optimizer state."""

    global_shape: Shape
    box: Box


class Placement:
    """The places of a model's parameters on this rank, and who writes those that several ranks hold.

    Replicated parameters and tied copies on two pipeline stages are written by the first rank that holds them.
    """

    def __init__(self, places: dict[str, Place], model_ranks: Ranks) -> None:
        """Collective over the ranks that together hold one model (tensor x pipeline)."""
        self.places = places
        everywhere = model_ranks.gather(places)
        self.global_shapes = {name: place.global_shape for held in everywhere for name, place in held.items()}
        before = everywhere[: model_ranks.rank]
        self._writes = {name for name, place in places.items() if all(held.get(name) != place for held in before)}

    @classmethod
    def of_model(cls, model: nn.Module, *, tensor_rank: int, tensor_size: int, model_ranks: Ranks) -> Placement:
        """The placement of a model whose parameters carry `tensor_partition_dim`, before ZeRO takes them apart."""
        places = {}
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            dim: int | None = getattr(parameter, "tensor_partition_dim", None)
            global_shape, offset = list(shape), [0] * len(shape)
            if dim is not None:
                global_shape[dim], offset[dim] = shape[dim] * tensor_size, shape[dim] * tensor_rank
            places[name] = Place(tuple(global_shape), (tuple(offset), shape))
        return cls(places, model_ranks)

    def slices(self, tensors: Iterable[tuple[str, str, Tensor]]) -> Iterator[TensorSlice]:
        """What this rank is to write of (name, kind, tensor): each box once over the ranks of one model."""
        for name, kind, tensor in tensors:
            if name in self._writes:
                place = self.places[name]
                yield TensorSlice(name, kind, place.global_shape, place.box[0], tensor)

    def read_from(self, reader: CheckpointReader) -> Callable[[str, str], Tensor]:
        """`read(name, kind)`: this rank's box of a tensor of the checkpoint, whose layout may be another."""

        def read(name: str, kind: str = PARAMETER) -> Tensor:
            offset, shape = self.places[name].box
            return reader.read(name, kind, offset, shape)

        return read

    def check(self, reader: CheckpointReader) -> None:
        """CheckpointError that lists the parameters whose name or global shape differs from the checkpoint's."""
        saved = {name: reader.shape(name) for name in reader.names()}
        own = self.global_shapes

        def show(shapes: dict[str, Shape], name: str) -> str:
            return str(list(shapes[name])) if name in shapes else "absent"

        different = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
        if different:
            lines = [f"  {name}: {show(saved, name)} -> {show(own, name)}" for name in different[:_SHOWN]]
            more = [f"  and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
            raise CheckpointError(
                f"{reader.folder}: the model is not the one that was saved (checkpoint -> model):\n"
                + "\n".join(lines + more)
                + "\nRestore the saved model section, or start another run"
            )
