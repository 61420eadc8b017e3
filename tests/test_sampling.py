"""Depth sampling: exact laws, one draw for all layouts, balanced shares, plans without waste."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pretrain.config.model import RecurrenceConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.sampling import (
    Depths,
    DepthSampler,
    LoopPlan,
    form_micro_batches,
    lockstep_loops,
    straggler_loss,
)
from pretrain.sampling.placement import balanced_strata, num_deals

IntArray = NDArray[np.int64]


# Any other value means that a resumed or repeated run draws other loop counts.
PINNED_POISSON = [[14, 5, 9, 8, 9, 5, 4, 11, 6, 7, 7, 10], [11, 10, 2, 9, 6, 8, 5, 6, 12, 7, 10, 8]]
PINNED_LOGNORMAL = [9, 4, 15, 11, 7, 13, 3, 7]
PINNED_TOKENS = [10, 9, 13, 10, 7, 12, 7, 6]


def make_sampler(**changes: Any) -> DepthSampler:
    fields: dict[str, Any] = {
        "distribution": "poisson", "mean_loops": 8.0, "backprop_loops": None,
        "granularity": "sequence", "curriculum": "none", "curriculum_steps": 0,
        "seed": 1234, "global_batch_size": 64,
    }  # fmt: skip
    return DepthSampler(**(fields | changes))


def strided(num_positions: int, num_ranks: int) -> list[IntArray]:
    """The shares that mosaicml-streaming deals: the classes p mod R."""
    return [np.arange(rank, num_positions, num_ranks) for rank in range(num_ranks)]


def poisson_law(mean: float, highest: int = 60) -> NDArray[np.float64]:
    """P(max(1, Poisson(mean)) = t) at index t, from logarithms: independent of the tested table."""
    counts = np.arange(highest + 1)
    log_factorial = np.array([math.lgamma(t + 1) for t in counts])
    law = np.exp(counts * math.log(mean) - mean - log_factorial)
    law[1] += law[0]
    law[0] = 0.0
    return np.asarray(law)


def lognormal_poisson_law(mean: float, sigma: float, highest: int = 400) -> NDArray[np.float64]:
    """P(1 + Poisson(rate) = t) by a fine Riemann sum over the normal variable."""
    z = np.linspace(-9, 9, 4001)
    weight = np.exp(-(z**2) / 2)
    weight /= weight.sum()
    log_rate = math.log(mean) - sigma**2 / 2 + sigma * z
    counts = np.arange(highest)
    log_factorial = np.array([math.lgamma(t + 1) for t in counts])
    exponent = counts[:, None] * log_rate - np.exp(log_rate) - log_factorial[:, None]
    return np.concatenate([[0.0], np.exp(exponent) @ weight])


def chi_square_excess(draws: IntArray, law: NDArray[np.float64]) -> float:
    """Chi-square of the draws in normal standard deviations (Wilson-Hilferty); 3.1 is p = 0.001.

    Values with fewer than 10 expected draws are pooled at either end.
    """
    expected = law * draws.size
    observed = np.bincount(draws.ravel(), minlength=law.size).astype(float)
    assert observed.size == law.size, "a draw outside the law's support"
    large = np.flatnonzero(expected >= 10)
    low, high = large[0], large[-1]

    def pool(values: NDArray[np.float64]) -> NDArray[np.float64]:
        inner = values[low : high + 1].copy()
        inner[0] += values[:low].sum()
        inner[-1] += values[high + 1 :].sum()
        return inner

    statistic = ((pool(observed) - pool(expected)) ** 2 / pool(expected)).sum()
    freedom = high - low
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


# ---------------------------------------------------------------------------------------- the laws


def test_hundred_thousand_draws_are_poisson() -> None:
    sampler = make_sampler(global_batch_size=250)
    draws = np.stack([sampler.draw(step).num_loops for step in range(400)])
    assert draws.size == 100_000 and draws.min() >= 1
    assert chi_square_excess(draws, poisson_law(8.0)) < 3.1


@pytest.mark.parametrize("size", [8, 12, 7])
def test_each_single_position_is_poisson(size: int) -> None:
    """Draws of one position over steps are independent, so this is the sharp test of the law."""
    sampler = make_sampler(global_batch_size=size, mean_loops=4.0)
    draws = np.stack([sampler.draw(step).num_loops for step in range(4_000)])
    excess = [chi_square_excess(draws[:, p], poisson_law(4.0)) for p in range(size)]
    assert max(excess) < 3.7  # p = 1e-4 each


def test_chi_square_notices_a_wrong_law() -> None:
    draws = make_sampler(global_batch_size=4_096).draw(0).num_loops
    assert chi_square_excess(np.tile(draws, 5), poisson_law(8.3)) > 3.7


@pytest.mark.parametrize("granularity", ["batch", "token"])
def test_batch_and_token_draws_have_the_law(granularity: str) -> None:
    sampler = make_sampler(granularity=granularity, global_batch_size=4)
    if granularity == "batch":
        draws = np.stack([sampler.draw(step).num_loops for step in range(10_000)])
        assert (draws == draws[:, :1]).all()
        draws = draws[:, 0]
    else:
        draws = np.stack([sampler.draw_tokens(step, 512).num_loops for step in range(20)])
        assert draws.shape == (20, 4, 512)
    assert chi_square_excess(draws, poisson_law(8.0)) < 3.1


def test_lognormal_poisson_has_mean_mu_plus_one() -> None:
    sampler = make_sampler(distribution="lognormal_poisson", global_batch_size=1_024)
    draws = np.stack([sampler.draw(step).num_loops for step in range(40)])
    assert draws.mean() == pytest.approx(9.0, abs=0.01)
    assert sum(sampler.expected_loops(0)) == pytest.approx(9.0, abs=1e-6)
    assert chi_square_excess(draws, lognormal_poisson_law(8.0, 0.5)) < 3.1


def test_uniform_and_fixed() -> None:
    draws = make_sampler(distribution="uniform", global_batch_size=1_500).draw(0).num_loops
    assert np.array_equal(np.bincount(draws), [0] + [100] * 15)  # exact: 15 divides the strata
    assert (make_sampler(distribution="fixed").draw(0).num_loops == 8).all()
    assert (make_sampler(distribution="fixed", mean_loops=1.0).draw(0).grad_loops == 1).all()


def test_loops_split_into_no_grad_and_grad() -> None:
    depths = make_sampler().draw(3)
    total = depths.num_loops
    assert np.array_equal(depths.no_grad_loops, np.maximum(total - 4, 0))
    assert np.array_equal(depths.grad_loops, np.minimum(total, 4))
    assert make_sampler(backprop_loops=2).draw(3).grad_loops.max() == 2
    assert np.array_equal(make_sampler(backprop_loops=2).draw(3).num_loops, total)


def test_max_loops_moves_the_tail_onto_the_bound() -> None:
    free, bounded = make_sampler().draw(0).num_loops, make_sampler(max_loops=9).draw(0).num_loops
    assert np.array_equal(bounded, np.minimum(free, 9)) and free.max() > 9
    assert (make_sampler(max_loops=1).draw(0).num_loops == 1).all()


@pytest.mark.parametrize("distribution", ["poisson", "lognormal_poisson", "uniform", "fixed"])
def test_expected_loops_match_draws(distribution: str) -> None:
    sampler = make_sampler(distribution=distribution, global_batch_size=4_096)
    depths = sampler.draw(0)
    no_grad, grad = sampler.expected_loops(0)
    assert depths.no_grad_loops.mean() == pytest.approx(no_grad, abs=0.02)
    assert depths.grad_loops.mean() == pytest.approx(grad, abs=0.02)


# ------------------------------------------------------- the law of the loops before the last mu_b


def more_loops_law(distribution: str, mean: float) -> NDArray[np.float64]:
    """P(n = t) at index t, in closed form."""
    if mean == 0 or distribution == "fixed":
        return np.eye(1, 61, round(mean))[0]
    if distribution == "uniform":
        return np.where(np.arange(61) <= 2 * mean, 1 / (2 * mean + 1), 0.0)
    if distribution == "lognormal_poisson":
        return lognormal_poisson_law(mean, 0.5)[1:]
    counts = np.arange(61)
    return np.exp(counts * math.log(mean) - mean - np.array([math.lgamma(t + 1) for t in counts]))


NO_GRAD_CASES = [
    (distribution, granularity, mean_loops, backprop_loops)
    for distribution in ("poisson", "lognormal_poisson", "uniform", "fixed")
    for granularity in ("sequence", "batch", "token")
    for mean_loops, backprop_loops in ((8.0, None), (8.0, 1), (8.0, 8), (7.0, 3), (1.0, None))
    if granularity == "sequence" or (mean_loops, backprop_loops) in ((8.0, None), (8.0, 8))
]


@pytest.mark.parametrize(("distribution", "granularity", "mean_loops", "backprop_loops"), NO_GRAD_CASES)
def test_no_grad_loops_have_the_law_and_every_row_the_same_grad_loops(
    distribution: str, granularity: str, mean_loops: float, backprop_loops: int | None
) -> None:
    """Algorithm 3: n ~ law(mu - mu_b), k = mu_b; also with nothing left to draw."""
    sampler = make_sampler(
        distribution=distribution, granularity=granularity, mean_loops=mean_loops, backprop_loops=backprop_loops,
        sampled_loops="no_grad", global_batch_size=4_000 if granularity == "sequence" else 8,
    )  # fmt: skip
    if granularity == "token":
        depths = sampler.draw_tokens(0, 500)
    elif granularity == "batch":
        drawn = [sampler.draw(step) for step in range(600)]
        assert all(len(set(one.num_loops.tolist())) == 1 for one in drawn)
        depths = Depths(*(np.array([getattr(one, k)[0] for one in drawn]) for k in ("no_grad_loops", "grad_loops")))
    else:
        depths = sampler.draw(0)
    grad = backprop_loops or math.ceil(mean_loops / 2)
    assert (depths.grad_loops == grad).all()
    law = more_loops_law(distribution, mean_loops - grad)
    if law.max() == 1:
        assert (depths.no_grad_loops == law.argmax()).all()
    elif granularity != "sequence":  # whose strata follow the law closer than chance
        assert abs(chi_square_excess(depths.no_grad_loops, law)) < 3.5
    else:
        shares = np.bincount(depths.no_grad_loops, minlength=law.size) / 4_000
        assert np.abs(np.cumsum(shares) - np.cumsum(law)).max() < 1e-3
    expected = sampler.expected_loops(0)
    assert expected == pytest.approx((mean_loops - grad, grad), abs=1e-6), "the mean is mu"


def test_max_loops_bounds_no_grad_loops() -> None:
    free = make_sampler(sampled_loops="no_grad").draw(0)
    bounded = make_sampler(sampled_loops="no_grad", max_loops=6).draw(0)
    assert np.array_equal(bounded.num_loops, np.minimum(free.num_loops, 6)) and (bounded.grad_loops == 4).all()
    assert (make_sampler(sampled_loops="no_grad", max_loops=4).draw(0).num_loops == 4).all()


@pytest.mark.parametrize("key", ["mean_loops", "max_loops"])
def test_no_grad_loops_leave_room_for_those_with_gradient(key: str) -> None:
    wrong: dict[str, Any] = {"mean_loops": 8.0, "max_loops": 12, "backprop_loops": 5} | {key: 4}
    with pytest.raises(ConfigError, match=rf"recurrence\.{key}=4: expected at least 5 \(backprop_loops\)"):
        RecurrenceConfig(sampled_loops="no_grad", **wrong)
    RecurrenceConfig(**wrong)


@pytest.mark.parametrize("distribution", ["poisson", "lognormal_poisson", "uniform", "fixed"])
def test_no_grad_loops_on_a_ramp(distribution: str) -> None:
    settings = {"distribution": distribution, "curriculum": "linear", "curriculum_steps": 10, "global_batch_size": 512}
    sampler = make_sampler(sampled_loops="no_grad", **settings)
    for step in (0, 3, 6, 10, 11):
        depths = sampler.draw(step)
        grad = math.ceil(sampler.mean_at(step) / 2)
        assert (depths.grad_loops == grad).all()
        assert depths.no_grad_loops.mean() == pytest.approx(sampler.mean_at(step) - grad, abs=0.51)
    late = make_sampler(sampled_loops="no_grad", backprop_loops=4, **settings)
    assert (late.draw(0).num_loops == 4).all(), "mu below mu_b: the loops with gradient alone"


def test_micro_batches_of_no_grad_loops_have_plans_without_waste() -> None:
    sampler = make_sampler(sampled_loops="no_grad", backprop_loops=3)
    for step in range(20):
        depths = sampler.draw(step)
        for rows in form_micro_batches(depths, 8):
            plan = LoopPlan.from_depths(depths.rows(rows))
            updates = run_plan(plan)
            assert np.array_equal(updates[0], depths.no_grad_loops[rows]) and (updates[1] == 3).all()
            assert plan.executed_row_passes == plan.needed_row_passes


# ------------------------------------------------------------------------------------------ ramps


def test_curricula_ramp_mu_and_backprop_loops() -> None:
    linear = make_sampler(curriculum="linear", curriculum_steps=100, mean_loops=9.0)
    assert [linear.mean_at(step) for step in (0, 25, 50, 100, 10**6)] == [1, 3, 5, 9, 9]
    assert [linear.backprop_loops_at(step) for step in (0, 25, 26, 100)] == [1, 2, 2, 5]
    late = make_sampler(curriculum="one_minus_sqrt", curriculum_steps=100, mean_loops=9.0)
    assert [late.mean_at(step) for step in (0, 75, 100)] == [1, 5, 9]
    assert all(late.mean_at(step) < linear.mean_at(step) for step in range(1, 100))
    fixed = make_sampler(distribution="fixed", curriculum="linear", curriculum_steps=7, backprop_loops=3)
    assert [int(fixed.draw(step).num_loops[0]) for step in range(9)] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert fixed.backprop_loops_at(0) == 3


@pytest.mark.parametrize("distribution", ["poisson", "lognormal_poisson", "uniform"])
def test_ramped_draws_follow_the_mean(distribution: str) -> None:
    sampler = make_sampler(distribution=distribution, curriculum="linear", curriculum_steps=10, global_batch_size=512)
    means = [sampler.draw(step).num_loops.mean() for step in (0, 5, 10, 11)]
    assert means[0] < means[1] < means[2] == pytest.approx(means[3], abs=0.05)


# ------------------------------------------------------------- one draw for every rank and machine


def test_draw_depends_on_seed_and_step_alone() -> None:
    sampler = make_sampler()
    first = sampler.draw(7).num_loops
    np.random.seed(5)
    random.seed(5)
    before = np.random.random_sample(), random.random()
    np.random.seed(5)
    random.seed(5)
    sampler.draw(8)
    assert (np.random.random_sample(), random.random()) == before
    assert np.array_equal(make_sampler().draw(7).num_loops, first)
    assert not np.array_equal(sampler.draw(8).num_loops, first)
    assert not np.array_equal(make_sampler(seed=1235).draw(7).num_loops, first)


def test_draws_are_pinned() -> None:
    """Known values: a new numpy, another machine or a change of the code must not move a run."""
    sampler = make_sampler(seed=2**64 - 1, global_batch_size=12)
    assert sampler.draw(0).num_loops.tolist() == PINNED_POISSON[0]
    assert sampler.draw(10**9).num_loops.tolist() == PINNED_POISSON[1]
    huginn = make_sampler(distribution="lognormal_poisson", global_batch_size=8)
    assert huginn.draw(1).num_loops.tolist() == PINNED_LOGNORMAL
    tokens = make_sampler(granularity="token").draw_tokens(1, 8, [3])
    assert tokens.num_loops.tolist() == [PINNED_TOKENS]


def test_token_draws_of_a_row_do_not_depend_on_the_other_rows() -> None:
    sampler = make_sampler(granularity="token", global_batch_size=16)
    everything = sampler.draw_tokens(3, 32)
    some = sampler.draw_tokens(3, 32, [9, 2])
    assert np.array_equal(some.num_loops, everything.rows([9, 2]).num_loops)
    rows = everything.of_deepest_token()
    assert np.array_equal(rows.num_loops, everything.num_loops.max(axis=1))


# ----------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize("num_ranks", [8, 64, 256, 24])
def test_ranks_wait_less_than_two_percent(num_ranks: int) -> None:
    """8 rows per rank, mean over 1,000 steps; measured 1.4 / 1.5 / 1.5 / 1.5%."""
    size = 8 * num_ranks
    sampler, shares = make_sampler(global_batch_size=size), strided(size, num_ranks)
    losses = [straggler_loss(sampler.draw(step), shares) for step in range(1_000)]
    assert np.mean(losses) < 0.02


def test_contiguous_blocks_are_not_balanced() -> None:
    """The documented limit of the placement: a loader must not deal blocks of positions."""
    sampler, blocks = make_sampler(global_batch_size=512), np.arange(512).reshape(64, 8)
    loss = np.mean([straggler_loss(sampler.draw(step), list(blocks)) for step in range(50)])
    assert 0.10 < loss < 0.20


@pytest.mark.parametrize("size", [256, 192, 480])
def test_every_divisor_of_the_batch_is_a_balanced_split(size: int) -> None:
    """At 8 or more rows, an even number of them, per rank."""
    sampler = make_sampler(global_batch_size=size)
    draws = [sampler.draw(step) for step in range(100)]
    for num_ranks in (r for r in range(2, size // 8 + 1) if size % (2 * r) == 0):
        shares = strided(size, num_ranks)
        assert np.mean([straggler_loss(draw, shares) for draw in draws]) < 0.02, num_ranks


def test_power_of_two_splits_share_every_quantile() -> None:
    """Each class p mod 2^b holds exactly one stratum of each group of 2^b neighbours."""
    size = 128
    strata = balanced_strata(size, np.random.default_rng(0).random(num_deals(size)))
    assert np.array_equal(np.sort(strata), np.arange(size))
    for num_ranks in (2, 4, 8, 16, 32, 64):
        for share in strided(size, num_ranks):
            assert np.array_equal(np.sort(strata[share] // num_ranks), np.arange(size // num_ranks))


@pytest.mark.parametrize("size", [1, 2, 7, 12, 16])
def test_each_position_gets_each_stratum_equally_often(size: int) -> None:
    generator = np.random.default_rng(3)
    trials = 300 * size
    counts = np.zeros((size, size))
    for _ in range(trials):
        strata = balanced_strata(size, generator.random(num_deals(size)))
        counts[np.arange(size), strata] += 1
    # Mean 300, standard deviation at most 17; 5 standard deviations over at most 256 cells.
    assert np.abs(counts - 300).max() < 90


def test_total_of_the_batch_hardly_varies() -> None:
    """256 rows: relative spread of the total 1e-3, where independent draws have 2.2e-2."""
    sampler = make_sampler(global_batch_size=256)
    totals = np.array([sampler.draw(step).num_loops.sum() for step in range(300)])
    assert totals.std() / totals.mean() < 2e-3
    assert totals.mean() / 256 == pytest.approx(8.0003, abs=0.005)


# ------------------------------------------------------------------------------------------- state


def test_state_survives_json_and_names_each_difference() -> None:
    sampler = make_sampler(curriculum="linear", curriculum_steps=10)
    state = json.loads(json.dumps(sampler.state_dict()))
    make_sampler(curriculum="linear", curriculum_steps=10).load_state_dict(state)
    for key, value in (("seed", 9), ("mean_loops", 4.0), ("global_batch_size", 32)):
        with pytest.raises(CheckpointError, match=f"{key}={value!r}.*checkpoint: {state[key]!r}"):
            DepthSampler(**(state | {key: value})).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"max_loops=None \(checkpoint: '\(absent\)'\)"):
        sampler.load_state_dict({k: v for k, v in state.items() if k != "max_loops"})
    sampler.load_state_dict({k: v for k, v in state.items() if k != "sampled_loops"})  # of a run that drew all
    with pytest.raises(CheckpointError, match="sampled_loops='no_grad'"):
        make_sampler(curriculum="linear", curriculum_steps=10, sampled_loops="no_grad").load_state_dict(state)
    with pytest.raises(CheckpointError, match="unknown"):
        sampler.load_state_dict(state | {"unknown": 1})


def test_sampler_from_config() -> None:
    recurrence = RecurrenceConfig(mean_loops=6.0, backprop_loops=2, max_loops=20, sampled_loops="no_grad")
    sampler = DepthSampler.from_config(recurrence, seed=3, global_batch_size=16)
    settings = {"mean_loops": 6.0, "backprop_loops": 2, "max_loops": 20, "sampled_loops": "no_grad"}
    assert sampler == make_sampler(seed=3, global_batch_size=16, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distribution": "gamma"}, "model.recurrence.distribution='gamma'"),
        ({"granularity": "row"}, "model.recurrence.granularity='row'"),
        ({"curriculum": "cosine"}, "model.recurrence.curriculum='cosine'"),
        ({"mean_loops": 0.5}, "model.recurrence.mean_loops=0.5"),
        ({"distribution": "fixed", "mean_loops": 2.5}, "mean_loops=2.5: expected a whole number"),
        ({"distribution": "uniform", "mean_loops": 2.2}, "mean_loops=2.2: expected a multiple"),
        ({"backprop_loops": 0}, "model.recurrence.backprop_loops=0"),
        ({"max_loops": 0}, "model.recurrence.max_loops=0"),
        ({"lognormal_sigma": 0.0}, "model.recurrence.lognormal_sigma=0.0"),
        ({"curriculum": "linear"}, "model.recurrence.curriculum_steps=0"),
        ({"sampled_loops": "grad"}, "model.recurrence.sampled_loops='grad'"),
        ({"seed": -1}, "train.seed=-1"),
        ({"global_batch_size": 0}, "train.global_batch_size=0"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make_sampler(**changes)


# ------------------------------------------------------------------------------------------- plans


def run_plan(plan: LoopPlan) -> tuple[IntArray, IntArray]:
    """Plays the plan as the model does; returns the updates (no-grad, grad) of each local row."""
    place_updates = np.zeros((2, len(plan.order)), dtype=np.int64)
    previous = 0
    for phase, steps in enumerate((plan.no_grad, plan.grad)):
        for step in steps:
            assert 0 <= step.first <= step.active <= step.computed <= len(plan.order)
            assert step.computed >= 1
            started = place_updates.sum(axis=0) > 0
            assert started[: step.first].all() and not started[step.first :].any()
            assert step.first == previous  # a step's rows are those of the last one and new ones
            place_updates[phase, : step.active] += 1
            previous = step.active
    updates = place_updates[:, plan.inverse]
    return updates[0], updates[1]


loop_counts = st.lists(st.integers(1, 20), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(loop_counts, st.integers(1, 8), st.integers(1, 5), st.integers(0, 25), st.integers(0, 8))
def test_every_row_gets_exactly_its_loops(
    counts: list[int], backprop_loops: int, bucket: int, min_no_grad: int, min_grad: int
) -> None:
    depths = Depths.truncated(counts, backprop_loops)
    min_grad = min(min_grad, backprop_loops)  # no rank can ask for more
    plan = LoopPlan.from_depths(depths, bucket=bucket, min_no_grad_loops=min_no_grad, min_grad_loops=min_grad)
    no_grad, grad = run_plan(plan)
    assert np.array_equal(no_grad, depths.no_grad_loops)
    assert np.array_equal(grad, depths.grad_loops)
    assert len(plan.no_grad) == max(min_no_grad, depths.no_grad_loops.max())
    assert len(plan.grad) == max(min_grad, depths.grad_loops.max())
    assert plan.grad[-1].active == len(counts)
    assert plan.needed_row_passes == sum(counts)
    assert (np.diff(depths.num_loops[plan.order]) <= 0).all()


@settings(max_examples=200, deadline=None)
@given(loop_counts, st.integers(1, 8))
def test_nothing_is_wasted_without_buckets(counts: list[int], backprop_loops: int) -> None:
    depths = Depths.truncated(counts, backprop_loops)
    plan = LoopPlan.from_depths(depths)
    assert plan.waste == 1.0 and plan.executed_row_passes == sum(counts)
    assert plan.core_cost == depths.core_cost.sum()


def test_plan_of_a_small_micro_batch() -> None:
    """Depths 2, 6, 3, 6 with mu_b = 4: the row of 3 loops and that of 2 join in the grad phase."""
    plan = LoopPlan.from_depths(Depths.truncated([2, 6, 3, 6], 4))
    assert plan.order.tolist() == [1, 3, 2, 0]
    assert plan.no_grad == ((0, 2, 2), (2, 2, 2))
    assert plan.grad == ((2, 2, 2), (2, 3, 3), (3, 4, 4), (4, 4, 4))


def test_lockstep_steps_come_first_and_compute_one_row() -> None:
    plan = LoopPlan.from_depths(Depths.truncated([3, 1], 4), min_no_grad_loops=2, min_grad_loops=4)
    assert plan.no_grad == ((0, 0, 1), (0, 0, 1))
    assert plan.grad == ((0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 2, 2))
    assert (plan.needed_row_passes, plan.executed_row_passes) == (4, 7)


@pytest.mark.parametrize(("rows", "bucket"), [(16, 1), (32, 2), (64, 4), (128, 8)])
def test_buckets_of_a_sixteenth_waste_at_most_five_percent(rows: int, bucket: int) -> None:
    sampler = make_sampler(global_batch_size=rows)
    plans = [LoopPlan.from_depths(sampler.draw(step), bucket=bucket) for step in range(100)]
    executed = sum(plan.executed_row_passes for plan in plans)
    assert executed / sum(plan.needed_row_passes for plan in plans) <= 1.05
    if bucket > 1:
        counts = {step.computed for plan in plans for step in plan.no_grad + plan.grad}
        assert all(count % bucket == 0 for count in counts)


def test_plans_refuse_what_they_cannot_order() -> None:
    for no_grad, grad in (([5, 0], [1, 3]), ([3, 2], [3, 2]), ([1, 2], [4, 2])):
        with pytest.raises(ValueError, match="expected rows of one backprop_loops"):
            LoopPlan.from_depths(Depths(np.array(no_grad), np.array(grad)))
    with pytest.raises(ValueError, match="have 5 gradient loops each"):
        LoopPlan.from_depths(Depths.truncated([6, 2], 4), min_grad_loops=5)
    with pytest.raises(ValueError, match="0 rows"):
        LoopPlan.from_depths(Depths.truncated([], 4))
    with pytest.raises(ValueError, match="same shape"):
        Depths(np.array([1, 2]), np.array([1]))
    with pytest.raises(ValueError, match="negative"):
        Depths(np.array([-1]), np.array([1]))


# ----------------------------------------------------------------------------------- micro-batches


def test_micro_batches_are_cut_in_order_of_depth() -> None:
    depths = Depths.truncated([3, 9, 3, 1, 9, 5, 3], 4)
    cut = form_micro_batches(depths, 3)
    assert [rows.tolist() for rows in cut] == [[1, 4, 5], [0, 2, 6], [3]]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1_000), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]))
def test_lockstep_makes_every_rank_call_the_core_equally_often(
    step: int, num_ranks: int, micro_batch_size: int
) -> None:
    depths = make_sampler(global_batch_size=32).draw(step)
    shares = strided(32, num_ranks)
    lockstep = lockstep_loops(depths, shares, micro_batch_size)
    reached = np.zeros((len(lockstep), 2), dtype=np.int64)
    for positions in shares:
        share = depths.rows(positions)
        cut = form_micro_batches(share, micro_batch_size)
        assert sorted(np.concatenate(cut)) == list(range(len(share)))
        for index, (rows, (no_grad, grad)) in enumerate(zip(cut, lockstep, strict=True)):
            own = LoopPlan.from_depths(share.rows(rows))
            plan = LoopPlan.from_depths(share.rows(rows), min_no_grad_loops=no_grad, min_grad_loops=grad)
            assert (len(plan.no_grad), len(plan.grad)) == (no_grad, grad)
            reached[index] = np.maximum(reached[index], (len(own.no_grad), len(own.grad)))
    assert np.array_equal(reached, lockstep)  # no longer than the deepest rank needs
    assert lockstep_loops(depths, shares[::-1], micro_batch_size) == lockstep


def test_lockstep_refuses_uneven_shares() -> None:
    depths = make_sampler(global_batch_size=8).draw(0)
    with pytest.raises(ValueError, match=r"micro-batches by rank: \[3, 1\]"):
        lockstep_loops(depths, [np.arange(6), np.arange(6, 8)], 2)


def test_a_row_keeps_its_depth_at_every_layout() -> None:
    """1 to 8 ranks and any micro-batch size: position p meets the same n and k."""
    depths = make_sampler(global_batch_size=32).draw(11)
    for num_ranks in (1, 2, 4, 8):
        for micro_batch_size in (1, 2, 4):
            met = np.zeros((2, 32), dtype=np.int64)
            for positions in strided(32, num_ranks):
                share = depths.rows(positions)
                for rows in form_micro_batches(share, micro_batch_size):
                    part = share.rows(rows)
                    met[:, positions[rows]] = run_plan(LoopPlan.from_depths(part))
            assert np.array_equal(met, (depths.no_grad_loops, depths.grad_loops))
