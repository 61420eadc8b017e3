"""The canonical order of an epoch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pretrain.data.order import interleave, shared_order


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [8, 101, 102, 103])
def test_interleave_deals_every_row_once_from_contiguous_parts(count: int, parts: int) -> None:
    order = interleave(np.arange(count), parts)
    assert sorted(order) == list(range(count))
    bounds = [part * count // parts for part in range(parts + 1)]
    for i in range(count // parts * parts):
        part = i % parts
        assert bounds[part] <= order[i] < bounds[part + 1]
        assert order[i] == bounds[part] + i // parts


def test_shared_order_is_made_once_per_epoch_and_old_files_go(tmp_path: Path) -> None:
    made = []

    def make(epoch: int) -> NDArray[np.int64]:
        made.append(epoch)
        return np.arange(1_000) + epoch

    def ask(epoch: int) -> None:
        assert shared_order(tmp_path, epoch, lambda: make(epoch))[0] == epoch

    for epoch in (0, 1, 2, 3):
        threads = [threading.Thread(target=ask, args=(epoch,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made == [0, 1, 2, 3]
    assert sorted(p.name for p in tmp_path.glob("order_*.npy")) == ["order_2.npy", "order_3.npy"]
    assert shared_order(tmp_path, 3, lambda: make(3)).dtype == np.uint32


def test_a_mapped_order_outlives_its_file(tmp_path: Path) -> None:
    first = shared_order(tmp_path, 0, lambda: np.arange(100_000))
    for epoch in (1, 2):
        shared_order(tmp_path, epoch, lambda: np.arange(3))
    assert not (tmp_path / "order_0.npy").exists()
    assert int(first.sum()) == 99_999 * 50_000
