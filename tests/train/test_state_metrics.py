"""The run's state and its metrics file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from pretrain.errors import CheckpointError
from pretrain.train.metrics import MetricsWriter, read_metrics, remove_rows_after
from pretrain.train.state import TrainState
from tests.train.checkpoints import state


def test_every_field_of_the_state_survives() -> None:
    original = state(7)
    defaults = TrainState()
    for field in dataclasses.fields(TrainState):
        assert getattr(original, field.name) != getattr(defaults, field.name), f"{field.name} is not exercised"
    assert TrainState.from_json(original.to_json(), "state.json") == original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "field extra is unknown"),
        ({"data": None}, "field data is missing"),
        ({"step": 1.0}, "step is 1.0, expected an integer >= 0"),
        ({"step": True}, "step is True, expected an integer >= 0"),
        ({"tokens": -1}, "tokens is -1, expected an integer >= 0"),
        ({"sampler": []}, r"sampler is \[\], expected an object"),
        ({"recent_losses": {}}, r"recent_losses is {}, expected a list"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    data = json.loads(state(7).to_json()) | change
    if change == {"data": None}:
        del data["data"]
    with pytest.raises(CheckpointError, match=f"x/state.json: {message}"):
        TrainState.from_json(json.dumps(data), "x/state.json")
    for text in ("", "[]", "{"):
        with pytest.raises(CheckpointError, match=r"x/state\.json"):
            TrainState.from_json(text, "x/state.json")


def test_advance_counts() -> None:
    position = TrainState()
    for skipped in (False, True, True, False, True):
        position.advance(10, skipped=skipped)
    assert (position.step, position.tokens, position.skipped_steps, position.skipped_in_a_row) == (5, 50, 3, 1)


def _write(path: Path, *steps: int) -> None:
    rows = MetricsWriter(path)
    for step in steps:
        rows.write({"step": step, "loss": 1 / 3 + step})
    rows.close()


def test_rows_are_there_at_once_and_exact(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    rows = MetricsWriter(path)
    rows.write({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.inf, "val_loss": {"4": math.nan, "8": 2.0}})
    (row,) = read_metrics(path)
    assert row == {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None, "val_loss": {"4": None, "8": 2.0}}
    rows.close()


def test_rows_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert remove_rows_after(path, 3) == 0
    _write(path, 1, 2, 3, 3, 4, 5)
    before = path.read_bytes()
    assert remove_rows_after(path, 5) == 0
    assert path.read_bytes() == before
    assert remove_rows_after(path, 3) == 2
    assert path.read_bytes() == before[: len(path.read_bytes())]
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 3]
    _write(path, 4)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:5])
    assert remove_rows_after(path, 0) == 5
    assert path.read_bytes() == b""


def test_a_row_cut_short_by_a_kill_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert remove_rows_after(path, 3) == 1
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"step": "2"}', "[1]", ""])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1)
    with path.open("a") as file:
        file.write(line + "\n")
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"line 2: .*no JSON object with a step"):
        remove_rows_after(path, 1)
    assert path.read_bytes() == before
