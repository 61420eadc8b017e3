"""Unigram and bigram models of token rows: what a language model must beat to show that it reads its context.

Both are estimated from the training rows of a data set and measured on the same validation targets as the model. The
bigram is the interpolated Kneser-Ney model with one discount (Chen and Goodman 1998, section 2.7), about 0.1 nats
stronger than Jelinek-Mercer with one weight:

    P(b | a) = max(c(a, b) - d, 0) / c(a)  +  d n(a) / c(a)  P_kn(b)
    P_kn(b)  = (number of different a before b + 1) / (number of different pairs + V)

with c counts, n(a) the number of different b after a, d the discount, chosen on training rows kept out of the counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.verify_shards import read_rows
from pretrain.data.manifest import read_manifest, read_shards
from pretrain.errors import ConfigError

Rows = NDArray[np.int64]
DISCOUNTS = tuple(i / 20 for i in range(1, 20))
HELD_OUT_SHARE = 20
"""One training row in so many chooses the discount."""


def split_rows(folder: str | Path, split: str) -> Rows:
    """All rows of a split, int64 [rows, row_tokens], with their hashes checked; row r predicts row[1:] from row[:-1].

    Errors: ConfigError for a folder that is no data set or has no such rows, DataError naming a shard that is missing
    or wrong.
    """
    manifest = read_manifest(folder)
    if split not in manifest.splits or not manifest.splits[split].rows:
        raise ConfigError(
            f"{folder}: the data set has no {split} rows; build it with data_prep/build_shards.py and a "
            "--validation-fraction > 0"
        )
    shards = read_shards(folder, manifest, split)
    return np.concatenate([read_rows(shard, manifest) for shard in shards]).astype(np.int64)


class Unigram:
    """P(b) = (c(b) + 1) / (N + V) over the targets of training rows."""

    def __init__(self, rows: Rows, vocab_size: int) -> None:
        counts = np.bincount(rows[:, 1:].ravel(), minlength=vocab_size)
        self.probability: NDArray[np.float64] = (counts + 1) / (counts.sum() + vocab_size)

    def loss(self, rows: Rows) -> float:
        """Mean -log P over the targets of `rows`, in nats."""
        return float(-np.log(self.probability[rows[:, 1:]]).mean())


class Bigram:
    """The interpolated Kneser-Ney model of the module's docstring; every next token has a probability above 0."""

    def __init__(self, rows: Rows, vocab_size: int, discount: float) -> None:
        self.vocab_size, self.discount = vocab_size, discount
        pairs = rows[:, :-1] * vocab_size + rows[:, 1:]
        self._pairs, self._counts = np.unique(pairs, return_counts=True)
        first, second = self._pairs // vocab_size, self._pairs % vocab_size
        self._total = np.bincount(first, weights=self._counts, minlength=vocab_size)
        self._kinds = np.bincount(first, minlength=vocab_size)
        self._lower = (np.bincount(second, minlength=vocab_size) + 1) / (len(self._pairs) + vocab_size)

    @classmethod
    def tuned(cls, rows: Rows, vocab_size: int) -> Bigram:
        """The model of all `rows`, with the discount that is best for held-out ones among them."""
        held_out = np.arange(len(rows)) % HELD_OUT_SHARE == 0
        losses = [cls(rows[~held_out], vocab_size, discount).loss(rows[held_out]) for discount in DISCOUNTS]
        return cls(rows, vocab_size, DISCOUNTS[int(np.argmin(losses))])

    def probability(self, previous: Rows, following: Rows) -> NDArray[np.float64]:
        """P(following | previous), elementwise. After a token never seen before another, P_kn(following)."""
        pairs = previous * self.vocab_size + following
        at = np.searchsorted(self._pairs, pairs).clip(max=len(self._pairs) - 1)
        count = np.where(self._pairs[at] == pairs, self._counts[at], 0)
        total = self._total[previous]
        seen = np.maximum(total, 1)
        left_over = np.where(total > 0, self.discount * self._kinds[previous] / seen, 1.0)
        return np.maximum(count - self.discount, 0) / seen + left_over * self._lower[following]

    def loss(self, rows: Rows) -> float:
        """Mean -log P over the targets of `rows`, in nats."""
        return float(-np.log(self.probability(rows[:, :-1], rows[:, 1:])).mean())
