"""Diagnostics of states, gradients and linear maps whose values are known by construction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrain.diagnostics.gradients import radial, supervision
from pretrain.diagnostics.interventions import Clamp, Noise, RemoveRadial, ZeroSubspace
from pretrain.diagnostics.linear import expansion, linear_parts
from pretrain.diagnostics.measure import trace_loops, variance_shares
from pretrain.diagnostics.states import angle_between, norm_stats, update, variance_share
from pretrain.diagnostics.training import gradient_oscillation, loss_spikes, repetition_rate
from pretrain.model.looped import LoopedLM
from pretrain.model.subspace import readout_directions
from tests.model.tiny import random_model, tiny_config

TOLERANCE = 1e-5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(width: int, count: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(random(width, count, seed=seed)).Q


def test_norms_of_known_lengths() -> None:
    lengths = torch.arange(1, 1002, dtype=torch.float64)
    h = lengths[:, None] * torch.nn.functional.normalize(random(1001, 7), dim=-1)
    stats = norm_stats(h.reshape(7, 143, 7))
    assert stats.mean == pytest.approx(501.0, rel=TOLERANCE)
    assert stats.rms == pytest.approx(math.sqrt(float(lengths.square().mean()) / 7), rel=TOLERANCE)
    assert stats[2:] == pytest.approx((501.0, 901.0, 991.0, 1000.0, 1001.0), rel=TOLERANCE)


def test_an_update_by_a_known_rotation_and_growth() -> None:
    angle, growth = 1e-4, 1.5
    e = orthonormal(6, 2).T
    h = 3 * e[:1]
    following = 3 * growth * (math.cos(angle) * e[:1] + math.sin(angle) * e[1:])
    change = update(h, following)
    assert float(change.angle) == pytest.approx(angle, rel=TOLERANCE)
    length = 3 * math.sqrt((growth * math.cos(angle) - 1) ** 2 + (growth * math.sin(angle)) ** 2)
    assert float(change.step_norm) == pytest.approx(length, rel=TOLERANCE)
    assert float(change.relative_residual) == pytest.approx(length / 3, rel=TOLERANCE)
    assert float(change.radial_velocity) == pytest.approx(3 * (growth * math.cos(angle) - 1), rel=TOLERANCE)
    assert float(angle_between(h.float(), -h.float())) == pytest.approx(math.pi)


def test_a_gradient_with_a_known_radial_part() -> None:
    h = random(50, 8)
    u = torch.nn.functional.normalize(h, dim=-1)
    across = random(50, 8, seed=1)
    across = torch.nn.functional.normalize(across - (across * u).sum(-1, keepdim=True) * u, dim=-1)
    signs = torch.where(torch.arange(50) < 40, 1.0, -1.0)[:, None]
    g = 7 * (0.6 * signs * u + 0.8 * across)
    g[0] = 0
    assert radial(g, h).fraction == pytest.approx(0.6, rel=TOLERANCE)
    assert radial(g, h).signed == pytest.approx(0.6 * (39 - 10) / 49, rel=TOLERANCE)
    assert supervision(g, h, torch.eye(8).double()[:, :3]).radial == pytest.approx(0.36, rel=TOLERANCE)


def test_supervision_of_known_directions() -> None:
    basis = orthonormal(8, 8)
    g = basis[:, :1].T * 3 + basis[:, 4:5].T * 4
    assert supervision(g, random(1, 8), basis[:, 3:5]).subspace == pytest.approx(16 / 25, rel=TOLERANCE)
    weak = torch.tensor([[1.0, 0.5, 0.009, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert supervision(weak, random(2, 4), basis[:4, :1]).weak_coordinates == pytest.approx(0.5)


def test_variance_over_loops_in_a_subspace() -> None:
    basis = orthonormal(6, 6)
    loops = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None, None]
    h = 5.0 + loops * (basis[:, 0] + 2 * basis[:, 1]).expand(4, 6)
    assert variance_share(h, basis[:, :1]) == pytest.approx(0.2, rel=TOLERANCE)
    assert variance_share(h, basis[:, 2:]) == pytest.approx(0.0, abs=1e-12)
    turned = loops * basis[:, 0] * 0.3 + (3.0 + loops) * basis[:, 1].expand(4, 6)
    assert variance_share(turned, None) == pytest.approx(1 / 1.09, rel=TOLERANCE)


class Spiral(LoopedLM):
    """Each loop turns every state by a tenth of a radian within one plane, and makes it longer by a half."""

    def __init__(self) -> None:
        cfg = tiny_config("blindspot")
        super().__init__(cfg)
        self.load_state_dict(random_model(cfg).state_dict())
        self.compute_dtype = torch.float64
        self.double().eval()
        rotation = torch.eye(cfg.width, dtype=torch.float64)
        rotation[:2, :2] = torch.tensor([[math.cos(0.1), -math.sin(0.1)], [math.sin(0.1), math.cos(0.1)]])
        self.turn = 1.5 * rotation
        with torch.no_grad():
            self.embedding.weight[:, 2:] = 0
            self.position_embedding.weight.zero_()
        self._core_step = lambda h, inputs, first: h @ self.turn.T


@pytest.fixture(scope="module")
def spiral() -> Spiral:
    return Spiral()


def rows(model: LoopedLM) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(model.cfg.vocab_size, (3, 9), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def test_the_trace_of_a_spiral(spiral: Spiral) -> None:
    batch = rows(spiral)
    trace = trace_loops(spiral, [batch, batch], 4)
    start = spiral.embedding.weight.detach()[batch[0]].norm(dim=-1).flatten().repeat(2)
    for t in range(4):
        torch.testing.assert_close(trace.norm[t], 1.5 ** (t + 1) * start, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(trace.angle, torch.full_like(trace.angle, 0.1), rtol=TOLERANCE, atol=0)
    residual = math.sqrt((1.5 * math.cos(0.1) - 1) ** 2 + (1.5 * math.sin(0.1)) ** 2)
    torch.testing.assert_close(trace.relative_residual, torch.full_like(trace.angle, residual), rtol=TOLERANCE, atol=0)
    velocity = (1.5 * math.cos(0.1) - 1) * trace.norm[:-1]
    torch.testing.assert_close(trace.radial_velocity, velocity, rtol=TOLERANCE, atol=0)
    assert trace.norms(16)[3].mean == pytest.approx(1.5**4 * float(start.mean()), rel=TOLERANCE)


def test_a_clamp_and_a_removed_radius_hold_the_norm_of_a_spiral(spiral: Spiral) -> None:
    batch = rows(spiral)
    plain = trace_loops(spiral, [batch], 4)
    clamped = trace_loops(spiral, [batch], 4, Clamp())
    torch.testing.assert_close(clamped.norm, plain.norm[:1].expand(4, -1), rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(clamped.angle, plain.angle, rtol=TOLERANCE, atol=0)
    removed = trace_loops(spiral, [batch], 4, RemoveRadial())
    torch.testing.assert_close(removed.radial_velocity, torch.zeros_like(plain.angle), rtol=0, atol=1e-9)
    turned = math.sqrt(1 + (1.5 * math.sin(0.1)) ** 2)
    torch.testing.assert_close(removed.norm[1:] / removed.norm[:-1], torch.full_like(plain.angle, turned))


def test_edits_of_a_subspace_and_noise_have_their_size() -> None:
    basis, h = orthonormal(8, 3), random(2, 5, 8)
    assert float((ZeroSubspace(basis)(1, h, h) @ basis).abs().max()) < 1e-12
    for noise, kept in ((Noise(basis, 0.01), basis), (Noise(None, 0.01), None)):
        change = noise(1, h, h) - h
        torch.testing.assert_close(change.norm(dim=-1), 0.01 * h.norm(dim=-1))
        if kept is not None:
            torch.testing.assert_close(change @ kept @ kept.T, change)
        else:
            assert float(angle_between(h, h + change).max()) < 1e-7


def test_states_of_a_plane_vary_in_it_alone(spiral: Spiral) -> None:
    plane = torch.eye(16, dtype=torch.float64)
    shares = variance_shares(spiral, rows(spiral)[0], 4, [plane[:, :2], plane[:, 2:]])
    assert shares == pytest.approx([1.0, 0.0], abs=TOLERANCE)


@pytest.mark.parametrize("readout", ["norm", "raw"])
def test_the_singular_spectrum_of_a_known_readout(readout: str) -> None:
    model = random_model(tiny_config("parcae", {"readout": readout}, vocab_size=29), dtype=torch.float64)
    u, v = orthonormal(29, 16, seed=3), orthonormal(16, 16, seed=4)
    values = torch.logspace(0, -5, 16, dtype=torch.float64)
    with torch.no_grad():
        scale = 1.0 if readout == "raw" else model.final_norm.weight
        model.embedding.weight[:29] = u @ torch.diag(values) @ v.T / scale
        model.output_projection.weight.copy_(torch.eye(16))
    found = readout_directions(model)
    torch.testing.assert_close(found.values, values, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close((found.bottom(2).T @ v[:, -2:]).abs(), torch.eye(2).double(), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close((found.top(1).T @ v[:, :1]).abs(), torch.ones(1, 1).double())


def test_the_linear_parts_of_a_known_injection() -> None:
    model = random_model(tiny_config("parcae"), dtype=torch.float64)
    rotation = orthonormal(16, 16)
    with torch.no_grad():
        model.injection.input.A_log.fill_(math.log(2.0))
        model.injection.input.dt_bias.fill_(math.log(math.expm1(0.3)))
        model.injection.input.A_log[0] = math.log(0.5)
        model.injection.input.B.weight.copy_(4 * rotation)
        model.output_projection.weight.copy_(0.7 * rotation)
    parts = linear_parts(model)
    assert parts.spectral_radius == pytest.approx(math.exp(-0.15), rel=TOLERANCE)
    assert parts.drive_norm == pytest.approx(0.3 * 4, rel=TOLERANCE)
    assert parts.projection_norm == pytest.approx(0.7, rel=TOLERANCE)
    assert expansion(model, random(2, 3, 16)) == pytest.approx(0.7, rel=TOLERANCE)
    assert linear_parts(random_model(tiny_config("blindspot")))[1:] == (None, None)


def test_gradient_oscillation_and_spikes() -> None:
    assert gradient_oscillation([1.0, math.e] * 100) == pytest.approx(0.5, rel=TOLERANCE)
    assert gradient_oscillation([1e9] * 50 + [2.0] * 100) == 0.0
    assert gradient_oscillation([2.0, math.nan, 0.0]) is None
    losses = [3.0 + 0.01 * (i % 5) for i in range(200)]
    losses[120], losses[150] = 4.0, math.nan
    assert loss_spikes(losses) == [120, 150]


def test_repetition_of_four_grams() -> None:
    assert repetition_rate(torch.arange(20)[None]) == 0.0
    assert repetition_rate(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4], list(range(8))])) == pytest.approx(1 / 10)
