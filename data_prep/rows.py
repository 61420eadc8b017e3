"""Documents to rows of equal length: joined and cut, or packed by best fit so that every row begins with a document.

A stream holds documents one after another, each with its <|bos|>; `lengths` are theirs, in order.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Packing = Literal["join", "best-fit"]
WINDOW_DOCUMENTS = 1_024
"""Documents among which the best fit is sought. The output depends on it."""


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
    """Every row begins with a document; each next one is the longest of the window that fits into what is left.

    Where none fits, the shortest is cut to what is left, and its end is lost. A document longer than a row is cut to a
    row when it enters the window: it would fit nowhere, and such documents would fill the window. Equal lengths go in
    order. Source: BOS-aligned best-fit cropping as Parcae names it (arXiv 2604.12946) and nanochat describes it.
    """
    starts = np.cumsum(lengths) - lengths
    # (length, number of the document) as one integer each, sorted: the shortest and earliest first.
    keys = [(min(length, row_tokens) << 32) | i for i, length in enumerate(lengths.tolist())]
    entering, window = iter(keys[WINDOW_DOCUMENTS:]), sorted(keys[:WINDOW_DOCUMENTS])
    rows = np.empty((len(stream) // row_tokens + 1, row_tokens), stream.dtype)
    count = filled = 0
    while window:
        length, place = row_tokens - filled, 0
        if fitting := bisect.bisect_left(window, (length + 1) << 32):
            length = window[fitting - 1] >> 32
            place = bisect.bisect_left(window, length << 32)
        start = starts[window.pop(place) & 0xFFFF_FFFF]
        rows[count, filled : filled + length] = stream[start : start + length]
        filled += length
        if filled == row_tokens:
            count, filled = count + 1, 0
        if (key := next(entering, None)) is not None:
            bisect.insort(window, key)
    return Rows(rows[:count], filled, len(stream) - count * row_tokens - filled)


PACKINGS: dict[Packing, Callable[[NDArray[Any], NDArray[np.int64], int], Rows]] = {
    "join": join_rows,
    "best-fit": best_fit_rows,
}
