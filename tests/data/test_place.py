"""Which positions of the global batch a rank holds."""

from __future__ import annotations

import numpy as np
import pytest

from pretrain.data.place import DataPlace, Node, rank_positions
from pretrain.errors import ConfigError


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_positions_are_residue_classes_that_cover_the_batch_and_keep_to_the_node(dp_size: int, num_nodes: int) -> None:
    if dp_size % num_nodes:
        pytest.skip("ranks do not spread evenly")
    positions = rank_positions(48, dp_size, num_nodes)
    assert positions.shape == (dp_size, 48 // dp_size)
    assert sorted(positions.ravel()) == list(range(48))
    assert (positions % dp_size == positions[:, :1]).all()
    for rank, own in enumerate(positions):
        assert set(own % num_nodes) == {rank // (dp_size // num_nodes)}


def test_one_node_gives_rank_d_the_class_d() -> None:
    assert rank_positions(8, 4).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rank_positions(8, 4, 2).tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch_size=10.*4 data-parallel ranks"):
        rank_positions(10, 4)


class FakeWorld(DataPlace):
    """A process of a world whose (local_rank, dp_rank) pairs are given."""

    pairs: tuple[tuple[int, int], ...] = ()

    def gather(self, value: object) -> list[object]:
        assert value == self.pairs[self.rank]
        return list(self.pairs)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "tensor", "pipeline", "data_nodes"),
    [(1, 8, 2, 1, 1), (2, 4, 1, 1, 2), (2, 4, 2, 1, 2), (2, 4, 1, 2, 1), (4, 4, 2, 2, 2), (3, 4, 2, 1, 3)],
)
def test_nodes_are_found_from_local_ranks(
    nodes: int, ranks_per_node: int, tensor: int, pipeline: int, data_nodes: int
) -> None:
    world = nodes * ranks_per_node
    dp_size = world // (tensor * pipeline)
    pairs = tuple((r % ranks_per_node, r // tensor % dp_size) for r in range(world))
    for rank in range(world):
        local_rank, dp_rank = pairs[rank]
        place = FakeWorld(dp_rank=dp_rank, dp_size=dp_size, rank=rank, local_rank=local_rank, world_size=world)
        object.__setattr__(place, "pairs", pairs)
        node = Node.of(place)
        assert (node.index, node.count) == (rank // ranks_per_node, nodes)
        assert (node.rank_of_node, node.ranks_of_node) == (rank % ranks_per_node, ranks_per_node)
        assert node.is_leader == (rank % ranks_per_node == 0)
        assert node.data_nodes == data_nodes


def test_ranks_spread_unevenly_count_as_one_node() -> None:
    pairs = ((0, 0), (1, 1), (2, 2), (0, 3))
    place = FakeWorld(dp_rank=0, dp_size=4, world_size=4)
    object.__setattr__(place, "pairs", pairs)
    assert Node.of(place).data_nodes == 1
    assert np.array_equal(rank_positions(8, 4, 1)[3], [3, 7])
