"""Parity with Parcae's code: diagonal, linear and additive injection, with and without value embeddings."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.model.helpers import make_batch, state_logits, train_loss, train_states
from tests.parity import Case, load_case

CASES = ("a_base", "f_linear_injection", "g_add_injection", "o_no_value_embeds")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return _load(request.param)


@cache
def _load(name: str) -> Case:
    return load_case("parcae", name)


def _loss(case: Case, logits: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), case.labels.flatten()))


@pytest.mark.parametrize("run", ["eval_loops1", "eval_loops4", "eval_loops7", "eval_loops4_state0"])
def test_evaluation_gives_the_reference_logits_and_losses(case: Case, run: str) -> None:
    state = case.io["state0"] if run.endswith("state0") else None
    loops = int(run.removesuffix("_state0").removeprefix("eval_loops"))
    logits = case.model.logits(case.tokens, loops, state=state)
    torch.testing.assert_close(logits, case.io[f"{run}.logits"], atol=1e-4, rtol=0)
    assert _loss(case, logits) == pytest.approx(float(case.io[f"{run}.loss"]), abs=1e-5)
    losses = case.model.loop_losses(case.tokens, case.labels, [loops], state=state)
    mean = losses.sum() / (case.labels >= 0).sum()
    assert float(mean) == pytest.approx(float(case.io[f"{run}.loss"]), abs=1e-5)


RUNS = {"train_n0_k3": ([0] * 3, [3] * 3), "train_n4_k2": ([4] * 3, [2] * 3), "train_perseq": ([5, 0, 2], [3, 1, 3])}


@pytest.mark.parametrize("run", RUNS)
def test_training_gives_the_reference_logits_and_losses(case: Case, run: str) -> None:
    batch, loops, order = make_batch(case.tokens, case.labels, *RUNS[run])
    states = train_states(case.model, batch, loops)
    logits = state_logits(case.model, batch.tokens, states[-1])
    torch.testing.assert_close(logits, case.io[f"{run}.logits"][order], atol=1e-4, rtol=0)
    loss = train_loss(case.model, batch, loops).loss
    assert float(loss.detach()) == pytest.approx(float(case.io[f"{run}.loss"]), abs=1e-5)


def test_depths_of_the_rows_are_the_ones_stored(case: Case) -> None:
    stored = case.io["train_perseq.n"].tolist(), case.io["train_perseq.k"].tolist()
    assert stored == RUNS["train_perseq"]


def test_gradients_through_compacted_rows_are_the_reference(case: Case) -> None:
    batch, loops, _ = make_batch(case.tokens, case.labels, *RUNS["train_perseq"])
    train_loss(case.model, batch, loops)
    gradients = case.gradients()
    prefix = "train_perseq.grad."
    reference = {k.removeprefix(prefix): v for k, v in case.io.items() if k.startswith(prefix)}
    assert gradients.keys() == reference.keys()
    for name, expected in reference.items():
        difference = (gradients[name] - expected).norm()
        assert difference <= 1e-4 * expected.norm(), (name, float(difference / expected.norm()))
