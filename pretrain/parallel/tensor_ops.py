"""The model's tensor-parallel operations on megatron-core's region mappings.

Megatron's sequence-parallel mappings act on the first axis; the model keeps rows first, so the sequence is swapped to
the front around them (one copy per gather or scatter).

Shapes: B rows, S sequence, s local share, D width, V vocabulary share, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from pretrain.model.ops import TensorOps
from pretrain.parallel.megatron import Layout


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose backward gives a contiguous gradient.

    megatron-core's all-reduce of another one returns it as it was, without a message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class MegatronTensorOps(TensorOps):
    """Tensor parallelism over `layout.tensor_group`. Every call is collective over it."""

    def __init__(self, layout: Layout) -> None:
        self.size, self.rank = layout.tensor_size, layout.tensor_rank
        self.sequence_parallel, self.group = layout.sequence_parallel, layout.tensor_group

    def enter(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return _ContiguousGradient.apply(mappings.copy_to_tensor_model_parallel_region(x, group=self.group))
        return mappings.gather_from_sequence_parallel_region(x.transpose(0, 1), group=self.group).transpose(0, 1)

    def _sum(self, x: Tensor) -> Tensor:
        return mappings.reduce_from_tensor_model_parallel_region(x.contiguous(), group=self.group)

    def leave(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return self._sum(x)
        return mappings.reduce_scatter_to_sequence_parallel_region(x.transpose(0, 1), group=self.group).transpose(0, 1)

    def local_sequence(self, length: int) -> slice:
        if not self.sequence_parallel:
            return slice(0, length)
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum_sequence(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        return self._sum(x)

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        local = tokens - self.rank * weight.shape[0]
        absent = (local < 0) | (local >= weight.shape[0])
        partial = F.embedding(local.masked_fill(absent, 0), weight).masked_fill(absent[..., None], 0.0)
        return self.leave(partial)

    def token_losses(self, logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        peak = logits.detach().amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        logsumexp = self._sum((logits - peak[:, None]).exp().sum(-1)).log() + peak
        local = labels - self.rank * logits.shape[-1]
        absent = (local < 0) | (local >= logits.shape[-1])
        own = logits.gather(-1, local.masked_fill(absent, 0)[:, None]).squeeze(-1)
        loss = logsumexp - self._sum(own.masked_fill(absent, 0.0))
        if label_smoothing > 0:
            finite = logits.isfinite()
            count = self._sum(finite.sum(-1).to(logits.dtype))
            mean = self._sum(logits.masked_fill(~finite, 0.0).sum(-1)) / count
            loss = (1 - label_smoothing) * loss + label_smoothing * (logsumexp - mean)
        return loss.masked_fill(labels < 0, 0.0), logsumexp

    def gather_vocab(self, logits: Tensor) -> Tensor:
        return mappings.gather_from_tensor_model_parallel_region(logits, group=self.group)


def tensor_ops(layout: Layout) -> TensorOps:
    """The operations of this layout: plain ones on a single tensor-parallel rank."""
    return MegatronTensorOps(layout) if layout.tensor_size > 1 else TensorOps()


