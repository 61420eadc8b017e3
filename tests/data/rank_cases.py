"""What each process of a real world does; run by tests/data/test_ranks.py through tests.helpers.run_ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.data.loader import TrainLoader
from pretrain.data.place import DataPlace
from pretrain.data.validation import ValidationRows
from pretrain.errors import DataError
from tests.data.sets import make_config, numbers


def read(path: str, broken: str, steps: int) -> dict[str, Any]:
    """Four processes read in several layouts, one after the other, and then meet a broken set."""
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cfg = make_config(Path(path), num_workers=1)
    found: dict[str, Any] = {}

    def place(dp_size: int, tensor: int = 1, nodes: int = 1) -> DataPlace:
        return DataPlace(
            dp_rank=rank // tensor % dp_size, dp_size=dp_size, rank=rank, local_rank=rank % (4 // nodes), world_size=4
        )

    cases = {
        "dp4": place(4),
        "dp4 on 2 nodes": place(4, nodes=2),
        "tp2 dp2": place(2, tensor=2),
        "pp2 dp2": place(2),
        "tp2 dp2 on 2 nodes": place(2, tensor=2, nodes=2),
    }
    for name, where in cases.items():
        reads = not (name == "pp2 dp2" and rank >= 2)  # as a stage without embedding and head
        with TrainLoader(cfg, where, reads=reads, start_step=5) as loader:
            batches = [next(loader) for _ in range(steps)]
        rows = [None if b.tokens is None else numbers(b.tokens) for b in batches]
        found[name] = {"rows": rows, "positions": batches[-1].positions.tolist()}
        rows_of_validation = ValidationRows(cfg, where).batches(3)
        found[name]["validation"] = [(numbers(b.tokens), b.weights.tolist()) for b in rows_of_validation]

    found["environment"] = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        TrainLoader(make_config(Path(broken)), place(4))
    except DataError as error:
        found["error"] = str(error)
    dist.destroy_process_group()
    return found
