"""The fitter against laws that are known; the full count of repeats is `python -m tools.scaling.recovery`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pretrain.errors import ConfigError
from tools.scaling.fitting import fit, relative_error
from tools.scaling.laws import EXPONENTIAL, FLOOR_POWER, LAWS, PARAMETRIC, POWER, Law
from tools.scaling.problem import Problem
from tools.scaling.recovery import NOISE, PLANTED, inputs_of, recover

LOOPS = np.arange(1.0, 25.0)


@pytest.mark.parametrize("law", LAWS.values(), ids=lambda law: law.name)
def test_derivatives_are_exact(law: Law) -> None:
    rng = np.random.default_rng(0)
    inputs = {name: np.geomspace(2.0, 20.0, 30) * rng.uniform(0.5, 2, 30) for name in law.inputs}
    problem = Problem(law, inputs, np.full(30, 3.0))
    v = np.log([np.sqrt(c.low * c.high) for c in law.constants])
    _, jacobian = problem.log_model(v)
    for i in range(len(v)):
        step = 1e-6 * np.eye(len(v))[i]
        numeric = (problem.log_model(v + step)[0] - problem.log_model(v - step)[0]) / 2e-6
        np.testing.assert_allclose(jacobian[i], numeric, atol=1e-8)


def test_the_bottom_of_a_valley_that_bends() -> None:
    """Parcae's grid does not tell E, A and alpha of the iso-depth law apart: any start ends in the same minimum."""
    law, truth = PLANTED["iso_depth"]
    inputs, _ = inputs_of(law)
    exact = law.predict(truth, inputs)
    noise = np.random.default_rng((0, 7)).standard_normal(len(exact))
    problem = Problem(law, inputs, exact * np.exp(NOISE * noise), delta=0.0038)
    rng = np.random.default_rng(3)
    starts = np.log([[1.6, 0.7, 0.2, 0.5, 0.37, 0.46]]) + 0.3 * rng.standard_normal((8, 6))
    values, v = problem.minima(starts)
    assert np.ptp(values) < 0.01 and np.ptp(v[:, 4:], axis=0).max() < 0.01
    start = np.array([problem.objective(at)[0] for at in starts])
    assert (start > 10 * values).all()


def test_refits_have_their_own_data_weights_and_fixed_constants() -> None:
    truth = {"L_inf": 2.9, "Z": 1.5, "z": 0.5}
    exact = EXPONENTIAL.predict(truth, {"num_loops": LOOPS})
    problem = Problem(EXPONENTIAL, {"num_loops": LOOPS}, exact)
    other = np.log(EXPONENTIAL.predict(truth | {"L_inf": 3.5}, {"num_loops": LOOPS}))
    start = np.tile(np.log([2.0, 1.0, 1.0]), (4, 1))
    data, weights = np.tile(problem.log_loss, (4, 1)), np.ones((4, len(LOOPS)))
    data[1], weights[2, :3] = other, 0
    data[2, :3] += 1.0  # and not seen
    fixed = np.full((4, 3), np.nan)
    fixed[3, 2] = np.log(0.8)
    values, v = problem.minima(start, data, weights, fixed)
    np.testing.assert_allclose(np.exp(v[[0, 2]]), [[2.9, 1.5, 0.5]] * 2, rtol=1e-3)
    np.testing.assert_allclose(np.exp(v[1]), [3.5, 1.5, 0.5], rtol=1e-3)
    assert values[3] > 100 > 1e-3 > values[:3].max()


@pytest.mark.parametrize("name", ["parametric", "exponential"])
def test_planted_constants_lie_in_their_intervals(name: str) -> None:
    score = recover(name, repeats=4, bootstraps=40, starts=3)
    assert sum(score.covered.values()) >= 0.75 * 4 * len(score.covered)
    assert np.mean(score.held_out) <= 1.2
    identified = {"parametric": "E x Y y", "exponential": "L_inf Z z"}[name].split()
    assert all(score.unidentified[constant] == 0 for constant in identified)


@pytest.mark.parametrize("name", ["unified_learned", "iso_depth"])
def test_exact_data_give_exact_predictions(name: str) -> None:
    law, truth = PLANTED[name]
    inputs, _ = inputs_of(law)
    loss = law.predict(truth, inputs)
    found = fit(law, inputs, loss, starts=3, bootstraps=2)
    assert relative_error(law, found.values, inputs, loss) < 3e-4
    assert all(found.constants[c].value == pytest.approx(truth[c], rel=0.05) for c in ("E", law.names[-1]))


