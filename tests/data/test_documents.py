"""Document numbers, positions and labels against a plain loop."""

from __future__ import annotations

import pytest
import torch

from pretrain.data.documents import IGNORED_LABEL, document_ids, document_positions, next_token_labels

BOS = 7


def plain(row: list[int]) -> tuple[list[int], list[int]]:
    """Document numbers and positions, token by token."""
    ids, positions = [], []
    document, position = 0, 0
    for i, token in enumerate(row):
        if token == BOS and i > 0:
            document, position = document + 1, 0
        ids.append(document)
        positions.append(position)
        position += 1
    return ids, positions


@pytest.mark.parametrize("bos_share", [0.0, 0.1, 0.6, 1.0])
def test_ids_and_positions_equal_a_plain_loop(bos_share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (6, 33), generator=generator)
    tokens[torch.rand(6, 33, generator=generator) < bos_share] = BOS
    before = tokens.clone()
    expected = [plain(row) for row in tokens.tolist()]
    assert document_ids(tokens, BOS).tolist() == [ids for ids, _ in expected]
    assert document_positions(tokens, BOS).tolist() == [positions for _, positions in expected]
    assert torch.equal(tokens, before)


def test_an_example_by_hand() -> None:
    rows = torch.tensor([[3, 4, BOS, 5, BOS, BOS, 6, BOS]])  # ends of documents: 4, 5, BOS, 6
    tokens = rows[:, :-1]
    assert document_ids(tokens, BOS).tolist() == [[0, 0, 1, 1, 2, 3, 3]]
    assert document_positions(tokens, BOS).tolist() == [[0, 1, 0, 1, 0, 0, 1]]
    masked = next_token_labels(rows, BOS, mask_document_boundaries=True)
    assert masked.tolist() == [[4, IGNORED_LABEL, 5, IGNORED_LABEL, IGNORED_LABEL, 6, IGNORED_LABEL]]
    assert next_token_labels(rows, BOS, mask_document_boundaries=False).tolist() == [[4, BOS, 5, BOS, BOS, 6, BOS]]
