"""Scores of requests at several loop counts, from one pass of the largest count over each batch.

Requests of similar length share a batch, longest first, padded on the right: attention is causal, so padding changes
nothing. Batches are dealt to processes; all score equally many, since sharded parameters are gathered by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pretrain.data.documents import IGNORED_LABEL
from pretrain.evaluation.requests import Request, Scores

ScoreTokens = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]
"""(tokens [B, S], labels [B, S], loop counts, candidates) -> [L, 2, B, S], as LoopedLM.loop_scores."""


def score(
    score_tokens: ScoreTokens,
    requests: Sequence[Request],
    num_loops: Sequence[int],
    *,
    batch_tokens: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    multiple: int = 1,
) -> list[Scores]:
    """Scores of all requests at each loop count, on every process of `group` (None: this one scores all of them).

    A batch holds at most `batch_tokens` tokens, padding included, or one request. Rows are padded to a multiple of
    `multiple` tokens, which sequence parallelism needs. Collective over `group`.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    batches = list(bucket(requests, batch_tokens))
    sums = torch.zeros(len(num_loops), 2, len(requests), dtype=torch.float64, device=device)
    for turn in range(0, len(batches), size):
        # A process without a batch of its own repeats one, so that all call the model equally often.
        own = turn + rank < len(batches)
        indices = batches[turn + rank if own else turn]
        tokens, labels = _pad([requests[i] for i in indices], multiple)
        candidates = requests[indices[0]].candidates
        found = score_tokens(tokens.to(device), labels.to(device), num_loops, candidates)
        if own:
            sums[:, :, torch.from_numpy(indices).to(device)] = found.sum(-1, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(sums, group=group)
    lengths = np.array([len(r.tokens) - r.start for r in requests])
    return [Scores(nats, matches == lengths, lengths) for nats, matches in sums.cpu().numpy()]


def bucket(requests: Sequence[Request], batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Indices of the requests of each batch, which have the same candidates.

    Sorted by length, longest first; at most `batch_tokens` with padding.
    """
    lengths = np.array([len(r.tokens) - 1 for r in requests], dtype=np.int64)
    sets = {candidates: i for i, candidates in enumerate(dict.fromkeys(r.candidates for r in requests))}
    owners = np.array([sets[r.candidates] for r in requests], dtype=np.int64)
    for owner in range(len(sets)):
        own = np.flatnonzero(owners == owner)
        order = own[np.argsort(-lengths[own], kind="stable")]
        start = 0
        while start < len(order):
            rows = max(1, batch_tokens // int(lengths[order[start]]))
            yield order[start : start + rows]
            start += rows


def _pad(requests: Sequence[Request], multiple: int) -> tuple[Tensor, Tensor]:
    """(tokens, labels), int64 [B, S] each; labels are ignored outside of what is scored."""
    length = -(-max(len(r.tokens) - 1 for r in requests) // multiple) * multiple
    tokens = torch.zeros(len(requests), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, request in enumerate(requests):
        ids = torch.tensor(request.tokens)
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, request.start - 1 : len(ids) - 1] = ids[request.start :]
    return tokens, labels
