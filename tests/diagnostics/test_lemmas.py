"""The two lemmas of the readout blind spot, and the authors' own numbers through the real model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.diagnostics.gradients import normalised_radial_fraction, radial_cosine, readout_gradient
from pretrain.diagnostics.measure import trace_loops
from pretrain.diagnostics.states import angle_between, unit
from pretrain.model.attention_mask import make_context
from pretrain.model.looped import LoopedLM, LoopInputs
from tests.model.tiny import random_model, tiny_config
from tests.parity import load_case


def token_rows(model: LoopedLM, seed: int = 0, count: int = 2) -> tuple[Tensor, Tensor]:
    rows = torch.randint(model.cfg.vocab_size, (count, 10), generator=torch.Generator().manual_seed(seed))
    return rows[:, :-1], rows[:, 1:]


def gradients(model: LoopedLM, h: Tensor, seed: int) -> Tensor:
    tokens, labels = token_rows(model, seed)
    ctx = make_context(model.cfg, tokens.shape[1], tokens.device, model.compute_dtype)
    return readout_gradient(model, h, ctx, tokens, labels, last=True)[1]


def states(seed: int, rms: float) -> Tensor:
    h = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rms * h / h.square().mean(-1, keepdim=True).sqrt()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-3.0, 4.0))
def test_lemma_1_a_normalised_readout_has_the_radial_gradient_that_eps_leaves(seed: int, exponent: float) -> None:
    model = random_model(tiny_config("blindspot"), seed=seed, dtype=torch.float64)
    h = states(seed, 10.0**exponent)
    g_h = gradients(model, h, seed)
    raw = random_model(tiny_config("blindspot", {"readout": "raw"}), seed=seed, dtype=torch.float64)
    z = model.final_norm(h)
    g_z = gradients(raw, z, seed)  # the same head on z
    expected = normalised_radial_fraction(g_z, z, g_h, h, model.cfg.norm_eps)
    torch.testing.assert_close(radial_cosine(g_h, h).abs(), expected, rtol=1e-6, atol=1e-15)
    if exponent >= 0:
        assert float(expected.mean()) < 1e-6


@pytest.mark.parametrize("family", ["flt", "lt"])
def test_lemma_1_holds_with_a_softcap_and_weightless_norms(family: str) -> None:
    model = random_model(tiny_config(family), dtype=torch.float64)
    h = states(1, 3.0)
    assert float(radial_cosine(gradients(model, h, 1), h).abs().max()) < 1e-6


def test_a_raw_readout_supervises_the_radius() -> None:
    model = random_model(tiny_config("blindspot", {"readout": "raw"}), dtype=torch.float64)
    for rms in (0.1, 1.0, 100.0):
        h = states(2, rms)
        assert float(radial_cosine(gradients(model, h, 2), h).abs().mean()) > 0.05


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lemma_2_the_radius_grows_by_a_constant_and_the_direction_turns_by_its_inverse(seed: int) -> None:
    """F(s u) = s u + b(u) + O(1/s): ||F|| - s - <u, b> and angle - ||b_perp|| / s fall by the orders 1/s and 1/s^2."""
    model = random_model(tiny_config("blindspot", norm_eps=1e-30), seed=seed, dtype=torch.float64)
    tokens, _ = token_rows(model, seed)
    ctx = make_context(model.cfg, tokens.shape[1], tokens.device, torch.float64)
    inputs = LoopInputs(model.injection.input(torch.zeros(2, 9, 16).double()), ctx, (None, None))
    u = unit(states(seed, 1.0))

    @torch.no_grad()
    def loop(s: float) -> Tensor:
        return model.core_step(s * u, inputs, None)

    b = loop(1e7) - 1e7 * u
    along = (u * b).sum(-1)
    across = (b - along[..., None] * u).norm(dim=-1)
    scales = (1e2, 1e3, 1e4)
    growth = [float((loop(s).norm(dim=-1) - s - along).abs().max()) for s in scales]
    turn = [float((angle_between(u, loop(s)) - across / s).abs().max()) for s in scales]
    for values, order in ((growth, 1), (turn, 2)):
        assert values[0] > 1e-8  # above rounding, so that an order can be seen
        for larger, smaller in pairwise(values):
            assert 0.8 < float(torch.tensor(larger / smaller).log10()) / order < 1.2, (values, order)


CASES = ("norm", "raw", "final_only", "norm_interloop")


@pytest.mark.parametrize("name", CASES)
def test_the_authors_norms_and_penalty(name: str) -> None:
    case = load_case("blindspot", name)
    stats = trace_loops(case.model, [(case.tokens, case.labels)], 4).norms(48)
    assert [s.mean for s in stats] == pytest.approx(case.io["k4.norms"].tolist(), rel=1e-5)
    assert [s.rms**2 for s in stats] == pytest.approx(case.io["k4.hidden_sq"].tolist(), rel=1e-5)
    assert sum(s.rms**2 for s in stats) / 4 == pytest.approx(float(case.io["k4.penalty"]), rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_authors_radial_gradients(name: str) -> None:
    """`radial_readout_f64`: our gradient through loop t's own readout, in fp64, token by token."""
    case = load_case("blindspot", name)
    model = case.model.double()
    model.compute_dtype = torch.float64
    reference = case.io["k4.radial_readout_f64"]
    for t, (h, ctx) in enumerate(model.states(case.tokens, 4), start=1):
        _, g = readout_gradient(model, h, ctx, case.tokens, case.labels, last=t == 4)
        torch.testing.assert_close(radial_cosine(g, h).abs(), reference[t - 1].double(), rtol=1e-4, atol=1e-12)
