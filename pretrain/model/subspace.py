"""Directions of the state, ordered by how strongly the vocabulary's matrix reads them.

The readout's linear surrogate is M = W diag(w) C: head, the final norm's weight and the output projection; the coda is
passed over along its residual stream. M is V x d_h with V > d_h and has, generically, full column rank: its smallest
singular values are small, not zero, and no direction of the state is invisible to the logits.

Shapes: V vocabulary, D width, d_h core width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pretrain.model.looped import LoopedLM


class Directions(NamedTuple):
    """Right singular vectors of the readout."""

    values: Tensor
    """fp64 [d_h], descending."""
    vectors: Tensor
    """fp64 [d_h, d_h]: column i belongs to value i."""

    def bottom(self, count: int) -> Tensor:
        """The `count` directions that are read least, [d_h, count]."""
        return self.vectors[:, -count:]

    def top(self, count: int) -> Tensor:
        """The `count` directions that are read most, [d_h, count]."""
        return self.vectors[:, :count]


@torch.no_grad()
def readout_directions(model: LoopedLM) -> Directions:
    """Singular values and directions of M, from the eigenvectors of M^T M in fp64. Needs the stage that has the head.

    Every matrix is used through its module, where ZeRO-3 gathers it. Collective over tensor-parallel ranks.
    """
    ops, cfg = model.ops, model.cfg
    rows = ops.vocab_range(cfg.padded_vocab_size)

    def gram(weight: Tensor) -> Tensor:
        used = weight[: max(0, min(rows.stop, cfg.vocab_size) - rows.start)].double()
        return used.T @ used

    square = ops.gather_vocab(model.vocabulary_head(gram)).unflatten(-1, (ops.size, -1)).sum(-2)
    if cfg.recurrence.readout != "raw" and cfg.norm_weight:
        weight = model.final_norm(square.new_ones(cfg.width)) * math.sqrt(1 + cfg.norm_eps)
        square = weight[:, None] * square * weight
    projection = model.output_projection(torch.eye(cfg.width_of("core"), dtype=square.dtype, device=square.device))
    values, vectors = torch.linalg.eigh(projection @ square @ projection.T)
    return Directions(values.clamp(min=0).sqrt().flip(0), vectors.flip(1))
