"""The layers: linear maps, RMSNorm, attention, MLP, and the residual layer that puts them together.

Parameters are fp32; every matrix is cast to the stream's type at each use, so autograd adds up the gradients of all
loops in fp32. Matrices are [out, in].

Shapes: B rows, S sequence, s local share of it, D width, H query heads, K key/value heads, C channels of a head.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.model.attention_mask import Context, attend, rotate
from pretrain.model.cache import CacheSlot
from pretrain.model.dropout import Dropout
from pretrain.model.ops import TensorOps

Part = Literal["prelude", "core", "coda"]


class ModelParameter(nn.Parameter):
    """The type of a parameter that `mark` has marked; nothing is an instance of it."""

    tensor_partition_dim: int | None
    tensor_model_parallel: bool
    sequence_parallel: bool
    use_muon: bool


def mark(
    parameter: nn.Parameter, ops: TensorOps, partition_dim: int | None = None, muon: bool = False
) -> ModelParameter:
    """The parameter with the attributes that optimizer, gradient norm and checkpoints read (docs/design.md)."""
    marked = cast(ModelParameter, parameter)
    marked.tensor_partition_dim = partition_dim if ops.size > 1 else None
    marked.tensor_model_parallel = marked.tensor_partition_dim is not None
    marked.sequence_parallel = ops.sequence_parallel and partition_dim is None
    marked.use_muon = muon
    return marked


class Linear(nn.Module):
    """y = x W^T without bias; `partition_dim` 0 shards the outputs, 1 the inputs, None nothing."""

    def __init__(
        self, in_width: int, out_width: int, ops: TensorOps, partition_dim: int | None = None, muon: bool = False
    ) -> None:
        super().__init__()
        shape = [out_width, in_width]
        if partition_dim is not None:
            shape[partition_dim] //= ops.size
        self.weight = mark(nn.Parameter(torch.empty(shape)), ops, partition_dim, muon)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a learned weight if the model has them; statistics in fp32."""

    def __init__(self, width: int, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        self.width, self.eps = width, cfg.norm_eps
        self.weight = mark(nn.Parameter(torch.ones(width)), ops) if cfg.norm_weight else None

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, (self.width,), weight, self.eps)


