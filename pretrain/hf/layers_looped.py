"""Layers of the looped model, how the input enters a loop, and the state that the loops start from.

Shapes: B rows, S new tokens, K all tokens, D width, d_h core width, H query heads, G key/value heads, C channels of a
head.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache_looped import Entries, LoopedCache, Slot
from .configuration_looped import LoopedConfig


class Context(NamedTuple):
    """What attention shares over layers and loops."""

    cos: Tensor | None
    """fp32 [B or 1, 1, S, C/2]; None with learned positions."""
    sin: Tensor | None
    full_mask: Tensor | None
    """bool [B or 1, 1, S, K], True where a query may look; None where causal order is all."""
    window_mask: Tensor | None
    cache: LoopedCache | None
    causal: bool
    """Whether queries and keys are the same tokens; a compiled graph must not compare their numbers."""


class LoopedEmbedding(nn.Embedding):
    """The table of tokens, and the head where the two are tied.

    Both uses are calls of this module: hooks that bring weights from a disk, from another device or from other ranks
    (accelerate, FSDP) run when the module that owns them is called, and a weight that is read elsewhere is not there.
    """

    @classmethod
    def of(cls, table: nn.Embedding) -> LoopedEmbedding:
        """`table` itself, or a module of this kind with its parameter."""
        if isinstance(table, cls):
            return table
        rows, width = table.weight.shape
        own = cls(rows, width, padding_idx=table.padding_idx, device="meta")
        own.weight = table.weight
        return own

    def forward(self, x: Tensor, as_head: bool = False) -> Tensor:
        """ids x [B, S] -> embeddings [B, S, D]; as the head, x [B, S, D] -> logits [B, S, V]."""
        return F.linear(x, self.weight) if as_head else super().forward(x)


class LoopedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a learned weight if the model has them."""

    def __init__(self, width: int, config: LoopedConfig) -> None:
        super().__init__()
        self.width, self.eps = width, config.norm_eps
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), None if self.weight is None else self.weight.to(x.dtype), self.eps)


