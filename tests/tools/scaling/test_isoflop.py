"""Parabolas, optima and their exponents, and the published constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pretrain.errors import ConfigError
from tools.scaling.isoflop import Curve, find_optimum, fit_exponents
from tools.scaling.published import MAIN_ROWS, predicted_errors
from tools.scaling.recovery import recover_exponents

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LOOPS = np.array([2.0, 4.0, 6.0, 8.0, 10.0, 12.0])


def curve(flops: float, best: float, curvature: float = 0.05) -> Curve:
    tokens = flops / (3e8 + 1e8 * LOOPS)
    return Curve("one", flops, LOOPS, tokens, 2.9 + curvature * np.log(LOOPS / best) ** 2)


def test_the_vertex_is_the_optimum() -> None:
    found = find_optimum(curve(1e18, 5.0))
    assert found.problem is None
    assert (found.mean_loops, found.loss, found.curvature) == pytest.approx((5.0, 2.9, 0.05))
    assert found.tokens == pytest.approx(1e18 / 8e8) and found.curve.loop_share(5.0) == pytest.approx(5 / 8)


def test_tokens_are_those_of_the_runs_where_there_are_runs() -> None:
    """With fixed layers the first loop is the only one whose layers all have gradients: C / D is no line in mu."""
    costs = np.array([6e8, 4.4e8, 4.4e8, 4.5e8, 4.4e8, 4.4e8])
    found = find_optimum(replace(curve(1e18, 5.0), tokens=1e18 / costs)).curve
    assert [1e18 / found.tokens_at(mu) for mu in LOOPS] == pytest.approx(costs.tolist())
    assert 1e18 / found.tokens_at(3.0) == pytest.approx(5.2e8)


def test_exponents_describe_one_curve() -> None:
    # Over a small range of budgets the two exponents meet a s + b = 1 to second order.
    optima = [find_optimum(curve(1e18 * x, 6 * x**0.4)) for x in (0.9, 1.0, 1.1)]
    found = fit_exponents(optima, bootstraps=10)
    assert found.loops == pytest.approx(0.4) and found.check == pytest.approx(1.0, abs=1e-3)
    assert found.prefactors["one"][0] * 1e18**0.4 == pytest.approx(6.0)
    loops, tokens = found.optimum("one", 2e18)
    assert loops == pytest.approx((6 * 2**0.4,) * 3)
    assert tokens[0] == pytest.approx(1e18 / 9e8 * 2**found.tokens, rel=1e-3)


def test_an_optimum_at_another_budget_has_an_interval_that_widens() -> None:
    rng = np.random.default_rng(0)
    curves = [curve(1e18 * x, 6 * x**0.4) for x in (0.5, 1.0, 2.0)]
    noisy = [replace(c, loss=c.loss * (1 + 0.0005 * rng.standard_normal(len(c.loss)))) for c in curves]
    found = fit_exponents([find_optimum(c) for c in noisy], bootstraps=100)
    near, far = (found.optimum("one", flops)[0] for flops in (1e18, 64e18))
    assert near[1] < near[0] < near[2] and far[1] < far[0] < far[2]
    assert np.log(far[2] / far[1]) > 2 * np.log(near[2] / near[1])


def test_planted_exponents_lie_in_their_intervals() -> None:
    score = recover_exponents(repeats=6, bootstraps=40)
    assert score.covered["a"] >= 5 and score.covered["b"] >= 5


def test_a_vertex_that_tells_no_optimum_is_named() -> None:
    assert "outside" in str(find_optimum(curve(1e18, 40.0)).problem)
    assert "downwards" in str(find_optimum(curve(1e18, 5.0, -0.05)).problem)
    with pytest.raises(ConfigError, match=r"optima inside .* at two budgets .* lies outside"):
        fit_exponents([find_optimum(curve(1e18, 5.0)), find_optimum(curve(2e18, 40.0))])


def test_two_loop_counts_are_no_parabola() -> None:
    two = Curve.of("one", 1e18, [2, 4], [1e9, 9e8], [3.0, 2.9])
    with pytest.raises(ConfigError, match="2 mean loop counts: expected at least 3"):
        find_optimum(two)


def test_published_constants_predict_the_published_rows() -> None:
    errors = {row.config: predicted_errors(row, str(CONFIGS)) for row in MAIN_ROWS if row.config.startswith("parcae")}
    expected = {"parcae_140m": (0.0095, 0.0148, 0.0296, 0.0403), "parcae_370m": (0.0026, 0.0041, 0.0142, 0.0169)}
    for config, by_reading in expected.items():
        assert tuple(errors[config].values()) == pytest.approx(by_reading, abs=5e-5)
