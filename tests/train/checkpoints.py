"""Small checkpoints for the tests, and what a single process needs to write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pretrain.config.schema import CheckpointConfig
from pretrain.train.checkpoint.format import PARAMETER, TensorSlice
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.state import TrainState

KINDS = (PARAMETER, "exp_avg", "exp_avg_sq")
SHAPES = {"core.0.up.weight": (8, 6), "core.0.down.weight": (6, 8), "core.0.norm.weight": (6,), "scale": ()}
SHARDED = {"core.0.up.weight": 0, "core.0.down.weight": 1}
CONFIG_TEXT = "run:\n  name: test\n"


def tensors(step: int) -> dict[tuple[str, str], Tensor]:
    """The tensors of a run at a step: other bits for each step, name and kind, NaN and denormal numbers among them."""
    generator = torch.Generator().manual_seed(step)
    made = {}
    for name, shape in SHAPES.items():
        for kind in KINDS:
            bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)
            made[name, kind] = bits.view(torch.float32)
    return made


def slices(step: int, tensor_size: int = 1) -> Iterator[TensorSlice]:
    """All slices that `tensor_size` ranks would offer, each once."""
    for (name, kind), tensor in tensors(step).items():
        shape, dim = tuple(tensor.shape), SHARDED.get(name)
        if dim is None:
            yield TensorSlice(name, kind, shape, (0,) * len(shape), tensor)
            continue
        width = shape[dim] // tensor_size
        for rank, part in enumerate(tensor.split(width, dim)):
            offset = [0, 0]
            offset[dim] = rank * width
            yield TensorSlice(name, kind, shape, tuple(offset), part)


def state(step: int) -> TrainState:
    """A state whose fields all differ from their defaults."""
    return TrainState(
        step=step, tokens=step * 512, skipped_steps=2, skipped_in_a_row=1, adamw_steps=step - 2,
        sampler={"seed": 5}, data={"row": step * 8, "epoch": 0},
        recent_losses=[1.5, 0.1], rewinds=[[1, 2]],
    )  # fmt: skip


def writer(
    run: Path, *, max_file_bytes: int = 1 << 30, ranks: Ranks | None = None, **config: object
) -> CheckpointWriter:
    """A writer for one process, or for `ranks`."""
    settings = CheckpointConfig(**config)  # type: ignore[arg-type]
    return CheckpointWriter(run, settings, CONFIG_TEXT, ranks or Ranks(), timeout_sec=30, max_file_bytes=max_file_bytes)


def save(run: Path, *steps: int, **config: object) -> None:
    """Saves these steps with one process."""
    one = writer(run, **config)
    for step in steps:
        one.save(slices(step), state(step))
    one.wait()


def assert_holds(reader: CheckpointReader, step: int) -> None:
    """The checkpoint holds exactly the tensors and the state of `step`, bit for bit."""
    assert reader.step == step
    for (name, kind), expected in tensors(step).items():
        assert same_bits(reader.read(name, kind), expected), (name, kind)
    assert reader.names() == sorted(SHAPES)
    assert all(reader.kinds(name) == sorted(KINDS) for name in SHAPES)
    assert reader.state() == state(step)
    assert reader.config_path.read_text() == CONFIG_TEXT


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that also holds for NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))
