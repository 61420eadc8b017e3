"""validation.rows=0: training on a set without a validation split, and what else then has to say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.train.state import TrainState
from tests.train.forked import train
from tools import ablate, demo, model_card

WITHOUT = ("validation.rows=0", "train.max_steps=4")


@pytest.fixture
def unvalidated(config: Path, tmp_path: Path) -> Path:
    """The small run on a copy of its data set that has no validation split."""
    data = Path(load_config(config).data.all_sources[0].path)
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    shutil.rmtree(copy / "validation")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["splits"]["validation"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    path = tmp_path / "small.yaml"
    path.write_text(config.read_text().replace(str(data), str(copy)))
    return path


def test_a_set_without_validation_trains_and_says_what_is_missing(
    unvalidated: Path, config: Path, tmp_path: Path
) -> None:
    refused = train(unvalidated, tmp_path / "refused", "train.max_steps=4")
    assert refused.codes == [2]
    assert "validation.rows=5: expected at most the 0 validation rows" in refused.outputs[0]
    assert "or 0 to train without validation" in refused.outputs[0]
    run = train(unvalidated, tmp_path / "run", *WITHOUT, "probe.every_steps=2").check()
    assert run.column("loss") and not run.column("val_loss") and not run.column("probe_norm")
    assert "validation  none (validation.rows=0): no validation loss, no probe of the state" in run.log
    measured = train(config, tmp_path / "measured", "train.max_steps=4").check()
    assert run.column("loss") == measured.column("loss"), "measuring does not change the training"


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [("zero.stage=3",), ("parallel.pipeline=2", "parallel.tensor=1", "zero.stage=1")])
def test_layouts_without_validation(layout: tuple[str, ...], unvalidated: Path, tmp_path: Path) -> None:
    settings = (*WITHOUT, "model.core_layers=2", "train.compile=false")
    alone = train(unvalidated, tmp_path / "alone", *settings).check()
    both = train(unvalidated, tmp_path / "both", *settings, *layout, world=2).check()
    assert both.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5, abs=0)


def test_validation_may_begin_and_end_with_a_resume(config: Path, tmp_path: Path) -> None:
    straight = train(config, tmp_path / "straight", "train.max_steps=6").check()
    first = train(config, tmp_path / "run", "train.max_steps=6", "train.stop_step=2", "validation.rows=0").check()
    assert not first.column("val_loss")
    second = train(config, tmp_path / "run", "train.max_steps=6", "train.stop_step=4").check()
    assert "changed since it was saved: validation.rows: 0 -> 5" in second.log
    third = train(config, tmp_path / "run", "train.max_steps=6", "validation.rows=0").check()
    assert third.column("loss") == straight.column("loss")
    assert [row["step"] for row in third.rows if "val_loss" in row] == [4]


def test_tools_that_compare_validation_losses_refuse_at_once(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["validation.rows=0", f"run.dir={tmp_path}"]) == 2
    assert "validation.rows=0: expected at least 1, since the demo compares" in capsys.readouterr().err
    folder = Path(__file__).resolve().parents[2] / "configs" / "ablations"
    experiment = ablate.read_experiment(folder / "readout.yaml")
    with pytest.raises(ConfigError, match=r"validation\.rows=0: expected at least 1, since tools\.ablate compares"):
        ablate.trials_of(experiment, tmp_path, ["validation.rows=0"])
    cfg = load_config(config, ["validation.rows=0"])
    assert "trained without validation (validation.rows=0)" in model_card.run_card(cfg, 4, TrainState(), None)
