"""Documents within packed rows: every document starts with <|bos|>, and a row may begin and end inside of one.

B rows, S sequence. The part of a document that a row starts with, cut off from its beginning, counts as a document.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""A target that no loss counts (torch's ignore_index)."""


def document_ids(tokens: Tensor, bos_id: int) -> Tensor:
    """int64 [B, S] -> int64 [B, S]: number of each token's document within its row, from 0 at the row's start.

    A row that starts with <|bos|> has its first document numbered 0 as well.
    """
    return _starts(tokens, bos_id).cumsum(1) - 1


def document_positions(tokens: Tensor, bos_id: int) -> Tensor:
    """int64 [B, S] -> int64 [B, S]: tokens since the start of the document, or of the row where that cuts it."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return index - torch.where(_starts(tokens, bos_id), index, 0).cummax(1).values


def next_token_labels(rows: Tensor, bos_id: int, mask_document_boundaries: bool) -> Tensor:
    """int64 [B, S + 1] -> int64 [B, S]: the target of each position of rows[:, :-1].

    With `mask_document_boundaries` the target of a document's last token, the next document's <|bos|>, is
    IGNORED_LABEL: each document is trained as if it stood alone, and what follows it in the row is chance. Without the
    mask it counts like any other: <|bos|> is then the end-of-document symbol that the model learns to emit.
    """
    labels = rows[:, 1:]
    return labels.masked_fill(labels == bos_id, IGNORED_LABEL) if mask_document_boundaries else labels


def _starts(tokens: Tensor, bos_id: int) -> Tensor:
    starts = tokens == bos_id
    starts[:, 0] = True
    return starts
