"""What tensor parallelism needs of the model, as one object. This one is the single-device implementation.

The model calls `enter` before products with column-sharded matrices and `leave` after products with row-sharded ones;
everything between is local to a rank's heads or channels. With sequence parallelism the same two calls also gather and
scatter the sequence axis, and `local_sequence` says which positions a rank holds outside these regions.

Shapes: B rows, S sequence (full), s sequence (local share), D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TensorOps:
    """One device: every region is the identity and nothing is sharded."""

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """x [B, s, D] -> [B, S, D], ready for column-sharded products; its gradient is summed over ranks."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Partial products [B, S, D] -> their sum over ranks [B, s, D]."""
        return x

    def local_sequence(self, length: int) -> slice:
        """Positions of a sequence of `length` that this rank holds outside the sharded regions."""
        return slice(0, length)

    def sum_sequence(self, x: Tensor) -> Tensor:
        """The sum over ranks of sums over their shares of the sequence; each rank's gradient stays its own."""
        return x

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Rows of the vocabulary-sharded table: tokens [B, S] -> [B, s, D]."""
        return F.embedding(tokens, weight)

    def token_losses(self, logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        """Cross entropy and logsumexp per token in fp32: vocabulary-sharded logits [N, V], labels [N] -> [N], [N].

        Labels below 0 give a loss of 0.
        """
        logsumexp = logits.logsumexp(-1)
        target = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = logsumexp - target
        if label_smoothing > 0:
            finite = logits.isfinite()
            mean = logits.masked_fill(~finite, 0).sum(-1) / finite.sum(-1)
            loss = (1 - label_smoothing) * loss + label_smoothing * (logsumexp - mean)
        return loss.masked_fill(labels < 0, 0.0), logsumexp

    def vocab_range(self, padded_vocab_size: int) -> range:
        """Vocabulary rows of this rank."""
        share = padded_vocab_size // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """Vocabulary-sharded logits [..., V / size] -> [..., V] on every rank."""
        return logits


def shard(full: Tensor, partition_dim: int | None, ops: TensorOps) -> Tensor:
    """This rank's share of a full tensor; the tensor itself where it is replicated."""
    if partition_dim is None or ops.size == 1:
        return full
    return torch.chunk(full, ops.size, dim=partition_dim)[ops.rank]


def fp32_at_least(x: Tensor) -> Tensor:
    """x in fp32, or fp64 if it already is."""
    return x if x.dtype == torch.float64 else x.float()
