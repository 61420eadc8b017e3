"""The layer against its formulas, written out token by token: attention injection, value embeddings, grouped heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrain.model.attention_mask import make_context
from pretrain.model.layers import Layer
from tests.model.tiny import random_model, tiny_config


def _norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotated(x: Tensor, position: int, base: float = 50_000.0) -> Tensor:
    """One head's channels [C] at a position: pairs (2j, 2j + 1) turned by position * base^(-2j / C)."""
    out = x.clone()
    for j in range(len(x) // 2):
        angle = position * base ** (-2 * j / len(x))
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def _attention(layer: Layer, source: Tensor, x: Tensor, values: Tensor | None) -> Tensor:
    """Queries from `source`, keys and values from x, both [S, D] normalised; `values` [S, K, C]."""
    attention, channels = layer.attention, layer.attention.channels
    q, k, v = (
        m(y).unflatten(-1, (-1, channels))
        for m, y in ((attention.query, source), (attention.key, x), (attention.value, x))
    )
    if values is not None:
        v = v + 2 * torch.sigmoid(attention.value_gate(x[:, :8]))[..., None] * values
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        shared = head // group
        keys = [_norm(_rotated(k[j, shared], j), eps=2.0**-23) for j in range(len(x))]
        for i in range(len(x)):
            query = _norm(_rotated(q[i, head], i), eps=2.0**-23)
            scores = torch.stack([query @ keys[j] for j in range(i + 1)]) / math.sqrt(channels)
            out[i, head] = scores.softmax(0) @ v[: i + 1, shared]
    return attention.output(out.flatten(-2))


@pytest.mark.parametrize("num_kv_heads", [None, 1])
@pytest.mark.parametrize("name", ["0", "1"])
def test_queries_come_from_the_previous_state_after_the_first_loop(name: str, num_kv_heads: int | None) -> None:
    model = random_model(tiny_config("parcae_flt", num_kv_heads=num_kv_heads), dtype=torch.float64)
    layer, generator = model.core[name], torch.Generator().manual_seed(0)
    x, h = (torch.randn(2, 5, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(29, (2, 5), generator=generator)
    values = model.look_up_values("core", tokens)[int(name)]
    assert (values is not None) == (name == "0")
    ctx = make_context(model.cfg, 5, x.device, x.dtype)
    with torch.no_grad():
        own = layer(x, ctx, values, feedback=h, first=torch.tensor([True, False])[:, None, None])
        for row in range(2):
            normed = _norm(x[row], layer.attention_norm.weight)
            # The state is normalised by the layer's own attention norm; a row in its first loop attends to itself.
            source = normed if row == 0 else _norm(h[row], layer.attention_norm.weight)
            attended = _attention(layer, source, normed, None if values is None else values[row])
            y = x[row] + attended
            up = layer.mlp.up(_norm(y, layer.mlp_norm.weight))
            expected = y + layer.mlp.down(0.5 * up.clamp(min=0) ** 2)
            # RoPE tables are fp32.
            torch.testing.assert_close(own[row], expected, atol=1e-5, rtol=0)
