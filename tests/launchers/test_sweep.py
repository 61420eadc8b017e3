"""Sweep files: what they stand for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.sweep import read_sweep
from pretrain.errors import ConfigError


def sweep(tmp_path: Path, text: str) -> list[list[str]]:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path)


def test_a_list_is_taken_as_it_stands(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "- [optimizer.lr=4e-3, train.seed=1]\n- [optimizer.lr=8e-3]\n")
    assert runs == [["optimizer.lr=4e-3", "train.seed=1"], ["optimizer.lr=8e-3"]]


def test_a_grid_has_one_run_per_combination(tmp_path: Path) -> None:
    text = "grid:\n  optimizer.lr: [4e-3, 8E-3]\n  optimizer.name: [muon]\n  optimizer.clip_norm: [null, 1]\n"
    assert sweep(tmp_path, text) == [
        ["optimizer.lr=0.004", "optimizer.name=muon", "optimizer.clip_norm=null"],
        ["optimizer.lr=0.004", "optimizer.name=muon", "optimizer.clip_norm=1"],
        ["optimizer.lr=0.008", "optimizer.name=muon", "optimizer.clip_norm=null"],
        ["optimizer.lr=0.008", "optimizer.name=muon", "optimizer.clip_norm=1"],
    ]


def test_lists_and_truth_values_are_written_as_on_the_command_line(tmp_path: Path) -> None:
    text = "grid:\n  validation.num_loops: [[1, 2], []]\n  train.compile: [true]\n"
    assert sweep(tmp_path, text) == [
        ["validation.num_loops=[1, 2]", "train.compile=true"],
        ["validation.num_loops=[]", "train.compile=true"],
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a list of lists"),
        ("[]", "expected a list of lists"),
        ("optimizer.lr: [1]", "expected a list of lists"),
        ("- optimizer.lr=1", "run 0: 'optimizer.lr=1': expected a list"),
        ("- [optimizer.lr=1]\n- []", "run 1: .*expected a list"),
        ("- [optimizer.lr]", "run 0: .*expected a list"),
        ("grid: [1]", r"grid=\[1\]: expected keys"),
        ("grid: {optimizer.lr: 1}", "grid.optimizer.lr=1: expected a list of values"),
        ("grid: {optimizer.lr: []}", r"grid.optimizer.lr=\[\]: expected a list of values"),
        ("- [a=1]\n- [b=1]\n- [a=1]", "runs 0 and 2 are both a=1"),
        ("- [a", "cannot be read"),
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        read_sweep(tmp_path / "absent.yaml")
