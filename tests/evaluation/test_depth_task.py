"""Depth tasks as benchmarks: what is asked, the metrics, and what does not suit a tokenizer or a context."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep import depth_tasks
from pretrain.data.manifest import MANIFEST_NAME
from pretrain.errors import ConfigError
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.depth import PROBLEMS
from pretrain.evaluation.depth_task import DEPTHS, DepthTask, fit_depths, open_depth_task
from pretrain.evaluation.requests import Encoder, Scores
from pretrain.evaluation.run import evaluate
from pretrain.evaluation.tasks import read_request_task
from tests.model.tiny import random_model, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerFast]:
    """Of each task's own words."""
    folder = tmp_path_factory.mktemp("words")
    for name, problems in PROBLEMS.items():
        depth_tasks.save_tokenizer(problems, folder / name)
    return {name: PreTrainedTokenizerFast.from_pretrained(folder / name) for name in PROBLEMS}


def scores(greedy: list[bool]) -> Scores:
    return Scores(np.zeros(len(greedy)), np.array(greedy), np.ones(len(greedy), dtype=np.int64))


def test_the_depth_that_is_solved_has_no_gap() -> None:
    task = DepthTask("depth:add", PROBLEMS["add"], (1, 2, 4, 8), False, num_problems=20)

    def metrics(*right: int) -> dict[str, float]:
        return task.metrics(scores([i < n for n in right for i in range(20)]))

    assert metrics(20, 19, 10, 20) == {
        "solved_depth": 2.0, "acc_depth_1": 1.0, "acc_depth_2": 0.95, "acc_depth_4": 0.5, "acc_depth_8": 1.0,
    }  # fmt: skip
    assert metrics(20, 20, 20, 20)["solved_depth"] == 8
    assert metrics(18, 20, 20, 20)["solved_depth"] == 0


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_answer_alone_is_scored(name: str, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizer = tokenizers[name]
    task = open_depth_task(f"depth:{name}", (1, 3), 5)
    requests = task.requests(Encoder(tokenizer, 128))
    problems = [p for depth in (1, 3) for p in task.problems.evaluation_problems(depth, 5)]
    for request, problem in zip(requests, problems, strict=True):
        assert tokenizer.decode(request.tokens[request.start :]) == problem.answer
        words = re.findall(r"\w+|[^\w\s]", problem.context)
        assert tokenizer.convert_ids_to_tokens(list(request.tokens[: request.start])) == ["<|bos|>", *words]
        assert request.candidates == tuple(tokenizer.convert_tokens_to_ids(list(task.problems.choices)))


def test_requests_on_disk_say_the_same(tokenizers: dict[str, PreTrainedTokenizerFast], tmp_path: Path) -> None:
    """The choice of the least negative log-likelihood, choice by choice, is the best candidate of the one pass."""
    encoder = Encoder(tokenizers["walk"], 48)
    model = random_model(tiny_config("rdm", vocab_size=len(encoder.tokenizer), context_length=48))
    task = open_depth_task("depth:walk", (1, 2, 8), 32)
    depth_tasks.write_requests(tmp_path, task)
    (found,) = evaluate(model.loop_scores, [task], encoder, [1, 4], batch_tokens=512, device=CPU)
    for depth in (1, 2, 8):
        choices = read_request_task(tmp_path, f"walk/depth_{depth:02}")
        (expected,) = evaluate(model.loop_scores, [choices], encoder, [1, 4], batch_tokens=512, device=CPU)
        for loops in (1, 4):
            assert found.by_loops[loops][f"acc_depth_{depth}"] == expected.by_loops[loops]["acc"]
    assert found.by_loops[1] != found.by_loops[4]
    with pytest.raises(ConfigError, match="there are requests"):
        depth_tasks.write_requests(tmp_path, task)


def test_an_answer_of_several_tokens_is_right_as_a_whole(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    encoder = Encoder(tokenizers["add"], 48)
    model = random_model(tiny_config("rdm", vocab_size=len(encoder.tokenizer), context_length=48))
    task = open_depth_task("depth:add", (1,), 64)
    digits = encoder.tokenizer.convert_tokens_to_ids(list("0123456789"))
    requests = task.requests(encoder)
    right = []
    for request in requests:
        ids = torch.tensor([request.tokens])
        best = model.logits(ids[:, :-1], 2)[0, request.start - 1 :, digits].argmax(-1)
        right.append(bool((torch.tensor(digits)[best] == ids[0, request.start :]).all()))
    assert {len(r.tokens) - r.start for r in requests} == {3}
    (found,) = evaluate(model.loop_scores, [task], encoder, [2], batch_tokens=256, device=CPU)
    assert found.by_loops[2]["acc_depth_1"] == np.mean(right)


def test_text_tokenizers(tokenizer: PreTrainedTokenizerFast, encoder: Encoder) -> None:
    """Byte-level BPE of few merges: a blank of its own before every answer; answers of several tokens are refused."""
    task = open_depth_task("depth:walk", (1, 4), 8)
    problems = [p for depth in (1, 4) for p in task.problems.evaluation_problems(depth, 8)]
    for request, problem in zip(task.requests(encoder), problems, strict=True):
        assert tokenizer.decode(request.tokens[1:]) == f"{problem.context} {problem.answer}"
        assert tokenizer.decode(request.tokens[request.start :]) == problem.answer
        assert len(request.candidates) == 8
    (request, *_) = open_depth_task("depth:add", (1,), 8).requests(encoder)
    assert tokenizer.decode(request.tokens[request.start :]) == "1 3 8"
    assert len(request.candidates) == 11, "ten digits and the blank"
    wide = Encoder(tokenizer, 400)
    problems = PROBLEMS["assign"].evaluation_problems(3, 4)
    for request, problem in zip(open_depth_task("depth:assign", (3,), 4).requests(wide), problems, strict=True):
        assert tokenizer.decode(request.tokens[1:]) == f"{problem.context} {problem.answer}"
        assert tokenizer.decode(request.tokens[request.start :]) == problem.answer and len(request.candidates) == 9
    with pytest.raises(ConfigError, match=r"'depth:mano'.* makes 2 tokens of the answer '10': expected one of its own"):
        open_depth_task("depth:mano", (1,), 8).requests(encoder)


def test_tokenizers_that_do_not_know_the_words(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    for name, other, word in (("walk", "walk_a5", "F"), ("assign", "add", "Adam"), ("mano", "add", "10")):
        with pytest.raises(ConfigError, match=rf"'depth:{name}': the model's tokenizer does not know '{word}'"):
            open_depth_task(f"depth:{name}", (1,), 4).requests(Encoder(tokenizers[other], 128))


def test_depths_and_the_context(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    encoder = Encoder(tokenizers["walk"], 10)
    fitting, notes = fit_depths(open_tasks(["depth:walk"], None, None, 4), encoder)
    assert fitting[0].depths == (1, 2, 3, 4, 5, 6, 7, 8)
    assert notes == [
        "depth:walk: depths 10, 12, 16, 20, 24, 32 are left out: their problems do not fit into the context of 10 "
        "tokens"
    ]
    assert len(fitting[0].requests(encoder)) == 4 * 8
    assert max(len(r.tokens) for r in fitting[0].requests(encoder)) == 11 and not any(
        r.cropped for r in fitting[0].requests(encoder)
    )
    (asked,) = open_tasks(["depth:walk"], None, None, 4, (2, 9))
    with pytest.raises(ConfigError, match=r"depth 9 have up to 11 tokens: expected at most the context's 10"):
        fit_depths([asked], encoder)
    (default,) = open_tasks(["depth:walk"], None, None, 4)
    with pytest.raises(ConfigError, match=r"depth 1 have up to 3 tokens: expected at most the context's 2"):
        fit_depths([default], Encoder(tokenizers["walk"], 2))
    assert open_depth_task("depth:assign", (), None).depths == DEPTHS[:-1], "there are names for depth 24"


def test_unknown_names_and_depths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'depth:wolk': expected depth:walk, depth:walk_a5, .*FOLDER"):
        open_tasks(["depth:wolk"], None, None, None)
    with pytest.raises(ConfigError, match=r"'depth:assign': depth 25: expected at most 24"):
        open_tasks(["depth:assign"], None, None, None, (4, 25))
    with pytest.raises(ConfigError, match=r"depths 4,8: expected none, since no task is a depth task"):
        open_tasks([], None, None, None, (4, 8))
    with pytest.raises(ConfigError, match="'depth:add' comes twice"):
        open_tasks(["depth:add", "depth:add"], None, None, None)
    (tmp_path / MANIFEST_NAME).write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest.json: "):
        open_tasks([f"depth:{tmp_path}"], None, None, None)
