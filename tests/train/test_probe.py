"""The probe of the recurrent state: the same numbers in any layout, after a resume, and a warning where norms grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pretrain.config.families import FAMILIES
from pretrain.config.model import AuxiliaryConfig
from pretrain.config.schema import Config
from pretrain.model.looped import LoopedLM
from pretrain.train.callbacks.probe import NAMES, Probe, gradient_parts
from tests.model.tiny import tiny_config
from tests.train.forked import Run, train

PROBE = ("probe.every_steps=2", "probe.rows=3", "validation.rows=6", "train.max_steps=4", "optimizer.clip_norm=null")


def rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows if "probe_norm" in row]


def assert_same(run: Run, reference: Run, left_out: tuple[str, ...] = ()) -> None:
    pairs = list(zip(rows(run), rows(reference), strict=True))
    assert len(pairs) == 2
    for own, expected in pairs:
        assert own.keys() | set(left_out) == expected.keys()
        for name in own.keys() - {"probe_sec", "probe_norm_p50", "probe_norm_p99", "probe_radial_fraction"}:
            assert own[name] == pytest.approx(expected[name], rel=1e-4), name


def test_what_a_probe_logs_and_that_layouts_agree(config: Path, tmp_path: Path) -> None:
    settings = (*PROBE, "model.core_layers=2", "probe.growth_warning=1.000001")
    alone = train(config, tmp_path / "alone", *settings, "probe.rows=6", "train.micro_batch_size=8").check()
    first, second = rows(alone)
    assert list(first["probe_norm"]) == ["1", "2", "3"] and list(first["probe_angle"]) == ["2", "3"]
    assert first["probe_norm_max"]["1"] >= first["probe_norm_p99"]["1"] >= first["probe_norm_p50"]["1"] > 0
    assert first["spectral_radius"] == pytest.approx(5**-0.5, abs=0.01)
    step = next(row for row in alone.rows if row["step"] == 2 and "grad_norm" in row)
    assert {"prelude.0", "core.0", "core.1", "coda.0", "injection", "embedding"} <= first["grad_norm_parts"].keys()
    total = sum(norm**2 for norm in first["grad_norm_parts"].values()) ** 0.5
    assert total == pytest.approx(step["grad_norm"], rel=1e-4)
    validation = next(row["val_loss"] for row in alone.rows if "val_loss" in row)
    assert first["probe_loss"]["2"] == pytest.approx(validation["2"], rel=1e-5), "the same six rows"
    grew = second["probe_norm"]["3"] > first["probe_norm"]["3"]
    assert ("probe.growth_warning" in alone.log) == grew

    both = train(config, tmp_path / "data", *settings, "train.micro_batch_size=4", world=2).check()
    assert_same(both, alone)
    tensor = ("parallel.tensor=2", "parallel.sequence_parallel=true", "probe.rows=6", "train.micro_batch_size=8")
    assert_same(train(config, tmp_path / "tensor", *settings, *tensor, world=2).check(), alone)
    pipeline = ("parallel.pipeline=2", "probe.rows=6", "train.micro_batch_size=4")
    assert_same(train(config, tmp_path / "pipeline", *settings, *pipeline, world=2).check(), alone)


def test_warnings_of_growth_and_of_norms_that_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume whose metrics have a norm that was not finite, which JSON has as null."""
    rows = [{"step": 2, "probe_norm": {"1": 1.0, "2": 2.0}}, {"step": 4, "probe_norm": {"1": 1.0, "2": None}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer: Any = Mock(cfg=Config(model=tiny_config("blindspot")), layout=Mock(is_main=True))
    trainer.state.step, trainer.engine.stage, trainer.engine.module = 5, 3, Mock(spec=LoopedLM, injection=None)
    trainer.engine.gradient_norms.return_value = {}
    probe = Probe(Mock(), 0, tmp_path)
    probe.on_start(trainer)
    for last, warnings in ((19.0, 0), (21.0, 1), (30.0, 1), (torch.nan, 2), (torch.inf, 3), (250.0, 4)):
        table = torch.full((len(NAMES), 2), last)
        monkeypatch.setattr(probe, "measure", lambda _, table=table: table)
        probe._probe(trainer)
        assert len(caplog.records) == warnings, last
    assert "from 2 to 21" in caplog.records[0].message and "loop 2 is nan" in caplog.records[1].message


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_belongs_to_one_part(family: str) -> None:
    cfg = tiny_config(family, auxiliary=AuxiliaryConfig(state_predictor=True, loop_heads=1, exit_gate=True))
    with torch.device("meta"):
        names = [name for name, _ in LoopedLM(cfg).named_parameters()]
    parts = gradient_parts(cfg)
    assert all(sum(name.startswith(f"{part}.") for part in parts) == 1 for name in names)


def test_under_zero_3_and_after_a_resume(config: Path, tmp_path: Path) -> None:
    whole = train(config, tmp_path / "whole", *PROBE).check()
    stopped = (*PROBE, "zero.stage=3")
    train(config, tmp_path / "parts", *stopped, "train.stop_step=3").check()
    resumed = train(config, tmp_path / "parts", *stopped).check()
    assert_same(resumed, whole, left_out=("probe_radial_fraction", "spectral_radius"))
    assert rows(resumed)[1]["grad_oscillation"] == pytest.approx(rows(whole)[1]["grad_oscillation"], rel=1e-3)
