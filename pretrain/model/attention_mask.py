"""What a query may see, and where it stands: positions, RoPE tables and masks of a batch, made once per forward.

Plain causal attention needs no mask. Document boundaries, sliding windows and padding do: on CUDA in half precision
they run as variable-length flash attention (no mask is materialised), elsewhere as a boolean mask.

Shapes: B rows, S sequence, C channels of a head.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.model.counter import purposed
from pretrain.model.dropout import Dropout
from pretrain.model.ops import TensorOps, fp32_at_least


class Segments(NamedTuple):
    """Documents of a packed batch as runs of tokens, rows one after another."""

    boundaries: Tensor
    """int32 [documents + 1]: cumulative token counts."""
    row_ends: tuple[int, ...]
    """For each number of leading rows 0..B, how many documents they hold (host integers: no device sync)."""

    @staticmethod
    def of(document_ids: Tensor) -> Segments:
        """From document ids [B, S] (any labels that change at a border), best given on the CPU."""
        rows, length = document_ids.shape
        starts = torch.ones(rows, length, dtype=torch.bool, device=document_ids.device)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        offsets = starts.flatten().nonzero().flatten()
        boundaries = F.pad(offsets, (0, 1), value=rows * length).to(torch.int32)
        return Segments(boundaries, (0, *starts.sum(1).cumsum(0).tolist()))


class Context(NamedTuple):
    """Everything attention shares over layers and loops. Rows are the leading axis where a field has one."""

    cos: Tensor | None
    """[1 or B, S, 1, C/2] fp32, None with learned positions."""
    sin: Tensor | None
    full_mask: Tensor | None
    """bool [1 or B, 1, queries, keys], True where a query may look; None where causal order is all."""
    window_mask: Tensor | None
    """The same for layers with a sliding window."""
    boundaries: Tensor | None
    """Documents for variable-length attention (CUDA): int32 [documents + 1]."""
    row_ends: tuple[int, ...] = ()
    per_row: bool = False
    """Whether the tables above differ from row to row."""
    causal: bool = True
    """Whether queries and keys are the same tokens, so that causal order is all where there is no mask. Known here,
    since a compiled graph must not compare their numbers."""
    noise: Tensor | None = None
    """int32 [B, S]: what dropout's masks follow from in this loop; None where nothing is dropped."""

    def rows(self, count: int) -> Context:
        """The context of the first `count` rows."""

        def cut(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[0] == 1 else x[:count]

        boundaries = self.boundaries
        if boundaries is not None:
            boundaries = boundaries[: self.row_ends[count] + 1]
        noise = self.noise if self.noise is None else self.noise[:count]
        return Context(
            cut(self.cos), cut(self.sin), cut(self.full_mask), cut(self.window_mask), boundaries,
            self.row_ends[: count + 1], self.per_row, self.causal, noise,
        )  # fmt: skip

    def local_noise(self, ops: TensorOps) -> Tensor | None:
        """The share [B, s] of `noise` for the positions that this rank holds outside the sharded regions."""
        return self.noise if self.noise is None else self.noise[:, ops.local_sequence(self.noise.shape[1])]

    def in_loop(self, number: int) -> Context:
        """The context of one loop, in which dropout has masks of its own; `number` as by `Loops.number`."""
        return self if self.noise is None else self._replace(noise=purposed(self.noise, number))


def rope_tables(cfg: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2j/C) in fp32: positions [B or 1, S] -> two [B or 1, S, 1, C/2]."""
    half = cfg.head_channels // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float64) * 2 / cfg.head_channels
    # The angle is formed in fp64: in fp32 its error grows with the position (1e-4 rad at 2,048).
    angles = positions.double()[..., None] / torch.pow(torch.tensor(cfg.rope_base, dtype=torch.float64), exponents)
    cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]
    if cfg.rope_direction == "backward":
        sin = -sin
    if cfg.rope_table == "bf16":
        cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """RoPE on x [B, S, heads, C]: pairs (2j, 2j+1) if `layout` is interleaved, (j, j + C/2) if half."""
    dtype = x.dtype
    if layout == "interleaved":
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, a * sin + b * cos
    if layout == "interleaved":
        return torch.stack((first, second), dim=-1).flatten(-2).to(dtype)
    return torch.cat((first, second), dim=-1).to(dtype)


def _dense_mask(
    queries: Tensor, keys: Tensor, window: int | None, document_ids: Tensor | None, key_valid: Tensor | None
) -> Tensor:
    """bool [1 or B, 1, queries, keys] from places along the sequence (1-D), documents and valid keys."""
    distance = queries[:, None] - keys[None, :]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, queries, None] == document_ids[:, None, None, keys])
    if key_valid is not None:
        # A padding query would see no key at all; let it see itself, so that its softmax stays finite.
        mask = mask & key_valid[:, None, None, :] | (distance == 0)[None, None]
    return mask


def make_context(
    cfg: ModelConfig,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    segments: Segments | None = None,
    key_valid: Tensor | None = None,
    past: int = 0,
    noise: Tensor | None = None,
) -> Context:
    """The context of queries past..past+length-1 over keys 0..past+length-1.

    `positions` [B or 1, length] are the queries' positions (default: their places); `document_ids` [B, length]
    keep attention within documents (`segments`, their host-side form, is used by the CUDA kernels);
    `key_valid` bool [B, past + length] masks padding. With `noise` (`Context.noise`) attention drops weights, which no
    fused kernel does by given masks; so there is a mask as a tensor whatever the rest asks for.
    """
    queries = torch.arange(past, past + length, device=device)
    if positions is None:
        positions = queries[None]
    per_row = positions.shape[0] > 1 or document_ids is not None or key_valid is not None
    cos, sin = rope_tables(cfg, positions) if cfg.positions == "rope" else (None, None)
    windows = cfg.sliding_window is not None
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and past == 0 and key_valid is None
    flash = flash and noise is None
    if flash and document_ids is not None:
        segments = segments or Segments.of(document_ids)
        boundaries = segments.boundaries.to(device, non_blocking=True)
        return Context(cos, sin, None, None, boundaries, segments.row_ends, per_row)
    keys = torch.arange(past + length, device=device)
    # One query against a cache sees every key: no mask is needed then either.
    plain = document_ids is None and key_valid is None and (past == 0 or length == 1) and noise is None
    full = None if plain else _dense_mask(queries, keys, None, document_ids, key_valid)
    window = _dense_mask(queries, keys, cfg.sliding_window, document_ids, key_valid) if windows else None
    return Context(cos, sin, full, window, None, per_row=per_row, causal=past == 0, noise=noise)


def attend(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, window: int | None, dropout: Dropout, first_head: int = 0
) -> Tensor:
    """Softmax attention: q [B, Q, H, C], k and v [B, K, heads, C] -> [B, Q, H, C]. Heads may be grouped.

    `first_head` is the number of the first one of q in the whole layer.
    """
    grouped = q.shape[2] != k.shape[2]
    if ctx.noise is not None:
        return _attend_dropping(q, k, v, ctx, window, dropout, first_head)
    if ctx.boundaries is not None:
        return _attend_segments(q, k, v, ctx.boundaries, window, grouped)
    mask = ctx.full_mask if window is None else ctx.window_mask
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    causal = mask is None and ctx.causal
    if mask is not None and not ctx.per_row:
        mask = mask[0, 0]  # else its one row is compared with their number
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return y.transpose(1, 2)


def _attend_dropping(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, window: int | None, dropout: Dropout, first_head: int
) -> Tensor:
    """`attend` with dropout of the weights, which are materialised: [B, H, Q, K], their softmax in fp32."""
    mask = ctx.full_mask if window is None else ctx.window_mask
    assert mask is not None and ctx.noise is not None
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # The product gives the gradient of k with its last axes swapped, which torch.cat in the backward of RoPE takes for
    # channels-last images and torch.compile does not. Flattening makes it contiguous.
    k = k.flatten(2).unflatten(2, k.shape[2:])
    scores = fp32_at_least(q @ k.mT) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (dropout.weights(weights, ctx.noise, first_head).to(v.dtype) @ v).transpose(1, 2)


def _attend_segments(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, window: int | None, grouped: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    length = q.shape[1]
    left = -1 if window is None else window - 1
    y = varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), boundaries, boundaries, length, length,
        window_size=(left, 0), enable_gqa=grouped,
    )  # fmt: skip
    return cast(Tensor, y).unflatten(0, (-1, length))
