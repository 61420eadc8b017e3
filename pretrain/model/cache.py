"""The key/value cache of generation: one slot per (layer, loop), or the last loop's slots shared.

Caching only the last loop's keys and values makes decoding differ from training, because each loop attends to the keys
of the same loop (FLT, arXiv 2605.18797). `full` therefore keeps a slot per loop and layer.

Shapes: B rows, S sequence, K key/value heads, C channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CacheSlot:
    """Keys and values of one layer in one loop, [B, S, K, C] each, growing along S."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' keys and values; returns all of them."""
        if self.keys is None or self.values is None:
            self.keys, self.values = k, v
        else:
            self.keys, self.values = torch.cat((self.keys, k), 1), torch.cat((self.values, v), 1)
        return self.keys, self.values


class LoopCache:
    """Slots by (part, layer, loop), made on first use."""

    def __init__(self) -> None:
        self.slots: dict[tuple[str, int, int], CacheSlot] = {}

    def slot(self, part: str, layer: int, loop: int) -> CacheSlot:
        """The slot of one layer in one loop (loop 0 for prelude and coda)."""
        return self.slots.setdefault((part, layer, loop), CacheSlot())

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        for slot in self.slots.values():
            if slot.keys is not None:
                return slot.keys.shape[1]
        return 0
