"""Random bits by counter: the same numbers on every device, in every layout and for any cut into micro-batches.

32 bits are a function of (seed, step, row, position, and what they are for). Words are int32, whose sums and products
wrap around, so no device's generator takes part and nothing has to be saved or restored.

Shapes: B rows, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B1  # spreads small integers over 32 bits; prime


@dataclass(frozen=True)
class StateKey:
    """What a training step's random numbers follow from: run seed, step, and each row's position in the batch [B]."""

    seed: int
    step: int
    rows: Tensor


def word(value: int) -> int:
    """The lowest 32 bits as int32 reads them."""
    return (value + 2**31) % 2**32 - 2**31


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 that spreads every bit over all ("lowbias32" by C. Wellons)."""
    # The shift of int32 repeats the sign; what it should have shifted in is masked out.
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(word(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def token_bits(key: StateKey | None, seed: int, positions: Tensor) -> Tensor:
    """int32 for each token: positions [B or 1, S] -> [B, S]. `key` None is evaluation, with `seed` and one row."""
    if key is None:
        rows, seed_word, step = torch.zeros(1, dtype=torch.int32, device=positions.device), seed, 0
    else:
        rows, seed_word, step = key.rows.to(positions.device, torch.int32) + 1, key.seed, key.step + 1
    # Seed and step are mixed on the host, which costs no kernel.
    host = mix(torch.tensor(word((seed_word & 0xFFFFFFFF) ^ 0x9E3779B9), dtype=torch.int32))
    start = int(mix(host + word(step)))
    return mix(mix(rows + start)[:, None] + positions.to(torch.int32) + 1)


def numbered(words: Tensor, count: int, first: int = 0) -> Tensor:
    """int32 for each of the numbers first .. first + count - 1 at each word: [...] -> [..., count]."""
    numbers = torch.arange(first + 1, first + count + 1, device=words.device, dtype=torch.int32) * word(_GOLDEN)
    return mix(words[..., None] + numbers)


def purposed(words: Tensor, purpose: int) -> Tensor:
    """Other words of the same shape, for what `purpose` names by any 32 bits."""
    return mix(words + word(purpose))