def rope_tables(config: LoopedConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2j/C): positions [B or 1, S] -> two fp32 [B or 1, 1, S, C/2]."""
    exponents = torch.arange(config.head_dim // 2, device=positions.device, dtype=torch.float64) * 2 / config.head_dim
    angles = positions.double()[:, None, :, None] / torch.pow(float(config.rope_base), exponents)
    cos, sin = angles.cos().float(), angles.sin().float()
    if config.rope_direction == "backward":
        sin = -sin
    if config.rope_table == "bf16":
        cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """RoPE on x [B, H, S, C]: pairs (2j, 2j+1) if `layout` is interleaved, (j, j + C/2) if half."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if layout == "interleaved" else x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, a * sin + b * cos
    if layout == "interleaved":
        return torch.stack((first, second), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((first, second), dim=-1).to(x.dtype)


class LoopedAttention(nn.Module):
    """Causal attention whose queries may come from another tensor than its keys and values."""

    # None in models and layers that have no use for them; what uses one runs only where it exists.
    query_bias: Any
    key_bias: Any
    value_table: Any
    value_gate: Any

    def __init__(self, config: LoopedConfig, part: str, index: int) -> None:
        super().__init__()
        width, heads, kv_heads, _ = config.sizes_of(part)
        self.channels, self.gate_channels = config.head_dim, config.value_gate_channels
        self.layout, self.dropout, self.window = config.rope_layout, config.dropout, config.window_of(part, index)
        self.norm_eps = config.qk_norm_eps if config.qk_norm else None
        self.query = nn.Linear(width, heads * self.channels, bias=False)
        self.key = nn.Linear(width, kv_heads * self.channels, bias=False)
        self.value = nn.Linear(width, kv_heads * self.channels, bias=False)
        self.output = nn.Linear(heads * self.channels, width, bias=False)
        self.query_bias = nn.Parameter(torch.zeros(heads, self.channels)) if config.qk_bias else None
        self.key_bias = nn.Parameter(torch.zeros(kv_heads, self.channels)) if config.qk_bias else None
        gated = config.has_value_embedding(part, index)
        self.value_table = nn.Embedding(config.vocab_size, kv_heads * self.channels) if gated else None
        self.value_gate = nn.Linear(self.gate_channels, kv_heads, bias=False) if gated else None

    def forward(
        self, x: Tensor, source: Tensor, ctx: Context, values: Tensor | None, slot: Slot, running: Tensor | None
    ) -> Tensor:
        """x, source [B, S, D] normalised; values [B, S, G C] looked up."""
        q, k, v = self._project(x, source, ctx, values)
        if ctx.cache is not None:
            k, v = ctx.cache.extend(slot, Entries(k, v), running)
        mask = ctx.full_mask if self.window is None else ctx.window_mask
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and ctx.causal,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return self.output(y.transpose(1, 2).flatten(-2))

    def _project(self, x: Tensor, source: Tensor, ctx: Context, values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self.query(source).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        v = self.value(x).unflatten(-1, (-1, self.channels))
        if self.query_bias is not None:
            q, k = q + self.query_bias[:, None].to(q.dtype), k + self.key_bias[:, None].to(k.dtype)
        if ctx.cos is not None and ctx.sin is not None:
            q, k = rotate(q, ctx.cos, ctx.sin, self.layout), rotate(k, ctx.cos, ctx.sin, self.layout)
        if self.norm_eps is not None:
            q, k = (F.rms_norm(z, (self.channels,), None, self.norm_eps) for z in (q, k))
        if values is not None:
            gate = 2 * torch.sigmoid(self.value_gate(x[..., : self.gate_channels]))
            v = v + gate[..., None] * values.unflatten(-1, (-1, self.channels)).to(v.dtype)
        return q, k, v.transpose(1, 2)


class LoopedMLP(nn.Module):
    """Squared ReLU: W_down(scale relu(W_up x)^2). SwiGLU: W_down(silu(W_gate x) * W_up x)."""

    def __init__(self, config: LoopedConfig, part: str) -> None:
        super().__init__()
        width, _, _, ffn_width = config.sizes_of(part)
        self.scale = config.relu2_scale
        self.gate = nn.Linear(width, ffn_width, bias=False) if config.mlp == "swiglu" else None
        self.up = nn.Linear(width, ffn_width, bias=False)
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(self.scale * F.relu(up).square() if self.gate is None else F.silu(self.gate(x)) * up)


class LoopedLayer(GradientCheckpointingLayer):
    """One residual layer, pre-norm or sandwich. From loop 2 on `feedback`, the previous loop's state, may enter it."""

    def __init__(self, config: LoopedConfig, part: str, index: int) -> None:
        super().__init__()
        width = config.sizes_of(part)[0]
        feedback = config.feedback if part == "core" else "none"
        self.queries_from_feedback = feedback == "attention" or (feedback == "attention_first" and index == 0)
        self.attention_norm = LoopedRMSNorm(width, config)
        self.attention = LoopedAttention(config, part, index)
        self.mlp_norm = LoopedRMSNorm(width, config)
        self.mlp = LoopedMLP(config, part)
        sandwich = config.block == "sandwich"
        self.attention_post_norm = LoopedRMSNorm(width, config) if sandwich else nn.Identity()
        self.mlp_post_norm = LoopedRMSNorm(width, config) if sandwich else nn.Identity()
        self.feedback_norm = LoopedRMSNorm(width, config) if feedback == "residual" else None
        self.dropout = nn.Dropout(config.dropout)

    def look_up(self, input_ids: Tensor) -> Tensor | None:
        """Value embeddings [B, S, G C] of ids [B, S]; None without. They do not depend on the loop.

        A call of the layer, since FSDP gathers its weights for calls alone; of no checkpointed one, since nothing is
        worth computing twice.
        """
        return None if self.attention.value_table is None else nn.Module.__call__(self, input_ids)

    def forward(
        self, x: Tensor, ctx: Context | None = None, values: Tensor | None = None, slot: Slot | None = None,
        running: Tensor | None = None, feedback: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, S, D] -> [B, S, D]. Without a context x are ids, and what is wanted are their value embeddings."""
        if ctx is None:
            return self.attention.value_table(x)
        if self.feedback_norm is not None and feedback is not None:
            x = self.feedback_norm(x + feedback)
        source = normed = self.attention_norm(x)
        if self.queries_from_feedback and feedback is not None:
            source = self.attention_norm(feedback)
        x = self.attention_post_norm(x + self.attention(normed, source, ctx, values, slot, running))
        return self.mlp_post_norm(x + self.dropout(self.mlp(self.mlp_norm(x))))


class LoopedDrive(nn.Module):
    """e -> Bbar e and Abar: the diagonal injection's part that does not depend on the loop, in fp32."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.zoh = config.discretization == "zoh"
        self.A_log = nn.Parameter(torch.zeros(config.core_width))
        self.dt_bias = nn.Parameter(torch.full((config.core_width,), math.log(math.expm1(0.5 * math.log(5)))))
        self.B = nn.Linear(config.width, config.core_width, bias=False)

    def forward(self, e: Tensor) -> tuple[Tensor, Tensor]:
        a, dt = self.A_log.float().exp(), F.softplus(self.dt_bias.float())
        scale = -torch.expm1(-dt * a) / a if self.zoh else dt
        return (scale * self.B(e)).to(e.dtype), torch.exp(-dt * a)


class LoopedInjection(nn.Module):
    """How e and the last state enter a loop."""

    input: Any
    state: Any

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.kind, width = config.injection, config.core_width
        self.input = nn.Identity()
        if self.kind == "diagonal":
            self.input = LoopedDrive(config)
        elif self.kind == "concat":
            self.input = nn.Linear(config.width, width, bias=False)
        self.state = nn.Linear(width, width, bias=False) if self.kind == "concat" else None
        self.norm = LoopedRMSNorm(width, config) if self.kind == "input" else None
        self.interloop_norm = LoopedRMSNorm(width, config) if config.interloop_norm else None

    def forward(self, h: Tensor | None, drive: Any, first: bool) -> Any:
        """(u, h): the core's input, and the state (normalised, where set) that feedback sees.

        Without a state `drive` is e [B, S, D], and what comes back is its part of every loop: `drive` of later calls.
        """
        if h is None:
            return self.input(drive)
        if self.interloop_norm is not None and not first:
            h = self.interloop_norm(h)
        if self.kind == "diagonal":
            return (drive[1] * h + drive[0]).to(h.dtype), h
        if self.kind == "concat":
            return self.state(h) + drive, h
        if self.kind in ("add", "input"):
            return (h + drive if self.norm is None else self.norm(h + drive)), h
        return (drive if self.kind == "restart" else h), h


@lru_cache(maxsize=8)
def _quantiles(truncation: float | None, device: torch.device) -> Tensor:
    """Quantiles of N(0, 1), cut at +-truncation, at the midpoints of 2^16 equal slices."""
    u = (torch.arange(1 << 16, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
    if truncation is not None:
        low = 0.5 * math.erfc(truncation / math.sqrt(2))
        u = low + u * (1 - 2 * low)
    return torch.special.ndtri(u).float().to(device)


def _mix(x: Tensor) -> Tensor:
    """A bijective mix of 32-bit counters ("lowbias32" by C. Wellons), in int64 tensors holding 32 bits."""
    mask = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def initial_state(config: LoopedConfig, e: Tensor, positions: Tensor) -> Tensor:
    """h_0 [B, S, d_h]: a function of (state_seed, position, channel), the same on every device."""
    kind, width = config.state_init, config.core_width
    if kind == "input":
        return e
    if kind == "zero":
        return e.new_zeros(*e.shape[:2], width)
    word = torch.tensor((config.state_seed & 0xFFFFFFFF) ^ 0x9E3779B9, dtype=torch.int64, device=e.device)
    row = _mix(_mix(_mix(word)))
    places = _mix((row + positions.to(torch.int64) + 1) & 0xFFFFFFFF)[..., None]
    channels = torch.arange(1, width + 1, device=e.device, dtype=torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    bits = _mix((places + channels) & 0xFFFFFFFF) >> 16
    state = _quantiles(3.0 if kind == "like_init" else None, e.device)[bits]
    if kind == "like_init":
        state = state * config.state_std
    elif kind == "embed":
        state = state / math.sqrt(width)
    elif kind == "unit":
        state = (state - state.mean(-1, keepdim=True)) / state.std(-1, keepdim=True)
    return state.to(e.dtype).expand(e.shape[0], -1, -1)
