"""Results of tasks at several loop counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pretrain.evaluation.core import core_score
from pretrain.evaluation.requests import Encoder, Task
from pretrain.evaluation.scoring import ScoreTokens, score


@dataclass(frozen=True)
class TaskResult:
    """What a task came to."""

    task: str
    headline: str
    """The metric to look at first."""
    by_loops: dict[int, dict[str, float]]
    """{loop count: {metric: value}}"""
    num_requests: int
    num_cropped: int
    """Requests whose beginning did not fit into the context."""

    def to_json(self) -> dict[str, Any]:
        """For a file; loop counts become strings."""
        return {
            "headline": self.headline, "by_loops": {str(t): m for t, m in self.by_loops.items()},
            "num_requests": self.num_requests, "num_cropped": self.num_cropped,
        }  # fmt: skip


def evaluate(
    score_tokens: ScoreTokens,
    tasks: Sequence[Task],
    encoder: Encoder,
    num_loops: Sequence[int],
    *,
    batch_tokens: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    multiple: int = 1,
) -> list[TaskResult]:
    """Results of all tasks at all loop counts, the same on every process. Arguments and collectives as in `score`."""
    results = []
    for task in tasks:
        requests = task.requests(encoder)
        scores = score(
            score_tokens, requests, num_loops,
            batch_tokens=batch_tokens, device=device, group=group, multiple=multiple,
        )  # fmt: skip
        by_loops = {t: task.metrics(found) for t, found in zip(num_loops, scores, strict=True)}
        results.append(
            TaskResult(task.name, task.headline, by_loops, len(requests), sum(r.cropped > 0 for r in requests))
        )
    return results


def core_by_loops(results: Sequence[TaskResult]) -> dict[int, float]:
    """The Core score by loop count, over the results that have a centred accuracy; empty if none has."""
    core = [result for result in results if result.headline == "centered"]
    if not core:
        return {}
    return {t: core_score({r.task: r.by_loops[t] for r in core}) for t in core[0].by_loops}
