"""--cluster local --array: runs follow one another, finished ones are skipped, a request to stop ends the sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import launchers.slurm
from launchers.slurm import main
from pretrain.config.schema import Config
from tests.config.test_preflight import write_data_set
from tests.launchers.test_submit import CONFIG


class Recorder:
    """Stands in for LocalRun: notes the overrides of each run and returns the code that the test sets for its name."""

    codes: dict[str, int]
    stop_at: str
    started: list[str]

    def __init__(self, arguments: list[str], tasks: int, **_: Any) -> None:
        self.name = next(text for text in reversed(arguments) if text.startswith("run.name=")).removeprefix("run.name=")
        assert tasks == 1 and "optimizer.lr=1e-3" in arguments
        self.asked_to_stop = self.name == self.stop_at

    def run(self) -> int:
        """The exit code."""
        self.started.append(self.name)
        return self.codes.get(self.name, 0)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a sweep of three runs, none of which is finished."""
    write_data_set(tmp_path / "data")
    (tmp_path / "c.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "s.yaml").write_text("- [train.seed=1]\n- [train.seed=2]\n- [run.name=last, train.seed=3]\n")
    Recorder.codes, Recorder.stop_at, Recorder.started = {}, "", []
    monkeypatch.setattr(launchers.slurm, "LocalRun", Recorder)
    monkeypatch.setattr(launchers.slurm, "is_finished", lambda cfg: False)
    files = ["--config", str(tmp_path / "c.yaml"), "--array", str(tmp_path / "s.yaml")]
    return ["--cluster", "local", "--tasks-per-node", "1", *files, "optimizer.lr=1e-3"]


def test_runs_follow_one_another(sweep: list[str]) -> None:
    assert main(sweep) == 0
    assert Recorder.started == ["first-0", "first-1", "last"]


def test_a_failed_run_does_not_end_the_sweep(sweep: list[str]) -> None:
    Recorder.codes = {"first-0": 6}
    assert main(sweep) == 6
    assert Recorder.started == ["first-0", "first-1", "last"]


def test_a_request_to_stop_ends_the_sweep(sweep: list[str]) -> None:
    Recorder.codes, Recorder.stop_at = {"first-1": 85}, "first-1"
    assert main(sweep) == 85
    assert Recorder.started == ["first-0", "first-1"]


def test_finished_runs_are_skipped(
    sweep: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_finished(cfg: Config) -> bool:
        return cfg.train.seed == 2

    monkeypatch.setattr(launchers.slurm, "is_finished", is_finished)
    assert main(sweep) == 0
    assert Recorder.started == ["first-0", "last"] and "finished" in capsys.readouterr().out
