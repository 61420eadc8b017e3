"""Parity with the Fully Looped Transformer's code: five variants, sliding window, grouped heads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from pretrain.config.schema import LossConfig
from pretrain.model.looped import LoopedLM
from tests.model.helpers import make_batch, train_loss
from tests.parity import Case, assert_gradients, load_case

CASES = ("LT", "LT_i", "LT_ia", "FLT", "FLT_res", "FLT_swa", "FLT_gqa")
OBJECTIVES = {"": "terminal", "_STEP": "per_loop", "_FEW": "last_third"}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return _load(request.param)


@cache
def _load(name: str) -> Case:
    return load_case("flt", name)


def _valid_mean(case: Case, losses: torch.Tensor) -> torch.Tensor:
    return losses.flatten(1).sum(1) / (case.labels >= 0).sum()


@pytest.mark.parametrize("loops", [1, 2, 4, 6])
def test_logits_losses_and_norms_at_every_loop_count(case: Case, loops: int) -> None:
    logits = case.model.logits(case.tokens, loops)
    torch.testing.assert_close(logits, case.io[f"k{loops}.logits"], atol=1e-4, rtol=0)
    loss = _valid_mean(case, case.model.loop_losses(case.tokens, case.labels, [loops]))
    assert float(loss.detach()) == pytest.approx(float(case.io[f"k{loops}.loss"]), abs=1e-5)
    norms = torch.stack([h.norm(dim=-1).mean() for h, _ in case.model.states(case.tokens, loops)])
    torch.testing.assert_close(norms, case.io[f"k{loops}.hidden_norms"], atol=0, rtol=1e-5)


def test_final_state(case: Case) -> None:
    *_, (h, _) = case.model.states(case.tokens, 4)
    torch.testing.assert_close(case.model.final_norm(h), case.io["k4.h"], atol=1e-4, rtol=0)


def test_losses_of_the_loops_from_one_pass(case: Case) -> None:
    losses = _valid_mean(case, case.model.loop_losses(case.tokens, case.labels, [1, 2, 3, 4]))
    for run, first in (("k4_STEP", 0), ("k4_FEW", 2)):
        if f"{run}.losses" in case.io:
            torch.testing.assert_close(losses[first:], case.io[f"{run}.losses"], atol=1e-5, rtol=0)


def test_unrounded_rope_tables(case: Case) -> None:
    model = LoopedLM(replace(case.model.cfg, rope_table="fp32")).eval()
    model.load_state_dict(case.imported.tensors)
    loss = _valid_mean(case, model.loop_losses(case.tokens, case.labels, [4]))
    assert float(loss.detach()) == pytest.approx(float(case.io["k4_rope32.loss"]), abs=1e-5)
    if "k4_rope32.logits" in case.io:
        torch.testing.assert_close(model.logits(case.tokens, 4), case.io["k4_rope32.logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("run", ["k1", "k2", "k4", "k6", "k4_STEP", "k4_FEW"])
def test_training_losses_and_gradients(case: Case, run: str) -> None:
    if f"{run}.loss" not in case.io:
        assert case.report["case"] in ("LT_i", "LT_ia"), "only these have no dense losses in the reference"
        return
    rows, loops = len(case.tokens), int(run[1])
    batch, plan, _ = make_batch(case.tokens, case.labels, [0] * rows, [loops] * rows)
    loss = train_loss(case.model, batch, plan, LossConfig(objective=OBJECTIVES[run[2:]])).loss
    assert float(loss.detach()) == pytest.approx(float(case.io[f"{run}.loss"]), abs=1e-5)
    if run in case.report["grads"]:
        assert_gradients(case.gradients(), case.report["grads"][run], 1e-4)


def test_rope_tables_are_the_stored_ones() -> None:
    from safetensors.torch import load_file

    from pretrain.model.attention_mask import rope_tables
    from tests.parity import parity_folder

    weights = load_file(parity_folder("flt") / "base.weights.safetensors")
    cos, sin = rope_tables(_load("FLT").model.cfg, torch.arange(16)[None])
    assert torch.equal(cos[0, :, 0], weights["extra.rope_cos"].float())
    assert torch.equal(-sin[0, :, 0], weights["extra.rope_sin"].float())
