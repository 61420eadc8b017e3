"""A checkpoint of tensor 2 x data 2 under ZeRO-1 goes on in other layouts: the same losses, moments bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pretrain.train.callbacks.checkpointing import Checkpointing
from pretrain.train.checkpoint.find import open_checkpoint
from pretrain.train.checkpoint.folders import checkpoints_folder, point_latest, step_folder
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.run_folder import run_folder
from pretrain.train.trainer import Trainer
from tests.train.forked import Run, train
from tests.train.test_run import MUON, assert_close

SAVED_BY = ("parallel.tensor=2",)
SETTINGS = (
    "model.core_layers=2", "model.recurrence.backprop_loops=2", "train.max_steps=10", "checkpoint.every_steps=5",
)  # fmt: skip
ADAMW = ("optimizer.name=adamw",)


def save_what_was_loaded() -> None:
    """A patch: every start first saves what it goes on from, in its own layout, beside the run's folder."""
    original = Checkpointing.on_start

    def on_start(self: Checkpointing, trainer: Trainer) -> None:
        original(self, trainer)
        own = self.writer
        self.writer = CheckpointWriter(loaded_by(run_folder(trainer.cfg)), trainer.cfg.checkpoint, "", Ranks.of())
        self.save(trainer)
        self.writer = own

    Checkpointing.on_start = on_start  # type: ignore[method-assign]


def loaded_by(folder: Path) -> Path:
    """Where the patched run puts what it has loaded."""
    return folder.with_name(f"{folder.name}.loaded")


def assert_same_tensors(own: CheckpointReader, expected: CheckpointReader, kinds: set[str]) -> None:
    """The same position, and every tensor of every kind equal by name, bit for bit."""
    assert own.state() == expected.state()
    assert own.names() == expected.names()
    assert {kind for name in own.names() for kind in own.kinds(name)} == kinds
    for name in expected.names():
        assert own.kinds(name) == expected.kinds(name)
        for kind in own.kinds(name):
            assert torch.equal(own.read(name, kind), expected.read(name, kind)), (name, kind)


def resume(straight: Run, folder: Path, config: Path, step: int, *settings: str, world: int, kinds: set[str]) -> Run:
    """A copy of `straight` that goes on from its step `step` in another layout; what it has loaded is compared."""
    shutil.copytree(straight.folder, folder)
    checkpoints = checkpoints_folder(folder)
    if step != 10:
        shutil.rmtree(step_folder(checkpoints, 10))
        point_latest(checkpoints, step)
    run = train(config, folder, *settings, world=world, patch=f"{__name__}:save_what_was_loaded").check()
    assert f"(step {step})" in run.log.partition("resuming from")[2]
    with open_checkpoint(step_folder(checkpoints, step)) as saved, open_checkpoint(loaded_by(folder)) as loaded:
        assert_same_tensors(loaded, saved, kinds)
    return run


@pytest.mark.parametrize(
    ("optimizer", "layouts"),
    [
        (ADAMW, {"dp1": (1, ()), "dp4-zero2": (4, ("zero.stage=2",)), "pp2": (2, ("parallel.pipeline=2",))}),
        pytest.param(MUON, {"dp1": (1, ()), "dp2-zero3": (2, ("zero.stage=3",))}, marks=pytest.mark.torture),
    ],
    ids=["adamw", "muon"],
)
def test_another_layout_goes_on_alike(
    optimizer: tuple[str, ...], layouts: dict[str, tuple[int, tuple[str, ...]]], config: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, *optimizer)
    kinds = {"parameter", "exp_avg", "exp_avg_sq"} | ({"momentum"} if optimizer is MUON else set())
    straight = train(config, tmp_path / "straight", *settings, *SAVED_BY, world=4).check()
    for name, (world, layout) in layouts.items():
        run = resume(straight, tmp_path / name, config, 5, *settings, *layout, world=world, kinds=kinds)
        assert run.column("step")[-1] == 10
        assert_close(run, straight, 1e-5)
    # And back, from the layout that was resumed last: its own checkpoint of step 10 loads whole under tensor 2.
    resume(run, tmp_path / "back", config, 10, *settings, *SAVED_BY, world=2, kinds=kinds)
