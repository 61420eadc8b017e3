"""Initial weights: moments, zero outputs, orthogonality; a function of seed and name, whatever the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.config.model import AuxiliaryConfig
from pretrain.model.init import init_parameters
from pretrain.model.looped import LoopedLM
from pretrain.model.ops import TensorOps
from tests.model.tiny import tiny_config

WIDTH = 64


def _initialised(family: str, ops: TensorOps | None = None, seed: int = 3, **settings: Any) -> dict[str, Tensor]:
    sizes = {"width": WIDTH, "num_heads": 4, "ffn_width": 256, "vocab_size": 512, "value_gate_channels": 32}
    cfg = tiny_config(family, settings.pop("recurrence", None), **sizes | settings)
    model = LoopedLM(cfg, ops)
    init_parameters(model, cfg, seed, model.ops)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_scaled_zero_starts_at_the_published_point() -> None:
    weights = _initialised("parcae")
    decay = torch.exp(
        -torch.nn.functional.softplus(weights["injection.input.dt_bias"]) * weights["injection.input.A_log"].exp()
    )
    torch.testing.assert_close(decay, torch.full((WIDTH,), math.sqrt(1 / 5)))
    assert torch.equal(weights["injection.input.B.weight"], torch.eye(WIDTH))
    singular = torch.linalg.svdvals(weights["output_projection.weight"])
    torch.testing.assert_close(singular, torch.full((WIDTH,), 0.632456), atol=1e-5, rtol=0)
    for name, weight in weights.items():
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name


def test_scaled_zero_matrices_are_orthogonal_with_the_gain_of_their_size() -> None:
    weights = _initialised("parcae")
    std = math.sqrt(2 / (5 * WIDTH))
    for layer in ("prelude.0", "core.1", "coda.0"):
        for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
            weight = weights[f"{layer}.{name}.weight"]
            gain = std * math.sqrt(max(weight.shape))
            torch.testing.assert_close(weight.T @ weight, gain**2 * torch.eye(weight.shape[1]), atol=1e-5, rtol=0)
            assert float(weight.std()) == pytest.approx(std, rel=0.02), name


def test_a_core_of_another_width_gets_orthogonal_maps() -> None:
    weights = _initialised("parcae", core_width=96)
    assert weights["injection.input.B.weight"].shape == (96, WIDTH)
    torch.testing.assert_close(torch.linalg.svdvals(weights["injection.input.B.weight"]), torch.ones(WIDTH))
    singular = torch.linalg.svdvals(weights["output_projection.weight"])
    torch.testing.assert_close(singular, torch.full((WIDTH,), 0.632456), atol=1e-5, rtol=0)


def test_embeddings_and_value_embeddings() -> None:
    weights = _initialised("parcae")
    assert float(weights["embedding.weight"].std()) == pytest.approx(math.sqrt(2 / (5 * WIDTH)), rel=0.02)
    assert float(weights["coda.0.attention.value_table.weight"].std()) == pytest.approx(1.0, rel=0.02)
    gate = weights["coda.0.attention.value_gate.weight"]
    assert float(gate.abs().max()) <= 1 / math.sqrt(32)
    assert float(gate.std()) == pytest.approx(1 / math.sqrt(3 * 32), rel=0.2)
    other = _initialised("blindspot", embedding_std=1.0)
    assert float(other["embedding.weight"].std()) == pytest.approx(1.0, rel=0.02)


def test_scaled_init_of_the_recurrent_depth_model() -> None:
    weights = _initialised("rdm", recurrence={"mean_loops": 6.0})
    std = 0.98658 * math.sqrt(2 / (5 * WIDTH))  # a normal law cut at three of its standard deviations
    for name in ("prelude.0.attention.query", "core.0.mlp.gate", "injection.state", "injection.input"):
        assert float(weights[f"{name}.weight"].std()) == pytest.approx(std, rel=0.04), name
    output_std = 0.98658 * math.sqrt(1 / (5 * WIDTH * (1 + 6 * 2 + 1)))
    for name in ("core.1.attention.output", "coda.0.mlp.down"):
        assert float(weights[f"{name}.weight"].std()) == pytest.approx(output_std, rel=0.04), name


def test_normal_init() -> None:
    weights = _initialised("blindspot", recurrence={"mean_loops": 4.0})
    assert float(weights["core.0.attention.query.weight"].std()) == pytest.approx(0.02, rel=0.04)
    assert float(weights["embedding.weight"].std()) == pytest.approx(0.02, rel=0.04)
    expected = 0.02 / math.sqrt(2 * 4 * 2)
    assert float(weights["core.1.mlp.down.weight"].std()) == pytest.approx(expected, rel=0.04)


def _assert_uniform(weight: Tensor, bound: float, name: str) -> None:
    """U(-bound, bound), by its range, mean and spread."""
    assert 0.98 * bound < float(weight.abs().max()) <= bound, name
    assert abs(float(weight.mean())) < 0.05 * bound, name
    assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03), name


@pytest.mark.parametrize("family", ["blindspot", "rdm", "flt", "lt_input"])
def test_uniform_init_is_what_torch_gives_modules_by_default(family: str) -> None:
    """Tables N(0, 1) and every matrix U(+-1 / sqrt(fan_in)): of layers, of an untied head, of RDM's [h; e]."""
    weights = _initialised(family, init="uniform", auxiliary=AuxiliaryConfig(loop_heads=1))
    for name, weight in weights.items():
        if name in ("embedding.weight", "position_embedding.weight"):
            assert float(weight.std()) == pytest.approx(1.0, rel=0.05), name
            assert float(weight.abs().max()) > 2.5, name
        elif weight.ndim == 2:
            fan_in = 2 * WIDTH if name.startswith("injection.") else weight.shape[1]
            _assert_uniform(weight, 1 / math.sqrt(fan_in), name)
        else:
            assert (weight == 1).all(), name
    assert ("head.weight" in weights) == (family in ("flt", "lt_input"))
    like_torch = torch.nn.Linear(WIDTH, 256, bias=False).weight
    _assert_uniform(like_torch.detach(), 1 / math.sqrt(WIDTH), "torch")