class ValueTable(nn.Module):
    """Value embeddings of one layer: tokens [B, S] -> [B, S, K, C]; the table is sharded by heads."""

    def __init__(self, cfg: ModelConfig, kv_heads: int, ops: TensorOps) -> None:
        super().__init__()
        self.channels = cfg.head_channels
        shape = (cfg.padded_vocab_size, kv_heads * cfg.head_channels // ops.size)
        self.weight = mark(nn.Parameter(torch.empty(shape)), ops, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).unflatten(-1, (-1, self.channels))


class Attention(nn.Module):
    """Causal attention whose queries may come from another tensor than its keys and values (FLT)."""

    # Absent (None) in most families and layers; what uses one runs only where it exists.
    query_bias: Any
    key_bias: Any
    value_table: Any
    value_gate: Any

    def __init__(self, cfg: ModelConfig, part: Part, index: int, ops: TensorOps) -> None:
        super().__init__()
        self.ops, self.channels, self.gate_channels = ops, cfg.head_channels, cfg.value_gate_channels
        self.layout, self.dropout = cfg.rope_layout, Dropout(cfg.dropout, f"{part}.{index}.attention")
        self.window = cfg.window_of(part, index)
        self.norm_eps = (cfg.qk_norm_eps or 2.0**-23) if cfg.qk_norm else None
        width, heads, kv_heads = cfg.width_of(part), cfg.heads_of(part), cfg.kv_heads_of(part)
        self.first_head = ops.rank * (heads // ops.size)
        self.query = Linear(width, heads * self.channels, ops, 0, muon=True)
        self.key = Linear(width, kv_heads * self.channels, ops, 0, muon=True)
        self.value = Linear(width, kv_heads * self.channels, ops, 0, muon=True)
        self.output = Linear(heads * self.channels, width, ops, 1, muon=True)
        self.query_bias = self.key_bias = self.value_table = self.value_gate = None
        if cfg.qk_bias:
            self.query_bias = mark(nn.Parameter(torch.zeros(heads // ops.size, self.channels)), ops, 0)
            self.key_bias = mark(nn.Parameter(torch.zeros(kv_heads // ops.size, self.channels)), ops, 0)
        if cfg.has_value_embedding(part, index):
            self.value_table = ValueTable(cfg, kv_heads, ops)
            self.value_gate = Linear(self.gate_channels, kv_heads, ops, 0)

    def forward(
        self, x: Tensor, query_source: Tensor | None, ctx: Context, values: Tensor | None, cache: CacheSlot | None
    ) -> Tensor:
        """x [B, s, D] normalised, `query_source` the same shape (None: x), `values` [B, S, K, C] looked up."""
        x = self.ops.enter(x)
        source = x if query_source is None else self.ops.enter(query_source)
        q = self.query(source).unflatten(-1, (-1, self.channels))
        k = self.key(x).unflatten(-1, (-1, self.channels))
        v = self.value(x).unflatten(-1, (-1, self.channels))
        if self.query_bias is not None:
            q, k = q + self.query_bias.to(q.dtype), k + self.key_bias.to(k.dtype)
        if ctx.cos is not None and ctx.sin is not None:
            q, k = rotate(q, ctx.cos, ctx.sin, self.layout), rotate(k, ctx.cos, ctx.sin, self.layout)
        if self.norm_eps is not None:
            q, k = (
                F.rms_norm(q, (self.channels,), None, self.norm_eps),
                F.rms_norm(k, (self.channels,), None, self.norm_eps),
            )
        if values is not None:
            gate = 2 * torch.sigmoid(self.value_gate(x[..., : self.gate_channels]))
            v = v + gate[..., None] * values.to(v.dtype)
        if cache is not None:
            k, v = cache.update(k, v)
        y = attend(q, k, v, ctx, self.window, self.dropout, self.first_head)
        return self.ops.leave(self.output(y.flatten(-2)))


class MLP(nn.Module):
    """Squared ReLU: W_down(scale relu(W_up x)^2). SwiGLU: W_down(silu(W_gate x) * W_up x)."""

    def __init__(self, cfg: ModelConfig, part: Part, ops: TensorOps) -> None:
        super().__init__()
        self.ops, self.scale = ops, cfg.relu2_scale
        width, ffn_width = cfg.width_of(part), cfg.ffn_width_of(part)
        self.gate = Linear(width, ffn_width, ops, 0, muon=True) if cfg.mlp == "swiglu" else None
        self.up = Linear(width, ffn_width, ops, 0, muon=True)
        self.down = Linear(ffn_width, width, ops, 1, muon=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ops.enter(x)
        up = self.up(x)
        hidden = self.scale * F.relu(up).square() if self.gate is None else F.silu(self.gate(x)) * up
        return self.ops.leave(self.down(hidden))


class Layer(nn.Module):
    """One residual layer.

    pre:      x += attn(Norm(x)); x += mlp(Norm(x))
    sandwich: x = Norm(x + attn(Norm(x))); x = Norm(x + mlp(Norm(x)))          (Huginn)

    `feedback` is the previous loop's state [B, s, D]; `first` [B, 1 or s, 1] marks rows (tokens) in their first loop,
    which have none. Depending on `mode`, it supplies the queries, normalised by this layer's own attention norm
    (attention), or is added to the stream (residual): x = Norm(x + h).
    """

    def __init__(self, cfg: ModelConfig, part: Part, index: int, ops: TensorOps) -> None:
        super().__init__()
        width = cfg.width_of(part)
        feedback = cfg.recurrence.feedback if part == "core" else "none"
        self.queries_from_feedback = feedback == "attention" or (feedback == "attention_first" and index == 0)
        self.attention_norm = RMSNorm(width, cfg, ops)
        self.attention = Attention(cfg, part, index, ops)
        self.mlp_norm = RMSNorm(width, cfg, ops)
        self.mlp = MLP(cfg, part, ops)
        sandwich = cfg.block == "sandwich"
        self.attention_post_norm = RMSNorm(width, cfg, ops) if sandwich else nn.Identity()
        self.mlp_post_norm = RMSNorm(width, cfg, ops) if sandwich else nn.Identity()
        self.feedback_norm = RMSNorm(width, cfg, ops) if feedback == "residual" else None
        self.ops, self.dropout = ops, Dropout(cfg.dropout, f"{part}.{index}.mlp")

    def forward(
        self,
        x: Tensor,
        ctx: Context,
        values: Tensor | None = None,
        feedback: Tensor | None = None,
        first: Tensor | None = None,
        cache: CacheSlot | None = None,
    ) -> Tensor:
        if self.feedback_norm is not None and feedback is not None:
            assert first is not None
            x = torch.where(first, x, self.feedback_norm(x + feedback))
        normed = self.attention_norm(x)
        source = None
        if self.queries_from_feedback and feedback is not None:
            assert first is not None
            source = torch.where(first, normed, self.attention_norm(feedback))
        x = self.attention_post_norm(x + self.attention(normed, source, ctx, values, cache))
        return self.mlp_post_norm(x + self.dropout(self.mlp(self.mlp_norm(x)), ctx.local_noise(self.ops)))
