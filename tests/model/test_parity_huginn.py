"""Parity with the recurrent-depth code (Huginn): sandwich and pre-norm blocks, linear and additive injection."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.model.helpers import make_batch, train_loss
from tests.parity import Case, assert_gradients, load_case


@pytest.fixture(params=("sandwich", "prenorm", "prenorm_add"))
def case(request: pytest.FixtureRequest) -> Case:
    return _load(request.param)


@cache
def _load(name: str) -> Case:
    return load_case("huginn", name)


@pytest.mark.parametrize("run", ["r1", "r2", "r4", "r6", "r4_zero"])
def test_logits_and_losses_at_every_loop_count(case: Case, run: str) -> None:
    state = case.io["state0"]
    state = torch.zeros_like(state) if run.endswith("zero") else state
    loops = int(run[1])
    logits = case.model.logits(case.tokens, loops, state=state)
    torch.testing.assert_close(logits, case.io[f"{run}.logits"], atol=1e-4, rtol=0)
    losses = case.model.loop_losses(case.tokens, case.labels, [loops], state=state)
    assert float(losses.sum() / (case.labels >= 0).sum()) == pytest.approx(float(case.io[f"{run}.loss"]), abs=1e-5)


def test_states_after_every_loop(case: Case) -> None:
    states = torch.stack([h for h, _ in case.model.states(case.tokens, 6, state=case.io["state0"])])
    torch.testing.assert_close(states, case.io["r6.states"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(case.model.final_norm(states[3]), case.io["r4.coda_input"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("run", "no_grad", "grad"), [("r1", 0, 1), ("r4", 0, 4), ("n2_k2", 2, 2)])
def test_losses_and_gradients_with_truncation(case: Case, run: str, no_grad: int, grad: int) -> None:
    rows = len(case.tokens)
    batch, loops, _ = make_batch(case.tokens, case.labels, [no_grad] * rows, [grad] * rows, case.io["state0"])
    loss = train_loss(case.model, batch, loops).loss
    assert float(loss.detach()) == pytest.approx(float(case.io[f"{run}.loss"]), abs=1e-5)
    assert_gradients(case.gradients(), case.report["grads"][run], 1e-4)
