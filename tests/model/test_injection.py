"""Injections follow their formulas; the diagonal one stays accurate and in fp32."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.model.injection import DiagonalDrive, Injection
from pretrain.model.ops import TensorOps
from tests.model.tiny import random_model, tiny_config


def _drive(discretization: str, a_log: float, dt_bias: float, dtype: torch.dtype = torch.float32) -> DiagonalDrive:
    cfg = tiny_config("parcae", {"discretization": discretization})
    drive = DiagonalDrive(cfg, TensorOps())
    with torch.no_grad():
        drive.A_log.fill_(a_log)
        drive.dt_bias.fill_(dt_bias)
        drive.B.weight.copy_(torch.randn(drive.B.weight.shape, generator=torch.Generator().manual_seed(0)))
    return drive.to(dtype)


@pytest.mark.parametrize("dt_bias", [-30.0, -12.0, -1.0, 0.0, 3.0, 12.0])
@pytest.mark.parametrize("a_log", [-4.0, 0.0, 2.0])
def test_discretisations_are_accurate_from_tiny_to_large_steps(a_log: float, dt_bias: float) -> None:
    a, dt = math.exp(a_log), math.log1p(math.exp(dt_bias))
    exact = {"euler": dt, "zoh": -math.expm1(-dt * a) / a}
    for discretization, factor in exact.items():
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
            decay, scale = _drive(discretization, a_log, dt_bias, dtype).step_sizes()
            assert float(scale[0].detach()) == pytest.approx(factor, rel=tolerance)
            assert float(decay[0].detach()) == pytest.approx(math.exp(-dt * a), rel=tolerance)


def test_the_two_agree_where_steps_are_small_and_differ_where_they_are_large() -> None:
    for dt_bias, close in ((-10.0, True), (1.0, False)):
        euler, zoh = (_drive(kind, 0.0, dt_bias).step_sizes()[1][0] for kind in ("euler", "zoh"))
        assert (abs(float((zoh / euler).detach()) - 1) < 1e-4) == close


def test_diagonal_injection_is_the_recurrence() -> None:
    for kind in ("euler", "zoh"):
        model = random_model(tiny_config("parcae", {"discretization": kind}), dtype=torch.float64)
        drive = model.injection.input
        h, e = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
        u, state = model.injection(h, drive(e), None)
        a, dt = drive.A_log.exp(), torch.nn.functional.softplus(drive.dt_bias)
        factor = dt if kind == "euler" else (1 - torch.exp(-dt * a)) / a
        expected = torch.exp(-dt * a) * h + e @ (factor[:, None] * drive.B.weight).T
        torch.testing.assert_close(u, expected, atol=1e-12, rtol=1e-12)
        assert state is h


def test_the_recurrence_stays_in_fp32_under_bf16() -> None:
    model = random_model(tiny_config("parcae"))
    e, h = torch.randn(1, 4, 16).bfloat16(), torch.randn(1, 4, 16).bfloat16()
    inputs = model.injection.input(e)
    assert inputs.decay.dtype == torch.float32 and inputs.drive.dtype == torch.bfloat16
    u, _ = model.injection(h, inputs, None)
    expected = (inputs.decay * h.float() + inputs.drive.float()).bfloat16()
    assert torch.equal(u, expected)


FORMULAS = {
    "rdm": lambda injection, h, e: (
        torch.cat((h, e), -1) @ torch.cat((injection.state.weight, injection.input.weight), 1).T
    ),
    "add": lambda injection, h, e: h + e,
    "lt_input": lambda injection, h, e: (e + h) / ((e + h).square().mean(-1, keepdim=True) + 2.0**-23).sqrt(),
    "flt": lambda injection, h, e: e,
    "blindspot": lambda injection, h, e: h,
}


@pytest.mark.parametrize("family", FORMULAS)
def test_other_injections(family: str) -> None:
    model = random_model(tiny_config(family, {"interloop_norm": False}), dtype=torch.float64)
    h, e = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    u, _ = model.injection(h, model.injection.input(e), None)
    torch.testing.assert_close(u, FORMULAS[family](model.injection, h, e), atol=1e-12, rtol=1e-12)


def test_the_norm_between_loops_spares_rows_in_their_first_loop() -> None:
    model = random_model(tiny_config("blindspot", {"interloop_norm": True}))
    h = torch.randn(3, 4, 16)
    _, state = model.injection(h, model.injection.input(h), torch.tensor([False, True, True])[:, None, None])
    assert torch.equal(state[1:], h[1:])
    torch.testing.assert_close(state[0], model.injection.interloop_norm(h[0]))


def test_spectral_radius() -> None:
    def injection(family: str) -> Injection:
        return random_model(tiny_config(family)).injection

    diagonal = injection("parcae")
    assert diagonal.spectral_radius() == pytest.approx(float(diagonal.input.step_sizes()[0].max().detach()))
    assert diagonal.spectral_radius() < 1
    concat = injection("rdm")
    eigenvalues = torch.linalg.eigvals(concat.state.weight.detach().double())
    assert concat.spectral_radius() == pytest.approx(float(eigenvalues.abs().max()), rel=1e-5)
    with torch.no_grad():
        concat.state.weight.zero_()
        concat.state.weight[0, 1], concat.state.weight[1, 0] = 0.5, -0.5  # eigenvalues +-0.5 i
    assert concat.spectral_radius() == pytest.approx(0.5)
    with torch.no_grad():
        concat.state.weight.zero_()
    assert concat.spectral_radius() == 0
    assert injection("add").spectral_radius() == injection("blindspot").spectral_radius() == 1.0
    assert injection("flt").spectral_radius() is None
