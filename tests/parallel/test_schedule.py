from __future__ import annotations

import pytest

from pretrain.config.schema import OptimizerConfig, ScheduleConfig
from pretrain.parallel.schedule import hyperparameters, lr_factor


def _factors(total_steps: int, **keys: object) -> list[float]:
    schedule = ScheduleConfig(**keys)
    return [lr_factor(schedule, step, total_steps) for step in range(total_steps)]


def test_constant_stays_at_its_peak_after_the_warm_up() -> None:
    assert _factors(6, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_trapezoid_is_flat_then_linear_over_the_last_half() -> None:
    assert _factors(8, name="trapezoid", decay_fraction=0.5) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_trapezoid_ends_towards_min_lr_ratio() -> None:
    factors = _factors(1000, name="trapezoid", decay_fraction=0.2, min_lr_ratio=0.1)
    assert factors[800] == 1.0
    assert factors[900] == pytest.approx(0.55)
    assert factors[999] == pytest.approx(0.1 + 0.9 / 200)


def test_trapezoid_without_decay_is_constant() -> None:
    assert set(_factors(5, name="trapezoid", decay_fraction=0.0)) == {1.0}


def test_cosine_passes_half_way_at_half_time() -> None:
    factors = _factors(110, name="cosine", warmup_steps=10, min_lr_ratio=0.2)
    assert factors[:2] == [0.1, 0.2]
    assert factors[10] == pytest.approx(1.0)
    assert factors[60] == pytest.approx(0.6)
    assert 0.2 < factors[109] < 0.201


def test_no_schedule_moves_past_its_end() -> None:
    for name in ("constant", "trapezoid", "cosine"):
        assert lr_factor(ScheduleConfig(name=name), 500, 100) == (1.0 if name == "constant" else 0.0)


def test_muon_momentum_warms_up_and_its_weight_decay_falls_to_zero() -> None:
    optimizer, schedule = OptimizerConfig(name="muon"), ScheduleConfig(name="constant")
    at = [hyperparameters(optimizer, schedule, step, 1000) for step in (0, 150, 300, 999)]
    assert [value.muon_momentum for value in at] == pytest.approx([0.85, 0.90, 0.95, 0.95])
    assert [value.muon_weight_decay for value in at] == pytest.approx([0.2, 0.17, 0.14, 0.0002])
    assert at[0].lr == at[0].muon_lr == 8e-3