def test_the_forms_of_table_12() -> None:
    """L_inf + Z (1 + T)^-z and its neighbours, by hand at T = 3."""
    constants, t = {"L_inf": 2.0, "Z": 0.5, "z": 1.5}, {"num_loops": 3.0}
    expected = {
        "exponential": 2 + 0.5 * math.exp(-4.5), "shifted_power": 2 + 0.5 / 8, "floor_power": 2 + 0.5 / 3**1.5,
        "power": 0.5 / 3**1.5,
    }  # fmt: skip
    for name, value in expected.items():
        law = LAWS[name]
        assert float(law.predict({key: constants[key] for key in law.names}, t)) == pytest.approx(value)


def test_what_the_data_do_not_vary_is_named() -> None:
    # Tokens differ by 1%: Y and y can take any value, E makes up for it.
    rng = np.random.default_rng(1)
    inputs = {"params": np.geomspace(1e8, 1e9, 40), "tokens": 1e10 * rng.uniform(0.995, 1.005, 40)}
    loss = PARAMETRIC.predict(PLANTED["parametric"][1], inputs) * np.exp(NOISE * rng.standard_normal(40))
    assert {"Y", "y"} <= set(fit(PARAMETRIC, inputs, loss, starts=6, bootstraps=4).unidentified)


def test_a_bend_is_no_pure_power_law() -> None:
    loss = EXPONENTIAL.predict({"L_inf": 2.9, "Z": 1.5, "z": 0.5}, {"num_loops": LOOPS})
    errors = {
        law.name: fit(law, {"num_loops": LOOPS}, loss, starts=4, bootstraps=2).noise
        for law in (EXPONENTIAL, FLOOR_POWER, POWER)
    }
    assert errors["exponential"] < 1e-6 < errors["floor_power"] < errors["power"]


def test_losses_of_a_run_that_err_together_give_wider_intervals() -> None:
    rng, truth = np.random.default_rng(2), {"L_inf": 2.9, "Z": 1.5, "z": 0.5}
    inputs = {"num_loops": np.tile(LOOPS, 20)}
    groups = np.repeat(np.arange(20), len(LOOPS)).astype(str)
    exact = EXPONENTIAL.predict(truth, inputs)
    alone = NOISE * rng.standard_normal(len(exact))
    together = NOISE * np.repeat(rng.standard_normal(20), len(LOOPS))
    widths = []
    for noise in (alone, together):
        found = fit(EXPONENTIAL, inputs, exact * np.exp(noise), groups=groups, starts=2, bootstraps=100).constants
        assert found["L_inf"].low <= 2.9 <= found["L_inf"].high
        widths.append(found["L_inf"].high - found["L_inf"].low)
    assert widths[1] > 3 * widths[0]


def test_one_outlier_moves_little() -> None:
    noise = 1e-4 * np.random.default_rng(0).standard_normal(24)
    loss = EXPONENTIAL.predict({"L_inf": 2.9, "Z": 1.5, "z": 0.5}, {"num_loops": LOOPS}) * np.exp(noise)
    loss[10] *= 1.1
    found = fit(EXPONENTIAL, {"num_loops": LOOPS}, loss, starts=4, bootstraps=2).values
    assert found["L_inf"] == pytest.approx(2.9, rel=1e-3) and found["z"] == pytest.approx(0.5, rel=0.01)


def test_interval_of_a_prediction_and_extrapolation() -> None:
    truth = {"L_inf": 2.9, "Z": 1.5, "z": 0.5}
    rng = np.random.default_rng(0)
    loss = EXPONENTIAL.predict(truth, {"num_loops": LOOPS}) * np.exp(NOISE * rng.standard_normal(24))
    found = fit(EXPONENTIAL, {"num_loops": LOOPS}, loss, starts=4, bootstraps=60)
    assert found.noise == pytest.approx(NOISE, rel=0.4)
    width = {t: np.ptp(found.law.predict({n: found.samples[:, i : i + 1] for i, n in enumerate(found.law.names)},
                                         {"num_loops": [t]})) for t in (1, 12)}  # fmt: skip
    assert width[1] > width[12] > 0


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="3 losses for 3 constants"):
        fit(EXPONENTIAL, {"num_loops": [1, 2, 3]}, [3.0, 2.9, 2.8])
    with pytest.raises(ConfigError, match=r"num_loops is 4 in every run"):
        fit(EXPONENTIAL, {"num_loops": [4, 4, 4, 4]}, [3.0, 2.9, 2.8, 2.7])
    with pytest.raises(ConfigError, match="not a positive number"):
        fit(EXPONENTIAL, {"num_loops": [1, 2, 3, 4]}, [3.0, 2.9, float("nan"), 2.7])