def test_uniform_init_leaves_the_tables_another_std() -> None:
    weights = _initialised("blindspot", init="uniform", embedding_std=0.02)
    for name in ("embedding.weight", "position_embedding.weight"):
        assert float(weights[name].std()) == pytest.approx(0.02, rel=0.05)


def test_weights_depend_on_seed_and_name_alone() -> None:
    first = _initialised("parcae")
    torch.manual_seed(1234)
    again = _initialised("parcae")
    assert all(torch.equal(first[name], again[name]) for name in first)
    deeper = _initialised("parcae", prelude_layers=3)
    assert torch.equal(deeper["core.0.mlp.up.weight"], first["core.0.mlp.up.weight"])
    other = _initialised("parcae", seed=4)
    assert not torch.equal(other["core.0.mlp.up.weight"], first["core.0.mlp.up.weight"])
    matrices = [w for name, w in first.items() if name.endswith(("query.weight", "key.weight", "value.weight"))]
    assert all(not torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])


class _Half(TensorOps):
    """One of two tensor-parallel ranks, for its shapes."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.mark.parametrize("family", ["parcae", "rdm", "flt", "blindspot"])
def test_the_shards_of_two_ranks_make_the_whole(family: str) -> None:
    whole = _initialised(family)
    models = [_initialised(family, _Half(rank)) for rank in range(2)]
    sharded = 0
    for name, weight in whole.items():
        parts = [model[name] for model in models]
        dim = next((d for d in range(weight.ndim) if parts[0].shape[d] != weight.shape[d]), None)
        sharded += dim is not None
        joined = parts[0] if dim is None else torch.cat(parts, dim)
        assert torch.equal(joined, weight), name
        assert dim is not None or torch.equal(*parts), name
    assert sharded >= 7
