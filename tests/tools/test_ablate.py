"""Experiments: the shipped files, runs and their order, what is measured and summed up, and bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launchers.sweep import read_sweep
from pretrain.config.load import load_config
from pretrain.config.schema import LossConfig
from pretrain.config.validate import validate
from pretrain.errors import STOPPED_EXIT_CODE
from pretrain.model.init import init_parameters
from pretrain.model.looped import LoopedLM
from pretrain.model.ops import TensorOps
from tests.helpers import exit_code_of
from tests.tools.models import CONTEXT, VOCAB, save_model, write_words
from tools import ablate

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "ablations"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.endswith("_base"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_experiments_are_valid_runs(path: Path, tmp_path: Path) -> None:
    experiment = ablate.read_experiment(path)
    trials = ablate.trials_of(experiment, tmp_path, [])
    assert len(trials) == len(experiment.seeds) * len(experiment.variants) >= 12
    assert len({trial.name for trial in trials}) == len(trials)
    for trial in trials[: len(experiment.variants)]:
        validate(load_config(experiment.config, trial.overrides), 1)


def test_the_list_is_a_sweep_of_the_same_runs(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    arguments = [str(FILES[0]), "--out", str(tmp_path), "--list", str(sweep), "train.max_steps=30"]
    assert ablate.main(arguments) == 0
    trials = ablate.trials_of(ablate.read_experiment(FILES[0]), tmp_path, ["train.max_steps=30"])
    assert read_sweep(sweep) == [trial.overrides for trial in trials]
    assert ablate.main(arguments) == 2, "an existing file is left alone"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("ablate"))


@pytest.fixture
def experiment(data: Path, tmp_path: Path) -> Path:
    """Two variants and two seeds of a tiny model."""
    (tmp_path / "small_base.yaml").write_text(
        f"model: {{family: blindspot, vocab_size: {VOCAB}, context_length: {CONTEXT}, width: 16, num_heads: 2, "
        f"ffn_width: 24, core_layers: 1}}\ndata: {{path: {data}}}\nloss: {{objective: per_loop}}\n"
        "train: {max_steps: 7, global_batch_size: 4, micro_batch_size: 4, precision: fp32}\nvalidation: {rows: 5}\n"
        "schedule: {decay_fraction: 0}\n"
    )
    path = tmp_path / "small.yaml"
    path.write_text(
        "config: small_base.yaml\nreference: norm\nseeds: [0, 5]\nloops: 4\n"
        "variants:\n  norm: []\n  raw: [model.recurrence.readout=raw]\n"
    )
    return path


def test_runs_are_trained_once_measured_and_summed_up(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def train(experiment: ablate.Experiment, trial: ablate.Trial, minutes: float | None) -> bool:
        trained.append(trial.name)
        if len(trained) == 3:
            return False
        cfg = load_config(experiment.config, trial.overrides)
        model = LoopedLM(cfg.model)
        init_parameters(model, cfg.model, cfg.train.seed, TensorOps())
        run = save_model(Path(cfg.run.dir), trial.name, cfg.model, model, Path(cfg.data.path or ""), LossConfig())
        steps: list[dict[str, Any]] = [{"step": i, "step_sec": trial.seed + i, "loss": 1.0} for i in (1, 2, 3)]
        probe = {"step": 3, "probe_norm": {"1": 1.0, "4": 9.0}}
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps, probe]))
        return True

    monkeypatch.setattr(ablate, "train", train)
    out = tmp_path / "out"
    arguments = [str(experiment), "--out", str(out), "--minutes", "1"]
    assert ablate.main(arguments) == STOPPED_EXIT_CODE
    assert trained == ["norm_s0", "raw_s0", "norm_s5"] and "2 of 4 runs are measured" in capsys.readouterr().out
    assert ablate.main(arguments) == 0
    assert trained == ["norm_s0", "raw_s0", "norm_s5", "norm_s5", "raw_s5"], "what is measured is not run again"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["norm"]["seeds"] == 2 and summary["norm"]["s per step"][0] == pytest.approx((2 + 7) / 2)
    assert summary["raw"]["s per step, ratio"] == pytest.approx(1.0)
    assert summary["norm"]["radial fraction"][0] < 1e-3 < 1e-2 < summary["raw"]["radial fraction"][0]
    record = json.loads((out / "measured" / "raw_s5.json").read_text())
    assert record["norm_by_step"] == [[3, 9.0]] and len(record["ppl"]) == 4
    page = (out / "report.html").read_text()
    assert "Variants" in page and 'id="norm_by_step"' in page
    assert ablate.main([*arguments, "optimizer.lr=0.5"]) == 2, "other settings need another folder"
    assert ablate.main([*arguments, "--only", "raw,nothing"]) == 2
    base = tmp_path / "small_base.yaml"
    for path, old, new, message in (
        (base, "max_steps: 7", "max_steps: 8", "train.max_steps=8, but the runs"),
        (experiment, "loops: 4", "loops: 3", "measured with loops=4"),
        (out / "measured" / "raw_s0.json", "{", "", "no record of a run"),
    ):
        text = path.read_text()
        path.write_text(text.replace(old, new, 1))
        assert ablate.main(arguments) == 2 and message in capsys.readouterr().err
        path.write_text(text)
    assert exit_code_of(ablate.main, *arguments[:3], "--minutes", "0") == 2
    assert "argument --minutes: 0: expected a number > 0" in capsys.readouterr().err
    assert ablate.main([*arguments, "--only", "norm"]) == 0
    assert json.loads((out / "summary.json").read_text()).keys() == {"norm"}


def test_short_runs_train_in_this_process(experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = ["optimizer.lr=3e-3", "schedule.name=constant", "train.max_steps=30", "probe.every_steps=10"]
    assert ablate.main([str(experiment), "--out", str(out), "--in-process", "--only", "norm", *settings]) == 0
    record = json.loads((out / "measured" / "norm_s0.json").read_text())
    assert [step for step, _ in record["norm_by_step"]] == [10, 20, 30]
    assert record["step"] == 30 and record["ppl"][3] < 0.8 * VOCAB, "it has learned"
    assert not (out / "runs").exists()
    muon = [str(experiment), "--out", str(tmp_path / "muon"), "--in-process", "optimizer.name=muon"]
    assert ablate.main(muon) == 2


def test_a_run_that_diverges_is_counted_and_the_others_go_on(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment.write_text(experiment.read_text() + "  broken: [optimizer.lr=1e30, model.recurrence.readout=raw]\n")
    arguments = [str(experiment), "--out", str(tmp_path / "out"), "--in-process", "--only", "broken"]
    assert ablate.main(arguments) == 0
    assert "4 of 4 runs are measured, 2 of them diverged" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["norm"]["seeds"], summary["norm"]["diverged"]) == (2, 0)
    assert (summary["broken"]["seeds"], summary["broken"]["diverged"]) == (0, 2)
    assert summary["broken"]["norm at K"] == [None, None] and summary["broken"]["norm at K, ratio"] is None
    assert "broken_s5 diverged: step" in (tmp_path / "out" / "report.html").read_text()
    assert ablate.main(arguments) == 0, "and it is not tried again"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference: norm", "reference: none", "reference='none': expected one of norm, raw"),
        ("seeds: [0, 5]", "seeds: [0, 0]", "expected different integers"),
        ("loops: 4\n", "", "expected exactly the keys"),
        ("loops: 4\n", "loops: 1\n", "loops=1: expected at least 2"),
        ("raw: [model.recurrence.readout=raw]", "raw: readout", "variants.raw='readout'"),
        ("readout=raw", "readot=raw", "readot"),
    ],
)
def test_bad_files(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    experiment.write_text(experiment.read_text().replace(old, new))
    assert ablate.main([str(experiment), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
