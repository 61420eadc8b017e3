"""The figure of exit rules and the benchmark of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import exit_code_of
from tests.hf.models import save_run
from tests.model.tiny import tiny_config
from tools import bench_cache, exit_curves


def test_exit_curves(text_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, figure = save_run(text_config, tmp_path / "run", "parcae"), tmp_path / "exits.png"
    assert exit_curves.main([str(run), "--out", str(figure), "--rows", "3", "--num-loops", "3"]) == 0
    output, _ = capsys.readouterr()
    rows = [line.split("|")[1:5] for line in output.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["fixed"] * 3 + ["kl"] * 6 + ["state"] * 6 + ["margin"] * 6
    loops = {name: [float(row[2]) for row in rows if row[0].strip() == name] for name in ("fixed", "kl", "margin")}
    assert loops["fixed"] == [1, 2, 3]
    for rule in ("kl", "margin"):
        assert loops[rule] == sorted(loops[rule]) and 1 <= loops[rule][0] <= 3, "stricter thresholds, more loops"
    assert figure.read_bytes().startswith(b"\x89PNG")
    for flag in ("--num-loops", "--rows"):
        assert exit_code_of(exit_curves.main, run, "--out", figure, flag, "0") == 2
        assert f"argument {flag}: 0: expected an integer >= 1" in capsys.readouterr().err
    assert exit_curves.main([str(run), "--out", str(tmp_path / "none" / "exits.png")]) == 2


def test_cache_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cache, "TEXT_TOKENS", 8)
    cfg = tiny_config("parcae", {"mean_loops": 5.0})
    lines = bench_cache.cache_section(cfg, 1, torch.device("cpu"))
    table = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line.startswith("| ")][1:]
    assert [row[0] for row in table] == ["no cache", "full", "last"]
    layer = 2 * 2 * 8 * 4 / 1024  # keys and values of 2 heads of 8 channels in fp32
    assert [float(row[2]) for row in table] == [0.0, round((2 + 5 * 2) * layer, 1), round(4 * layer, 1)]
    assert all(float(row[1]) > 0 for row in table)
