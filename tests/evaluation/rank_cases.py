"""What each process of a real world does; run by test_scoring.py through tests.helpers.run_ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pretrain.evaluation.scoring import score
from tests.evaluation.test_scoring import make_requests
from tests.model.tiny import random_model, tiny_config


def score_shared() -> dict[str, Any]:
    """Scores of 11 requests, shared by the processes, and this process's calls of the model."""
    dist.init_process_group("gloo")
    model, calls = random_model(tiny_config("parcae")), 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model.loop_scores(*args)

    group = dist.group.WORLD
    found = score(counted, make_requests(11), [1, 3], batch_tokens=32, device=torch.device("cpu"), group=group)
    dist.destroy_process_group()
    return {"nats": [s.nats.tolist() for s in found], "greedy": [s.greedy.tolist() for s in found], "calls": calls}
