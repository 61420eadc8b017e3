"""Auxiliary losses in whole runs: two processes, in any layout that takes them, give the numbers of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.forked import train
from tests.train.test_run import assert_close

COMMON = (
    "train.max_steps=4", "model.recurrence.backprop_loops=3", "validation.every_steps=2", "loss.subspace_penalty=0.3",
    "loss.subspace_rank=5", "loss.loop_heads=0.4", "model.auxiliary.loop_heads=2", "optimizer.clip_norm=null",
    "loss.schedules=[{term: loop_heads, from_step: 0, to_step: 3, from_factor: 0.5, to_factor: 1.5}]",
)  # fmt: skip
ALL = (
    *COMMON, "loss.state_prediction=0.5", "model.auxiliary.state_predictor=true", "loss.contrastive=0.2",
    "loss.contrastive_tokens=8", "loss.objective=exit_weighted", "loss.exit_entropy=0.1",
    "model.auxiliary.exit_gate=true",
)  # fmt: skip
NAMES = ("state_prediction", "contrastive", "subspace_penalty", "loop_heads", "exit_entropy")


def test_all_of_them_under_zero_and_tensor_parallelism(config: Path, tmp_path: Path) -> None:
    alone = train(config, tmp_path / "alone", *ALL, "train.micro_batch_size=8").check()
    first = next(row for row in alone.rows if row["step"] == 1)
    assert all(first[name] > 0 for name in NAMES), first
    # Of one row each, micro-batches have other numbers of loops on each rank, and some none for a head.
    layouts = {"zero_3": ("zero.stage=3", 1), "zero_2": ("zero.stage=2", 1), "tensor": ("parallel.tensor=2", 4)}
    for name, (layout, size) in layouts.items():
        both = train(config, tmp_path / name, *ALL, layout, f"train.micro_batch_size={size}", world=2)
        assert_close(both, alone, 1e-5)
        assert (max(both.column("waste")) > 1) == name.startswith("zero")
        for term in NAMES:
            assert both.column(term) == pytest.approx(alone.column(term), rel=1e-5), (name, term)


def test_those_of_one_loop_in_a_pipeline_and_with_sequence_parallelism(config: Path, tmp_path: Path) -> None:
    settings = (*COMMON, "model.core_layers=2", "loss.norm_penalty=0.1")
    alone = train(config, tmp_path / "alone", *settings, "train.micro_batch_size=8").check()
    layouts = {
        "pipeline": ("parallel.pipeline=2", "train.micro_batch_size=4"),
        "sequence": ("parallel.tensor=2", "parallel.sequence_parallel=true", "train.micro_batch_size=8"),
    }
    for name, layout in layouts.items():
        both = train(config, tmp_path / name, *settings, *layout, world=2)
        assert_close(both, alone, 1e-5)
        for term in ("subspace_penalty", "loop_heads", "norm_penalty"):
            assert both.column(term) == pytest.approx(alone.column(term), rel=1e-5), (name, term)
