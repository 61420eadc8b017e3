"""tools/estimate.py prints exact counts for every shipped configuration, without torch, and refuses what cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.estimate import main

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_prints_a_page_for_every_configuration(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == 0
    page = capsys.readouterr().out
    for heading in ("Parameters", "FLOPs", "Memory per GPU", "Sent per step", "Time at 40% MFU"):
        assert heading in page
    assert ("pipeline bubble" in page) == (path.stem.endswith("pp2"))


def test_counts_follow_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(ROOT / "configs/parcae_140m.yaml"), "--gpus", "8"])
    assert "144,323,136" in capsys.readouterr().out
    main([str(ROOT / "configs/parcae_140m.yaml"), "--gpus", "8", "--model.tie_embeddings=false"])
    assert f"{144_323_136 + 32_768 * 768:,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "3"], "train.global_batch_size=16"),
        (["--gpus", "0"], "--gpus=0"),
        (["--mfu", "40"], "--mfu=40"),
        (["--peak-tflops", "0"], "--peak-tflops=0"),
        (["model.widht=64"], "nearest: model.width"),
        (["--gpu", "8"], "gpu='8': unknown key"),
    ],
)
def test_refuses_with_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "configs/tiny.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_needs_no_torch() -> None:
    code = "import sys; from tools.estimate import main; main(['configs/tiny.yaml']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)
