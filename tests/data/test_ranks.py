"""The loader in four real processes: tensor ranks, pipeline stages, two nodes, and an error that all hear of."""

from __future__ import annotations

import shutil
from pathlib import Path

from pretrain.data.loader import TrainLoader
from tests.data.sets import alone, make_config, numbers
from tests.helpers import run_ranks

STEPS = 9


def test_four_processes_read_what_one_reads(set_101: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(set_101, tmp_path / "broken")
    (broken / "train" / "shard.00001.mds").unlink()
    with TrainLoader(make_config(set_101), alone(), start_step=5) as loader:
        expected = [numbers(next(loader).tokens) for _ in range(STEPS)]
    results = run_ranks(
        4, "tests.data.rank_cases:read", path=str(set_101), broken=str(broken), steps=STEPS, timeout_sec=240
    )
    for name in ("dp4", "dp4 on 2 nodes", "tp2 dp2", "tp2 dp2 on 2 nodes", "pp2 dp2"):
        ranks = [result[name] for result in results]
        for step in range(STEPS):
            for rank in ranks:
                if rank["rows"][step] is not None:
                    assert rank["rows"][step] == [expected[step][p] for p in rank["positions"]]
        copies = 1 if name.startswith("dp4") else 2
        positions = sorted(p for rank in ranks for p in rank["positions"])
        assert positions == sorted(list(range(8)) * copies)
    assert [r["dp4 on 2 nodes"]["positions"] for r in results] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert results[0]["tp2 dp2"] == results[1]["tp2 dp2"] != results[2]["tp2 dp2"]
    assert [r["pp2 dp2"]["rows"][0] is None for r in results] == [False, False, True, True]
    for rank, result in enumerate(results):
        assert "shard.00001.mds: shard is missing" in result["error"]
        assert result["environment"] == {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}
        assert result["dp4"]["validation"] == [[[500, 500, 500], [float(rank == 0), 0.0, 0.0]]]
