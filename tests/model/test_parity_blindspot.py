"""Parity with the Readout Blind Spot code: readout rules, per-loop losses, norm penalty, norm between loops."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from pretrain.config.schema import LossConfig
from tests.model.helpers import make_batch, state_logits, train_loss
from tests.parity import Case, assert_gradients, load_case

LOSSES = {
    "terminal": LossConfig(),
    "perstep": LossConfig(objective="per_loop"),
    "terminal_pen": LossConfig(norm_penalty=0.01),
    "perstep_pen": LossConfig(objective="per_loop", norm_penalty=0.01),
}


@pytest.fixture(params=("norm", "raw", "final_only", "norm_interloop"))
def case(request: pytest.FixtureRequest) -> Case:
    return _load(request.param)


@cache
def _load(name: str) -> Case:
    return load_case("blindspot", name)


def _assert_logits(logits: Tensor, reference: Tensor, raw: bool) -> None:
    # Raw logits are about 50 in size, so their tolerance is relative to it.
    atol = 1e-6 * float(reference.abs().max()) if raw else 1e-4
    torch.testing.assert_close(logits, reference, atol=atol, rtol=0)


def test_logits_of_every_loop(case: Case) -> None:
    states = [h for h, _ in case.model.states(case.tokens, 6)]
    readout = case.model.cfg.recurrence.readout
    for index, reference in enumerate(case.io["k6.all_logits"]):
        last = index == 5
        logits = state_logits(case.model, case.tokens, states[index], last=last)
        _assert_logits(logits, reference, raw=readout == "raw" or (readout == "final_norm" and not last))


@pytest.mark.parametrize("loops", [1, 2, 4, 6])
def test_logits_of_shorter_runs(case: Case, loops: int) -> None:
    name = f"k{loops}.final_logits"
    reference = case.io[name] if name in case.io else case.io["k6.all_logits"][loops - 1]
    _assert_logits(case.model.logits(case.tokens, loops), reference, raw=case.report["case"] == "raw")


def test_states_and_their_norms(case: Case) -> None:
    states = torch.stack([h for h, _ in case.model.states(case.tokens, 4)])
    torch.testing.assert_close(states, case.io["k4.hidden"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(states.norm(dim=-1).mean((1, 2)), case.io["k4.norms"], atol=0, rtol=1e-5)
    torch.testing.assert_close(states.square().mean((1, 2, 3)), case.io["k4.hidden_sq"], atol=0, rtol=1e-5)


@pytest.mark.parametrize("loops", [1, 2, 4, 6])
@pytest.mark.parametrize("loss_name", LOSSES)
def test_losses_and_gradients(case: Case, loss_name: str, loops: int) -> None:
    rows, run = len(case.tokens), f"k{loops}_{loss_name}"
    batch, plan, _ = make_batch(case.tokens, case.labels, [0] * rows, [loops] * rows)
    output = train_loss(case.model, batch, plan, LOSSES[loss_name])
    reference = float(case.io[f"{run}.loss"])
    assert float(output.loss.detach()) == pytest.approx(reference, abs=1e-5, rel=1e-6)
    if "pen" in loss_name:
        assert float(output.metrics["norm_penalty"]) == pytest.approx(float(case.io[f"k{loops}.penalty"]), rel=1e-5)
    if run in case.report["grads"]:
        assert_gradients(case.gradients(), case.report["grads"][run], 1e-4)
