"""Dropout whose masks follow from (seed, step, row, position) and from the loop, layer and place that they are for.

So a run repeats and resumes bit for bit, every layout and cut into micro-batches drops the same values, a recomputation
in backward makes the same mask again, and no two loops or layers share one.

Shapes: B rows, S sequence, s local share of it, D width, H query heads of this rank, K keys.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from pretrain.model.counter import StateKey, numbered, purposed, token_bits

_EVERY_LOOP = zlib.crc32(b"dropout")


def dropout_noise(key: StateKey, length: int) -> Tensor:
    """int32 [B, S] of each token, from which all masks of a step follow."""
    return purposed(token_bits(key, key.seed, torch.arange(length, device=key.rows.device)[None]), _EVERY_LOOP)


class Dropout(nn.Module):
    """Zeroes values with probability p and divides the others by 1 - p; `place` is its name in the whole model."""

    def __init__(self, p: float, place: str) -> None:
        super().__init__()
        self.p, self.place = p, zlib.crc32(place.encode())
        self.threshold = min(round(p * 2**32), 2**32 - 1) - 2**31

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """x [B, s, D] with the words [B, s] of its tokens; None (evaluation) leaves it as it is."""
        return x if noise is None else self._drop(x, purposed(noise, self.place))

    def weights(self, x: Tensor, noise: Tensor, first_head: int) -> Tensor:
        """Attention weights [B, H, S, K], heads numbered from `first_head`, with the words [B, S] of the queries."""
        words = numbered(purposed(noise, self.place), x.shape[1], first_head)
        return self._drop(x, words.transpose(1, 2))

    def _drop(self, x: Tensor, words: Tensor) -> Tensor:
        kept = numbered(words, x.shape[-1]) >= self.threshold
        return torch.where(kept, x, 0.0) / (1 - self.p)
