"""Reading a checkpoint: any region of any tensor, whatever layout saved it. Needs no process group."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from pretrain.errors import CheckpointError
from pretrain.train.checkpoint.format import (
    CONFIG_NAME,
    INDEX_NAME,
    PARAMETER,
    STATE_NAME,
    Box,
    Shape,
    StoredSlice,
    StoredTensor,
    check_content,
    check_size,
    overlap,
    read_index,
    read_manifest,
)
from pretrain.train.state import TrainState


class CheckpointReader:
    """One complete checkpoint. Files are mapped, not loaded: memory is what `read` returns.

    Opening checks the manifest, the size of every file and the content of the small ones; `verify` checks the content
    of all. Errors: CheckpointError that names the file and what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        for name, record in self.manifest.files.items():
            check_size(folder, name, record)
        for name in (INDEX_NAME, STATE_NAME, CONFIG_NAME):
            check_content(folder, name, self.manifest.files[name])
        self._index = read_index(folder)
        self._files: dict[str, safe_open] = {}

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step

    @property
    def config_path(self) -> Path:
        """The resolved configuration of the run that saved it."""
        return self.folder / CONFIG_NAME

    def verify(self, part: int = 0, num_parts: int = 1) -> None:
        """Checks the content of every `num_parts`-th file, beginning with number `part`, against the manifest."""
        largest_first = sorted(self.manifest.files.items(), key=lambda item: -item[1].bytes)
        for name, record in largest_first[part::num_parts]:
            check_content(self.folder, name, record)

    def state(self) -> TrainState:
        """The run's position."""
        path = self.folder / STATE_NAME
        return TrainState.from_json(path.read_text(encoding="utf-8", errors="replace"), str(path))

    def names(self, kind: str = PARAMETER) -> list[str]:
        """Names of the tensors of a kind, sorted."""
        return sorted(name for name, kinds in self._index.items() if kind in kinds)

    def kinds(self, name: str) -> list[str]:
        """Kinds stored for a name, sorted."""
        return sorted(self._index.get(name, ()))

    def shape(self, name: str, kind: str = PARAMETER) -> Shape:
        """Global shape of a tensor."""
        return self._stored(name, kind).shape

    def read(
        self, name: str, kind: str = PARAMETER, offset: Shape | None = None, shape: Shape | None = None
    ) -> torch.Tensor:
        """The region of `shape` at `offset` of a tensor, on the CPU, bit for bit; without them the whole tensor.

        Errors: CheckpointError where the tensor is not stored, the region leaves it, or a file cannot be read.
        """
        stored = self._stored(name, kind)
        offset = offset or (0,) * len(stored.shape)
        shape = stored.shape if shape is None else tuple(shape)
        wanted: Box = (tuple(offset), shape)
        if len(shape) != len(stored.shape) or any(
            o < 0 or o + n > size for o, n, size in zip(offset, shape, stored.shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.folder}: {name} ({kind}) has shape {list(stored.shape)}, which does not hold {list(shape)} at "
                f"{list(offset)}"
            )
        shared = [(piece, box) for piece in stored.slices if (box := overlap(wanted, piece.box))]
        if len(shared) == 1 and shared[0][1] == wanted:
            return self._load(shared[0][0], wanted)
        result = torch.empty(shape, dtype=getattr(torch, stored.dtype))
        for piece, box in shared:
            result[_within(box, wanted)] = self._load(piece, box)
        return result

    def close(self) -> None:
        """Unmaps the files."""
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, name: str, kind: str) -> StoredTensor:
        try:
            return self._index[name][kind]
        except KeyError:
            known = ", ".join(self.kinds(name)) or "nothing"
            raise CheckpointError(
                f"{self.folder}: no {kind} of {name} in this checkpoint; it holds {known} of that name: the model or "
                "the optimizer is not the one that was saved"
            ) from None

    def _load(self, piece: StoredSlice, box: Box) -> torch.Tensor:
        path = self.folder / piece.file
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(path, framework="pt")
            return self._files[piece.file].get_slice(piece.key)[_within(box, piece.box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {piece.key} cannot be read ({error})") from error


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Index of `box` in a tensor that holds `outer`."""
    starts = (a - b for a, b in zip(box[0], outer[0], strict=True))
    return tuple(slice(start, start + length) for start, length in zip(starts, box[1], strict=True))
