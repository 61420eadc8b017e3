from __future__ import annotations

import math

import pytest
import torch

from pretrain.parallel.muon import muon_direction, polar_express, update_scale
from pretrain.parallel.partition import ParamSpec


def _matrix(rows: int, columns: int, smallest: float) -> torch.Tensor:
    """A matrix whose singular values spread evenly in the logarithm from `smallest` to 1."""
    rank = min(rows, columns)
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(rows, rank, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, rank, generator=generator)).Q
    return u @ torch.diag(torch.logspace(0, math.log10(smallest), rank)) @ v.mT


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_many_iterations_reach_the_polar_factor(shape: tuple[int, int]) -> None:
    matrix = _matrix(*shape, smallest=1e-2)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.allclose(polar_express(matrix, 12, torch.float32), u @ vh, atol=1e-4)


def test_five_iterations_bring_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(polar_express(_matrix(48, 32, smallest=3e-2), 5, torch.float32))
    assert values.min() > 0.85 and values.max() < 1.15


def test_scale_of_the_input_does_not_matter_and_zero_stays_zero() -> None:
    matrix = _matrix(12, 20, smallest=0.1)
    small, large = (polar_express(matrix * scale, 5, torch.float32) for scale in (1e-3, 1e6))
    assert torch.allclose(small, large, atol=1e-3)
    assert not polar_express(torch.zeros(4, 6), 5, torch.float32).any()


def test_bf16_is_close_to_fp32_and_keeps_the_callers_type() -> None:
    matrix = _matrix(32, 32, smallest=0.1)
    rough = polar_express(matrix, 5, torch.bfloat16)
    assert rough.dtype == torch.float32
    difference = rough - polar_express(matrix, 5, torch.float32)
    assert 0 < difference.norm() / 32**0.5 < 0.05


def test_the_scale_is_that_of_the_whole_matrix() -> None:
    """Of what two tensor-parallel ranks hold a half of: neither rows nor columns of the shard decide."""
    for dim, shard, whole in ((0, (20, 10), (40, 10)), (1, (20, 10), (20, 20)), (None, (20, 10), (20, 10))):
        found = ParamSpec("matrix", torch.Size(shard), dim).whole_shape(2)
        assert found == whole
        assert update_scale(found) == pytest.approx(math.sqrt(max(1, whole[0] / whole[1])))


def test_tall_matrices_move_further() -> None:
    for shape, scale in (((40, 10), 2.0), ((10, 40), 1.0)):
        matrix = _matrix(*shape, smallest=0.5)
        direction = muon_direction(matrix, 5, torch.float32, None, None)
        assert torch.allclose(direction, scale * polar_express(matrix, 5, torch.float32))
