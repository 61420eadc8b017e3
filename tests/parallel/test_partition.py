from __future__ import annotations

import math
import random

import pytest

from pretrain.parallel.partition import Pieces, contiguous_pieces, sliced_pieces


def _assert_every_element_once(numels: list[int], pieces: Pieces, partition_numel: int) -> None:
    for i, numel in enumerate(numels):
        elements = [e for rank in pieces for e in range(rank[i].param_start, rank[i].param_start + rank[i].numel)]
        assert elements == list(range(numel))
    for rank in pieces:
        kept = [e for piece in rank for e in range(piece.flat_start, piece.flat_start + piece.numel)]
        assert len(kept) == len(set(kept)) and all(0 <= e < partition_numel for e in kept)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_pieces_cover_every_element_once(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    for _ in range(20):
        numels = [draw.choice([1, 2, 7, 30, 64, 101]) for _ in range(draw.randint(1, 9))]
        part = math.ceil(sum(numels) / (2 * num_ranks)) * 2
        _assert_every_element_once(numels, contiguous_pieces(numels, part, num_ranks), part)
        part = sum(math.ceil(numel / num_ranks) for numel in numels)
        _assert_every_element_once(numels, sliced_pieces(numels, num_ranks), part)


def test_a_parameter_may_span_ranks() -> None:
    (first, second) = contiguous_pieces([3, 6], partition_numel=5, num_ranks=2)
    assert [(p.param_start, p.flat_start, p.numel) for p in first] == [(0, 0, 3), (0, 3, 2)]
    assert [(p.param_start, p.flat_start, p.numel) for p in second] == [(0, 0, 0), (2, 0, 4)]
