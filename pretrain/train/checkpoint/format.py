"""What a checkpoint's folder holds: tensor slices and their index, and the manifest that shows it is whole."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from pretrain.errors import CheckpointError
from pretrain.foreign import check_name, parse_json

FORMAT_VERSION = 1
PARAMETER = "parameter"
"""Kind of a weight; the other kinds are the optimizer's state keys."""
INDEX_NAME = "index.json"
STATE_NAME = "state.json"
CONFIG_NAME = "config.yaml"
MANIFEST_NAME = "manifest.json"
HASH = "xxh3_64"

_READ_BYTES = 4 << 20

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offset and shape."""


@dataclass(frozen=True)
class TensorSlice:
    """A box of a global tensor that this rank holds: `tensor` begins at `offset` of a tensor of `global_shape`."""

    name: str
    kind: str
    global_shape: Shape
    offset: Shape
    tensor: torch.Tensor


@dataclass(frozen=True)
class StoredSlice:
    """A box of a global tensor in a file."""

    file: str
    key: str
    offset: Shape
    shape: Shape

    @property
    def box(self) -> Box:
        """The part of the tensor that it holds."""
        return self.offset, self.shape


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, tiled by its slices."""

    dtype: str
    """torch's name, such as float32."""
    shape: Shape
    slices: list[StoredSlice]


Index = dict[str, dict[str, StoredTensor]]
"""name -> kind -> tensor"""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    bytes: int
    xxh3_64: str


@dataclass(frozen=True)
class Manifest:
    """The files of a complete checkpoint, by name; the manifest itself is not among them."""

    step: int
    files: dict[str, FileRecord]

    def to_text(self) -> str:
        """The text of manifest.json, the same for equal content; its last entry is the hash of the rest."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        body = {"format_version": FORMAT_VERSION, "step": self.step, "files": files}
        return json.dumps(body | {"self": xxhash.xxh3_64_hexdigest(json.dumps(body))}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, unchanged to the last byte since it was written; CheckpointError otherwise."""
    path = folder / MANIFEST_NAME
    content = _read_bytes(path)
    try:
        data = parse_json(content, str(path), CheckpointError, "the file is damaged")
        version = data["format_version"]
        records = data["files"].items()
        files = {check_name(n, f"{path}: a file", CheckpointError): FileRecord(**record) for n, record in records}
        manifest = Manifest(data["step"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a manifest ({type(error).__name__}: {error})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version is {version}, this version reads {FORMAT_VERSION}")
    numbers = [manifest.step, *(record.bytes for record in files.values())]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"{path}: not a manifest (the step or a number of bytes is no integer >= 0)")
    if manifest.to_text().encode() != content:  # every byte counts
        raise CheckpointError(f"{path}: altered since it was written (its own hash does not match)")
    return manifest


def check_size(folder: Path, name: str, record: FileRecord) -> None:
    """CheckpointError, naming the file, where it is missing or has another size than the manifest says."""
    path = folder / name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, though {MANIFEST_NAME} lists it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if size != record.bytes:
        raise CheckpointError(f"{path}: {size} bytes, {MANIFEST_NAME} says {record.bytes}")


def check_content(folder: Path, name: str, record: FileRecord) -> None:
    """CheckpointError, naming the file, where size or hash is not what the manifest says."""
    check_size(folder, name, record)
    found = file_record(folder / name).xxh3_64
    if found != record.xxh3_64:
        raise CheckpointError(f"{folder / name}: {HASH} is {found}, {MANIFEST_NAME} says {record.xxh3_64}")


def file_record(path: Path) -> FileRecord:
    """Size and hash of the file; CheckpointError where it cannot be read."""
    digest, buffer, size = xxhash.xxh3_64(), memoryview(bytearray(_READ_BYTES)), 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return FileRecord(size, digest.hexdigest())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> FileRecord:
    """Writes a safetensors file, makes it durable, and returns its record.

    `tensors`: contiguous, on the CPU. Errors: OSError, SafetensorError (which carries the system's message as text).
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)  # safetensors makes files that only their owner may read
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_record(path)


def index_to_text(index: Index) -> str:
    """The text of index.json."""
    tensors = {name: {kind: asdict(kinds[kind]) for kind in sorted(kinds)} for name, kinds in sorted(index.items())}
    return json.dumps({"format_version": FORMAT_VERSION, "tensors": tensors}, indent=1) + "\n"


def read_index(folder: Path) -> Index:
    """The index of `folder`; CheckpointError where it is not one. Its integrity is the manifest's affair."""
    path = folder / INDEX_NAME
    try:
        tensors = parse_json(_read_bytes(path), str(path), CheckpointError, "the file is damaged")["tensors"]
        return {
            name: {kind: _stored_tensor(stored, path) for kind, stored in kinds.items()}
            for name, kinds in tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an index ({type(error).__name__}: {error})") from error


def _stored_tensor(data: dict[str, Any], path: Path) -> StoredTensor:
    """Errors: CheckpointError for a file outside of the folder; KeyError, TypeError and ValueError for what is none."""
    slices = [
        StoredSlice(check_name(s["file"], f"{path}: file", CheckpointError), s["key"], _shape(s["offset"]),
                    _shape(s["shape"]))
        for s in data["slices"]
    ]  # fmt: skip
    if not isinstance(getattr(torch, data["dtype"], None), torch.dtype):
        raise ValueError(f"{data['dtype']!r} is no type of torch's")
    return StoredTensor(data["dtype"], _shape(data["shape"]), slices)


def _shape(numbers: Any) -> Shape:
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} is no list of integers >= 0")
    return tuple(numbers)


def untiled(index: Index) -> Iterator[str]:
    """What is wrong with each tensor that its slices do not cover exactly once; nothing for a sound index."""
    for name, kinds in index.items():
        for kind, stored in kinds.items():
            whole: Box = ((0,) * len(stored.shape), stored.shape)
            boxes = [s.box for s in stored.slices]
            overlapping = any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))
            inside = all(_volume(box) == 0 or overlap(whole, box) == box for box in boxes)
            if overlapping or not inside or sum(map(_volume, boxes)) != _volume(whole):
                listed = ", ".join(f"{list(shape)} at {list(offset)}" for offset, shape in boxes)
                yield f"{name} ({kind}) of shape {list(stored.shape)} is not tiled by {listed}"


def overlap(a: Box, b: Box) -> Box | None:
    """The box that two boxes of one tensor share; None where they share nothing."""
    starts, ends = [], []
    for start_a, length_a, start_b, length_b in zip(*a, *b, strict=True):
        starts.append(max(start_a, start_b))
        ends.append(min(start_a + length_a, start_b + length_b))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (tuple(starts), shape) if all(n > 0 for n in shape) else None


def _volume(box: Box) -> int:
    return math.prod(box[1])


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
