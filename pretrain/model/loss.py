"""The losses. Each is a sum over tokens or rows, divided by the global number of them before it is returned.

The vocabulary head never materialises the full logits in training: tokens go through it in chunks, and the backward
pass either has its gradients already (torch's fused linear cross entropy) or recomputes a chunk's logits.

Shapes: B rows, S sequence, N tokens, D width, V vocabulary (this rank's share under tensor parallelism), T loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.config.schema import LossConfig
from pretrain.model.ops import TensorOps, fp32_at_least


class Totals(NamedTuple):
    """Global denominators of the loss, the same on every rank."""

    tokens: float
    """Labels that count, over the global batch."""
    rows: float
    """Rows of the global batch."""


@dataclass(frozen=True)
class HeadSettings:
    """What turns normalised hidden states into token losses."""

    vocab_size: int
    softcap: float | None
    z_loss: float
    label_smoothing: float
    chunk_tokens: int


class HeadSums(NamedTuple):
    """Weighted sums over the tokens of a call: cross entropy with label smoothing, squared logsumexp."""

    cross_entropy: Tensor
    z: Tensor


def head_logits(weight: Tensor, hidden: Tensor, settings: HeadSettings, ops: TensorOps) -> Tensor:
    """fp32 logits of this rank's vocabulary rows, [..., D] -> [..., V]; rows of the padding are cut or -inf."""
    if ops.size == 1:
        weight = weight[: settings.vocab_size]
    logits = fp32_at_least(F.linear(hidden, weight.to(hidden.dtype)))
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    if ops.size > 1:
        rows = ops.vocab_range(weight.shape[0] * ops.size)
        padding = torch.arange(rows.start, rows.stop, device=logits.device) >= settings.vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    return logits


def token_losses(
    weight: Tensor, hidden: Tensor, labels: Tensor, settings: HeadSettings, ops: TensorOps
) -> tuple[Tensor, Tensor]:
    """Cross entropy and logsumexp of each token, fp32 [N] each: hidden [N, D], labels [N] (below 0: loss 0)."""
    return ops.token_losses(head_logits(weight, hidden, settings, ops), labels, settings.label_smoothing)


def chunked_losses(weight: Tensor, hidden: Tensor, labels: Tensor, settings: HeadSettings, ops: TensorOps) -> Tensor:
    """Cross entropy of each token, fp32 [N], with the logits of one chunk at a time; arguments as of `token_losses`.

    One use of the matrix, however many rows a rank has.
    """
    chunks = zip(hidden.split(settings.chunk_tokens), labels.split(settings.chunk_tokens), strict=True)
    return torch.cat([token_losses(weight, *chunk, settings, ops)[0] for chunk in chunks])


def _chunk_sums(
    weight: Tensor, hidden: Tensor, labels: Tensor, token_weights: Tensor, settings: HeadSettings, ops: TensorOps
) -> tuple[Tensor, Tensor]:
    losses, logsumexp = token_losses(weight, hidden, labels, settings, ops)
    valid = torch.where(labels < 0, 0.0, token_weights)
    return (losses * valid).sum(), (logsumexp.square() * valid).sum()


def head_sums(
    weight: Tensor,
    hidden: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    settings: HeadSettings,
    ops: TensorOps,
) -> HeadSums:
    """Weighted sums of token losses without the full logits: hidden [N, D], labels [N], token_weights [N] (None: 1)."""
    plain = settings.softcap is None and settings.z_loss == 0 and token_weights is None and ops.size == 1
    # In bf16 torch's fused form sums losses and weight gradients over chunks in bf16 (torch 2.14: a loss 6% off at 64
    # chunks), whatever its accumulation options say.
    if plain and hidden.dtype != torch.bfloat16 and torch.is_grad_enabled():
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=settings.chunk_tokens)
        loss = F.linear_cross_entropy(
            hidden, weight[: settings.vocab_size].to(hidden.dtype), labels.clamp(min=-1), reduction="sum",
            ignore_index=-1, label_smoothing=settings.label_smoothing, options=options,
        )  # fmt: skip
        loss = fp32_at_least(loss)
        return HeadSums(loss, loss.new_zeros(()))
    if token_weights is None:
        token_weights = torch.ones(labels.shape, dtype=torch.float32, device=labels.device)
    cross_entropy = z = torch.zeros((), device=hidden.device, dtype=fp32_at_least(hidden[:0]).dtype)
    for start in range(0, labels.shape[0], settings.chunk_tokens):
        part = slice(start, start + settings.chunk_tokens)
        args = (weight, hidden[part], labels[part], token_weights[part], settings, ops)
        sums = checkpoint(_chunk_sums, *args, use_reentrant=False) if torch.is_grad_enabled() else _chunk_sums(*args)
        cross_entropy, z = cross_entropy + sums[0], z + sums[1]
    return HeadSums(cross_entropy, z)


def loop_weights(own: Tensor, row: Tensor, num_loops: int, objective: str) -> Tensor:
    """Weight of each of `num_loops` gradient loops in the loss of each row or token: [T, B, 1 or S], which sum to 1.

    `own` [B, 1 or S] gradient loops of it, k, the first of its row's `row` [B, 1], which are the last of all. The last
    readout is at the end, where every token holds its last state; readout i < k - 1 follows own loop i. Those that
    count: the last one (terminal), all (per_loop), or those with 0-based index in [floor(2k/3), k) (last_third, FLT's
    FEW). Those of exit_weighted are not constants (pretrain/model/auxiliary.py).
    """
    loops = torch.arange(num_loops, device=own.device).view(-1, 1, 1)
    index = loops - (num_loops - row)
    last = loops == num_loops - 1
    start = torch.zeros_like(own)
    if objective == "terminal":
        start = own - 1
    elif objective == "last_third":
        start = 2 * own // 3
    return (last | (index >= start) & (index < own - 1)) / (own - start)


def state_penalty(h: Tensor, weights: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Weighted sums of (norm penalty, scale anchor) over the positions of a state h [B, s, d_h], in fp32.

    norm penalty: mean over channels of h^2; scale anchor: (rms(h) - target)^2. `weights` [B, 1 or s] of each position.
    """
    mean_square = fp32_at_least(h).square().mean(-1)
    anchor = ((mean_square + 1e-12).sqrt() - cfg.scale_target).square()
    return (mean_square * weights).sum(), (anchor * weights).sum()
