"""docs/parallelism.md says of every parameter of every family where it lies and whose gradient is summed."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from pretrain.config.families import FAMILIES, make_model_config
from pretrain.config.model import AuxiliaryConfig, ModelConfig
from pretrain.model.looped import LoopedLM, Stage
from pretrain.model.ops import TensorOps
from tests.helpers import REPOSITORY

PAGE = REPOSITORY / "docs/parallelism.md"
SIZES: dict[str, Any] = {
    "width": 32, "num_heads": 4, "ffn_width": 64, "vocab_size": 256, "context_length": 16, "core_layers": 4,
}  # fmt: skip
MODELS = {
    **{family: make_model_config(family, **SIZES) for family in FAMILIES},  # type: ignore[arg-type]
    "parcae, untied": make_model_config("parcae", **SIZES, tie_embeddings=False),
    "blindspot, biases": make_model_config("blindspot", **SIZES, qk_bias=True),
    "parcae, auxiliary losses": make_model_config(
        "parcae", **SIZES, auxiliary=AuxiliaryConfig(state_predictor=True, loop_heads=2, exit_gate=True)
    ),
    "flt_res, norm weights": make_model_config("flt_res", **SIZES, norm_weight=True),
}


class Line(NamedTuple):
    """One line of the table."""

    patterns: list[str]
    tensor: str
    pipeline: str
    summed: str


@cache
def lines() -> list[Line]:
    """Of the table whose first column is called `parameters`."""
    _, table = PAGE.read_text().split("| parameters |", 1)
    rows = [row.strip("|").split("|") for row in table.partition("\n\n")[0].splitlines()[2:]]
    return [Line([p.strip(" `") for p in row[0].split(",")], *(cell.strip() for cell in row[1:])) for row in rows]


def line_of(name: str) -> Line:
    """The one line that a parameter stands in."""
    found = [line for line in lines() if any(fnmatchcase(name, pattern) for pattern in line.patterns)]
    assert len(found) == 1, f"{name} stands in {len(found)} lines"
    return found[0]


class TwoRanks(TensorOps):
    """As on one of two tensor-parallel ranks."""

    size = 2

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel


def parameters(cfg: ModelConfig, stage: Stage | None = None, ops: TensorOps | None = None) -> dict[str, Any]:
    with torch.device("meta"):
        return dict(LoopedLM(cfg, ops, stage).named_parameters())


@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallel_ranks(model: str) -> None:
    whole = parameters(MODELS[model])
    for sequence_parallel in (False, True):
        shards = parameters(MODELS[model], ops=TwoRanks(sequence_parallel))
        assert shards.keys() == whole.keys()
        for name, shard in shards.items():
            line, shape = line_of(name), list(whole[name].shape)
            dim = {"rows": 0, "columns": 1, "replicated": None}[line.tensor.split(" ")[0]]
            if dim is not None:
                shape[dim] //= 2
            assert list(shard.shape) == shape, name
            assert (shard.tensor_partition_dim, shard.tensor_model_parallel) == (dim, dim is not None), name
            assert line.summed == ("yes" if dim is None else "no"), name
            assert shard.sequence_parallel == (sequence_parallel and line.summed == "yes"), name


@pytest.mark.parametrize("model", MODELS)
def test_pipeline_ranks(model: str) -> None:
    cfg = MODELS[model]
    stages = [Stage(rank == 0, rank == 3, range(rank, rank + 1)) for rank in range(4)]
    held = [parameters(cfg, stage) for stage in stages]
    for name in parameters(cfg):
        part, index = name.split(".")[:2]
        layer = {"prelude": 0, "coda": 3, "core": int(index) if part == "core" else None}.get(part)
        expected = {
            "first": [0], "last": [3], "its layer's": [layer], "first; where tied, a copy on the last": [0]
        }[line_of(name).pipeline]  # fmt: skip
        if "where tied" in line_of(name).pipeline and cfg.tie_embeddings:
            expected.append(3)
        assert [rank for rank in range(4) if name in held[rank]] == expected, name


def test_no_line_is_left_over() -> None:
    names = {name for cfg in MODELS.values() for name in parameters(cfg)}
    for line in lines():
        for pattern in line.patterns:
            assert any(fnmatchcase(name, pattern) for name in names), pattern
