"""Keys and values of a looped model: a slot for each layer and loop.

In loop t a token attends to the keys and values that earlier tokens had in loop t. A cache with one slot per layer
(DynamicCache) would hand it those of another loop.

**Missing entries.** Tokens may have run different numbers of loops: an exit rule ended them early, or a call asked for
fewer. The one rule: in loops that a token did not run, its keys and values are those of its last loop.

    full   every loop has its slots: exact
    last   the loops share their slots, which hold each token's last loop. Memory is that of one loop, but a token then
           attends to its past's last loop in all of its own; exact only where states no longer change

Shapes: B rows, G key/value heads, S new tokens, K all tokens, C channels of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .configuration_looped import CACHE_MODES


class Slot(NamedTuple):
    """Where the keys and values of one layer lie: prelude and coda have loop 0 alone."""

    part: str
    layer: int
    loop: int


class Entries(NamedTuple):
    """Keys and values of tokens, [B, G, tokens, C] each."""

    keys: Tensor
    values: Tensor

    def tokens(self, start: int, end: int | None = None) -> Entries:
        """Those of the tokens start..end-1."""
        return Entries(self.keys[:, :, start:end], self.values[:, :, start:end])

    def rows(self, index: Tensor) -> Entries:
        """Those of the rows `index`, which may repeat."""
        index = index.to(self.keys.device)
        return Entries(self.keys.index_select(0, index), self.values.index_select(0, index))


class LoopedCache(Cache):
    """The cache of a LoopedForCausalLM; `mode` is full or last (see above).

    Works with generate (greedy, sampling, beams) and can be cropped; after every forward `get_seq_length()` is the
    number of tokens seen.
    """

    def __init__(self, mode: str = "full") -> None:
        if mode not in CACHE_MODES:
            raise ValueError(f"cache mode {mode!r}: expected one of {', '.join(CACHE_MODES)}")
        super().__init__(layers=[])
        self.mode = mode
        self.slots: dict[Slot, Entries] = {}
        self.length = 0

    def extend(self, slot: Slot, new: Entries, running: Tensor | None) -> Entries:
        """Entries of all tokens in `slot`, the new ones [B, G, S, C] appended; they are kept.

        `running` bool [B, S] marks new tokens that run this loop; the others keep their entries of the loop before.
        """
        past, own = self.length, slot._replace(loop=0) if self.mode == "last" else slot
        before = self.slots.get(own if self.mode == "last" else slot._replace(loop=slot.loop - 1))
        if running is not None and slot.loop > 0:
            assert before is not None
            old, mask = before.tokens(past), running[:, None, :, None]
            new = Entries(*(torch.where(mask, a, b) for a, b in zip(new, old, strict=True)))
        pieces = [self.slots[own].tokens(0, past)] if own in self.slots else []
        held = pieces[0].keys.shape[2] if pieces else 0
        if held < past:
            if before is None or before.keys.shape[2] < past:
                raise ValueError(
                    f"the cache has no {slot.part} entries for {past - held} of {past} tokens: it was filled without "
                    "an exit rule and without output_loop_logits; use the same settings for all calls on one cache"
                )
            pieces.append(before.tokens(held, past))
        pieces.append(new)
        self.slots[own] = Entries(*(torch.cat(part, dim=2) for part in zip(*pieces, strict=True)))
        return self.slots[own]

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(x.nbytes for entries in self.slots.values() for x in entries)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, the same for every layer."""
        return self.length

    def crop(self, max_length: int) -> None:
        """Keeps the first `max_length` tokens; a negative number removes that many."""
        self.length = min(self.length, max(0, max_length if max_length >= 0 else self.length + max_length))
        self.slots = {slot: entries.tokens(0, self.length) for slot, entries in self.slots.items()}

    def reset(self) -> None:
        """Forgets everything."""
        self.length, self.slots = 0, {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.slots = {slot: entries.rows(beam_idx) for slot, entries in self.slots.items()}

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, the copies side by side."""
        if self.slots:
            rows = next(iter(self.slots.values())).keys.shape[0]
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        return f"LoopedCache(mode={self.mode!r}, tokens={self.length}, slots={len(self.slots)})"
