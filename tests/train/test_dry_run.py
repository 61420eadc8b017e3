"""A dry run refuses what a start would refuse, with the same code and before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.train.checkpoint.folders import checkpoints_folder, step_folder
from tests.train.forked import Run, train

IN_EARNEST = (("train.max_steps=2",), ("train.seed=1",))
"""Also started; the others come out of the same functions."""


@pytest.fixture(scope="module")
def stopped(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has stopped after step 3 of 8."""
    return train(config, tmp_path_factory.mktemp("runs") / "run", "train.stop_step=3").check()


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (("train.max_steps=2",), 2, "train.max_steps=2: expected at least 3"),
        (("train.stop_step=1",), 2, "train.stop_step=1: expected at least 3"),
        (("train.max_steps=null", "train.max_tokens=512"), 2, "train.max_tokens=512: expected at least 513"),
        (("train.seed=1",), 2, "train.seed: 0 -> 1"),
        (("run.resume=never",), 4, "run.resume=never starts from step 0"),
        (("run.resume=step", "run.resume_step=2"), 4, "run.resume_step=2"),
        (("train.max_steps=3",), 0, ""),
    ],
)
def test_the_checkpoint_and_the_configuration(
    config: Path, stopped: Run, settings: tuple[str, ...], code: int, message: str
) -> None:
    before = (stopped.folder / "metrics.jsonl").read_bytes()
    for mode in (("--dry-run",), ()) if settings in IN_EARNEST else (("--dry-run",),):
        run = train(config, stopped.folder, *settings, *mode)
        assert run.codes == [code] and message in run.outputs[0], run
        assert "Traceback" not in run.outputs[0]
        assert (stopped.folder / "metrics.jsonl").read_bytes() == before
        assert step_folder(checkpoints_folder(stopped.folder), 3).is_dir()


@pytest.mark.parametrize("what", ["weights without a checkpoint", "weights of another model", "a missing shard"])
def test_what_else_a_start_reads(config: Path, stopped: Run, tmp_path: Path, what: str) -> None:
    if what == "weights without a checkpoint":
        settings, code, message = (f"checkpoint.initial_weights={tmp_path}",), 4, str(tmp_path)
    elif what == "weights of another model":
        weights = f"checkpoint.initial_weights={stopped.folder}"
        settings, code, message = (weights, "model.ffn_width=32"), 4, "the model is not the one that was saved"
    else:
        data = shutil.copytree(config.parent / "data", tmp_path / "data")
        next((data / "train").glob("*.mds")).unlink()
        settings, code, message = (f"data.path={data}",), 3, "shard is missing"
    for mode in (("--dry-run",), ()):
        run = train(config, tmp_path / "run", *settings, *mode)
        assert run.codes == [code] and message in run.outputs[0] and "Traceback" not in run.outputs[0], run
