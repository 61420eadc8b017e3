"""Scores of requests: those of each request alone, from as many core loops as the largest count."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.evaluation.requests import Encoder, Request, common_prefix, common_suffix
from pretrain.evaluation.scoring import bucket, score
from pretrain.model.looped import LoopedLM
from tests.helpers import run_ranks
from tests.model.tiny import random_model, tiny_config

LOOPS = [1, 2, 4, 8]
CPU = torch.device("cpu")


def make_requests(count: int = 40, vocab_size: int = 29) -> list[Request]:
    rng = random.Random(0)
    lengths = [rng.randint(2, 16) for _ in range(count)]
    return [Request(tuple(rng.choices(range(vocab_size), k=n + 1)), rng.randint(1, n)) for n in lengths]


def score_alone(model: LoopedLM, request: Request, num_loops: int) -> tuple[float, bool]:
    """By the full logits of this request, in a pass of its own."""
    ids = torch.tensor([request.tokens])
    logits = model.logits(ids[:, :-1], num_loops)[0, request.start - 1 :].double()
    wanted = ids[0, request.start :]
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
    return float(nats), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("batch_tokens", [16, 100, 10_000])
@pytest.mark.parametrize("family", ["parcae", "flt"])
def test_scores_are_those_of_each_request_alone(family: str, batch_tokens: int) -> None:
    model = random_model(tiny_config(family), dtype=torch.float64)
    requests = make_requests()
    found = score(model.loop_scores, requests, LOOPS, batch_tokens=batch_tokens, device=CPU)
    for loops, scores in zip(LOOPS, found, strict=True):
        alone = [score_alone(model, request, loops) for request in requests]
        np.testing.assert_allclose(scores.nats, [nats for nats, _ in alone], rtol=1e-12)
        assert scores.greedy.tolist() == [greedy for _, greedy in alone]
    assert found[0].num_tokens.tolist() == [len(r.tokens) - r.start for r in requests]


@pytest.mark.parametrize("batch_tokens", [24, 10_000])
def test_the_most_likely_of_each_requests_candidates(batch_tokens: int) -> None:
    """Requests of several tasks at once; likelihoods are over the whole vocabulary in each case."""
    model = random_model(tiny_config("rdm"), dtype=torch.float64)
    sets: list[tuple[int, ...]] = [(), (1, 5, 9), (28, 0), (5,)]
    plain = [Request(r.tokens[: r.start + 1], r.start) for r in make_requests(80)]
    requests = [request._replace(candidates=sets[i % 4]) for i, request in enumerate(plain)]
    found = score(model.loop_scores, requests, [1, 3], batch_tokens=batch_tokens, device=CPU)
    everything = score(model.loop_scores, plain, [1, 3], batch_tokens=batch_tokens, device=CPU)
    for loops, scores, whole in zip([1, 3], found, everything, strict=True):
        np.testing.assert_allclose(scores.nats, whole.nats, rtol=1e-12)
        for request, greedy in zip(requests, scores.greedy, strict=True):
            logits = model.logits(torch.tensor([request.tokens[:-1]]), loops)[0, -1]
            allowed = request.candidates or range(29)
            assert greedy == (max(allowed, key=lambda i: float(logits[i])) == request.tokens[-1])
    assert len({tuple(s.greedy) for s in (*found, *everything)}) == 4, "loops and candidates matter"
    batches = list(bucket(requests, batch_tokens))
    assert sorted(i for batch in batches for i in batch) == list(range(80))
    assert all(len({requests[i].candidates for i in batch}) == 1 for batch in batches)


def test_greedy_continuations_are_found() -> None:
    model = random_model(tiny_config("parcae"))
    start = torch.tensor([[3, 5, 7]])
    for _ in range(3):
        start = torch.cat((start, model.logits(start, 2)[:, -1:].argmax(-1)), 1)
    right = tuple(start[0].tolist())
    wrong = (*right[:-1], (right[-1] + 1) % 29)
    found = score(model.loop_scores, [Request(right, 3), Request(wrong, 3)], [2], batch_tokens=64, device=CPU)
    assert found[0].greedy.tolist() == [True, False]


def test_a_sweep_of_eight_counts_takes_eight_core_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config("parcae"))
    calls: list[int] = []
    core = model._core_step

    def counted(h: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(h.shape[0])
        return core(h, *args)

    monkeypatch.setattr(model, "_core_step", counted)
    score(model.loop_scores, make_requests(5), range(1, 9), batch_tokens=10_000, device=CPU)
    assert calls == [5] * 8


def test_batches_hold_similar_lengths_and_no_more_than_they_may() -> None:
    requests = make_requests(200)
    batches = list(bucket(requests, 64))
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(200))
    for batch in batches:
        lengths = [len(requests[i].tokens) - 1 for i in batch]
        assert max(lengths) * len(lengths) <= 64
    tokens = sum(len(requests[i].tokens) - 1 for batch in batches for i in batch)
    padded = sum(max(len(requests[i].tokens) - 1 for i in batch) * len(batch) for batch in batches)
    assert padded < 1.05 * tokens


def test_three_processes_score_what_one_does() -> None:
    requests = make_requests(11)
    model = random_model(tiny_config("parcae"))
    expected = score(model.loop_scores, requests, [1, 3], batch_tokens=32, device=CPU)
    results = run_ranks(3, "tests.evaluation.rank_cases:score_shared", timeout_sec=120)
    for result in results:
        np.testing.assert_allclose(result["nats"], [scores.nats for scores in expected], rtol=1e-6)
        assert result["greedy"] == [scores.greedy.tolist() for scores in expected]
    assert len({result["calls"] for result in results}) == 1, "sharded parameters are gathered by all"


def test_requests_begin_with_bos_and_split_at_the_border(encoder: Encoder) -> None:
    request = encoder.request("The river runs", " to the sea")
    bos = encoder.tokenizer.bos_token_id
    assert request.tokens[0] == bos and request.cropped == 0
    assert encoder.tokenizer.decode(request.tokens[request.start :]) == " to the sea"
    joined = encoder.request("The river ru", "ns")  # "runs" may be one token: it is scored whole
    assert encoder.tokenizer.decode(joined.tokens[1:]) == "The river runs" and 1 <= joined.start < len(joined.tokens)


def test_what_is_longer_than_the_context_loses_its_beginning(encoder: Encoder) -> None:
    request = encoder.request("The river runs to the sea." * 20, " She was born")
    assert len(request.tokens) == encoder.context_length + 1 and request.cropped > 0
    assert encoder.tokenizer.decode(request.tokens[request.start :]) == " She was born"
    long = encoder.request("The", " qxz" * 60)
    assert (len(long.tokens), long.start) == (49, 1) and long.cropped > 60
    with pytest.raises(ConfigError, match="without a token of its own"):
        encoder.request("The river", "")


def test_common_parts() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5]]) == 2 == common_suffix([[7, 1, 2], [9, 9, 1, 2]])
    assert common_prefix([[1, 2], [1, 2, 3]]) == 2
