"""Rows of tokens as the model takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.documents import document_ids, document_positions, next_token_labels
from pretrain.model.attention_mask import Segments


class Inputs(NamedTuple):
    """B rows of S tokens; the last three are None unless attention keeps within documents."""

    tokens: Tensor
    """int64 [B, S]"""
    labels: Tensor
    """int64 [B, S], below 0 where no loss counts."""
    document_ids: Tensor | None
    """int64 [B, S]"""
    positions: Tensor | None
    """int64 [B, S], within documents."""
    segments: Segments | None

    @staticmethod
    def of(rows: Tensor, cfg: Config, bos_id: int, device: torch.device) -> Inputs:
        """From rows [B, S + 1] on the CPU to tensors on `device`."""
        masked = cfg.data.mask_document_boundaries
        tokens, labels = rows[:, :-1].contiguous(), next_token_labels(rows, bos_id, masked)
        documents = positions = segments = None
        if masked:
            documents, positions = document_ids(tokens, bos_id), document_positions(tokens, bos_id)
            # Counted on the host, where no device has to be waited for.
            segments = Segments.of(documents)
            documents, positions = documents.to(device, non_blocking=True), positions.to(device, non_blocking=True)
        labels = labels.contiguous().to(device, non_blocking=True)
        return Inputs(tokens.to(device, non_blocking=True), labels, documents, positions, segments)
