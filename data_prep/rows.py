"""Documents to rows of equal length: joined and cut, or packed by best fit so that every row begins with a document.

A stream holds documents one after another, each with its <|bos|>; `lengths` are theirs, in order.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)
"""2**64 over the golden ratio: its multiples spread evenly (Knuth, The Art of Computer Programming 3, section 6.4)."""
Packing = Literal["join", "best-fit"]


class Rows(NamedTuple):
    """rows.size = tokens of the stream - dropped_tokens - cropped_tokens."""

    rows: NDArray[Any]
    """[rows, row_tokens], of the stream's type."""
    dropped_tokens: int
    """Of the last row, which was not full."""
    cropped_tokens: int
    """Ends of documents that were cut."""


def join_rows(stream: NDArray[Any], lengths: NDArray[np.int64], row_tokens: int) -> Rows:
    """The stream cut every `row_tokens` ids: nothing is lost but the last row's ids, and most rows begin inside a
    document."""
    count = len(stream) // row_tokens
    rows = stream[: count * row_tokens].reshape(count, row_tokens)
    return Rows(rows, len(stream) - rows.size, 0)


def best_fit_rows(stream: NDArray[Any], lengths: NDArray[np.int64], row_tokens: int) -> Rows:
    """Every row begins with a document; each next one is the longest of the stream that fits into what is left.

    Where none fits, the shortest is cut to what is left, and its end is lost. A document longer than a row counts as
    one of a row's length: it fits nowhere else. Equal lengths go in order. The rows come in an order by a hash of their
    first documents' numbers, since packing begins with the longest.

    Source: BOS-aligned best-fit cropping as Parcae names it (arXiv 2604.12946) and nanochat describes it, there with a
    window of 1,000 documents; choosing from all loses less (docs/log.md).
    """
    starts = np.cumsum(lengths) - lengths
    clipped = np.minimum(lengths, row_tokens)
    by_length = np.argsort(clipped, kind="stable")
    available, counts = (values.tolist() for values in np.unique(clipped, return_counts=True))
    groups = np.split(by_length, np.cumsum(counts)[:-1]) if available else []
    waiting = {length: deque(group.tolist()) for length, group in zip(available, groups, strict=True)}
    rows = np.empty((len(stream) // row_tokens + 1, row_tokens), stream.dtype)
    first_documents: list[int] = []
    filled = 0
    while available:
        left = row_tokens - filled
        place = max(bisect.bisect_right(available, left) - 1, 0)
        length = available[place]
        document = waiting[length].popleft()
        if not waiting[length]:
            del available[place]
        if filled == 0:
            first_documents.append(document)
        taken, start = min(length, left), starts[document]
        rows[len(first_documents) - 1, filled : filled + taken] = stream[start : start + taken]
        filled = (filled + taken) % row_tokens
    count = len(first_documents) - (filled > 0)
    hashes = np.array(first_documents[:count], np.uint64) * _ODD  # modulo 2**64: all different
    ordered = rows[:count][np.argsort(hashes)]
    return Rows(ordered, filled, len(stream) - ordered.size - filled)


PACKINGS: dict[Packing, Callable[[NDArray[Any], NDArray[np.int64], int], Rows]] = {
    "join": join_rows,
    "best-fit": best_fit_rows,
}
