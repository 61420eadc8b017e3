"""Initial states: a hash of (seed, step, row, position, channel), with the moments of the law asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.model.counter import StateKey
from pretrain.model.state import initial_state, state_std
from tests.model.tiny import tiny_config

ROWS, LENGTH, WIDTH = 6, 64, 256


def _config(state_init: str, state_seed: int = 0) -> ModelConfig:
    recurrence = {"state_init": state_init, "state_seed": state_seed}
    return tiny_config("parcae", recurrence, width=WIDTH, num_heads=2)


def _draw(cfg: ModelConfig, key: StateKey | None, start: int = 0, length: int = LENGTH, rows: int = ROWS) -> Tensor:
    e = torch.ones(rows, length, WIDTH)
    return initial_state(cfg, e, key, torch.arange(start, start + length)[None])


def _key(seed: int = 1, step: int = 2, rows: list[int] | None = None) -> StateKey:
    return StateKey(seed, step, torch.arange(ROWS) if rows is None else torch.tensor(rows))


def test_evaluation_depends_on_seed_position_and_channel_alone() -> None:
    state = _draw(_config("normal"), None)
    assert torch.equal(state[0], state[3])
    assert torch.equal(_draw(_config("normal"), None, start=10, length=5)[0], state[0, 10:15])
    assert not torch.equal(_draw(_config("normal", state_seed=1), None), state)


def test_training_depends_on_the_row_and_not_on_its_place_in_the_batch() -> None:
    cfg = _config("normal")
    state = _draw(cfg, _key())
    assert torch.equal(_draw(cfg, _key(rows=[4, 1]), rows=2), state[[4, 1]])
    assert torch.equal(_draw(cfg, _key(), start=20, length=8), state[:, 20:28])


def test_a_larger_width_or_sequence_keeps_the_values_of_a_smaller() -> None:
    wide = initial_state(_config("normal"), torch.ones(1, 8, WIDTH), None, torch.arange(8)[None])
    narrow = tiny_config("parcae", {"state_init": "normal"})
    small = initial_state(narrow, torch.ones(1, 8, 16), None, torch.arange(8)[None])
    assert torch.equal(wide[..., :16], small)


MOMENTS = {
    # Standard deviation of a normal law cut at three of its own: 0.98658.
    "like_init": 0.98658 * math.sqrt(2 / (5 * WIDTH)),
    "normal": 1.0,
    "embed": 1 / math.sqrt(WIDTH),
    "unit": 1.0,
}


@pytest.mark.parametrize("state_init", MOMENTS)
def test_moments(state_init: str) -> None:
    cfg = _config(state_init)
    state = _draw(cfg, _key()).double()
    std = MOMENTS[state_init]
    standard_error = std / math.sqrt(state.numel())
    assert abs(float(state.mean())) < 4 * standard_error
    assert float(state.std()) == pytest.approx(std, rel=4 / math.sqrt(2 * state.numel()))
    kurtosis = float((state / std).pow(4).mean())
    assert kurtosis == pytest.approx(2.8429 if state_init == "like_init" else 3.0, abs=0.08)
    if state_init == "like_init":
        assert float(state.abs().max()) <= 3 * state_std(cfg)
    if state_init == "unit":
        torch.testing.assert_close(state.std(-1), torch.ones(ROWS, LENGTH).double(), atol=1e-5, rtol=0)


def test_zero_and_input() -> None:
    e = torch.randn(2, 4, WIDTH)
    positions = torch.arange(4)[None]
    assert not initial_state(_config("zero"), e, None, positions).any()
    assert initial_state(_config("input"), e, None, positions) is e


def test_neighbours_in_every_index_are_independent() -> None:
    cfg = _config("normal")
    base = _draw(cfg, _key())
    others = {
        "row": base.roll(1, 0),
        "position": base.roll(1, 1),
        "channel": base.roll(1, 2),
        "step": _draw(cfg, _key(step=3)),
        "seed": _draw(cfg, _key(seed=2)),
        "row and step": _draw(cfg, _key(step=3, rows=[r - 1 for r in range(1, ROWS + 1)])).roll(1, 0),
        "evaluation": _draw(cfg, None),
    }
    limit = 4.5 / math.sqrt(base.numel())
    for name, other in others.items():
        for f in (lambda x: x, lambda x: x.square() - 1):
            correlation = float((f(base) * f(other)).mean() / f(base).std() / f(other).std())
            assert abs(correlation) < limit, (name, correlation)


def test_values_are_those_of_every_machine() -> None:
    """A change here changes every run: checkpoints of this version would not continue bit for bit."""
    cfg = tiny_config("parcae", {"state_init": "normal"})
    state = initial_state(cfg, torch.ones(1, 2, 16), StateKey(7, 3, torch.tensor([5])), torch.arange(2)[None])
    expected = [[-0.277074, -1.710996, -1.381486], [-0.54773, 0.455828, 1.698079]]
    torch.testing.assert_close(state[0, :, :3], torch.tensor(expected), atol=1e-6, rtol=0)
