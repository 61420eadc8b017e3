"""The guard against spikes of the loss: what a spike is, and that a run goes on from it the same way in every case."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.config.schema import GuardsConfig
from pretrain.train.checkpoint.find import open_checkpoint
from pretrain.train.spikes import is_spike
from tests.train.forked import Run, train
from tests.train.test_run import assert_same_checkpoint, determined

PATCH = "tests.train.guard_patches:scale_losses"
WINDOW = ("guards.spike_window_steps=3", "guards.spike_sigma=100", "validation.every_steps=null")
SKIP = (*WINDOW, "train.max_steps=6", "guards.on_spike=skip")
REWIND = (
    *WINDOW, "train.max_steps=10", "guards.on_spike=rewind", "guards.rewind_steps=3", "checkpoint.every_steps=2",
)  # fmt: skip


def test_a_spike_is_far_above_the_mean_of_a_full_window() -> None:
    guards = GuardsConfig(spike_window_steps=4, spike_sigma=3)
    losses = [9.0, 1.0, 3.0, 1.0, 3.0]  # the last four: mean 2, standard deviation 1
    assert not is_spike(4.99, losses, guards) and is_spike(5.01, losses, guards)
    assert not is_spike(-9.0, losses, guards)
    assert not is_spike(99.0, losses[:3], guards)


def assert_same_weights(run: Run, reference: Run) -> None:
    """Weights and moments of the last checkpoints equal bit for bit; their states may differ."""
    with open_checkpoint(run.folder) as own, open_checkpoint(reference.folder) as expected:
        assert own.state().adamw_steps == expected.state().adamw_steps
        for name in expected.names():
            for kind in expected.kinds(name):
                assert torch.equal(own.read(name, kind), expected.read(name, kind)), (name, kind)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_a_spike_is_skipped_as_if_its_batch_had_been_left_out(stage: int, config: Path, tmp_path: Path) -> None:
    settings = (*SKIP, f"zero.stage={stage}")
    run = train(config, tmp_path / "run", *settings, world=2, patch=PATCH, FACTOR="10", STEPS="[5]").check()
    assert run.column("skipped_steps") == [0, 0, 0, 0, 1, 1]
    assert run.column("loss")[4] > 5 * run.column("loss")[3]
    assert run.log.count("a spike, so no rank updates its weights (1 in a row") == 1
    left_out = train(config, tmp_path / "left_out", *settings, "train.skip_steps=[5]", world=2).check()
    assert_same_weights(run, left_out)
    assert run.column("grad_norm")[5] == left_out.column("grad_norm")[5]


def test_a_rewind_leaves_out_the_batches_since_the_checkpoint(config: Path, tmp_path: Path) -> None:
    """A spike in step 7 undoes steps 5 to 7. A stop or a crash in between changes no bit, though steps are redone."""

    def start(name: str, *overrides: str, **environment: str) -> Run:
        spike = {"FACTOR": "10", "STEPS": "[7]"} | environment
        return train(config, tmp_path / name, *REWIND, *overrides, world=2, patch=PATCH, **spike)

    run = start("run").check()
    assert "go back to step 4, and the batches of steps 5 to 7 are left out (rewind 1 of" in run.log
    assert run.column("skipped_steps") == [0] * 6 + [3] * 4 and run.column("rewinds") == [0] * 6 + [1] * 4
    assert_same_weights(run, start("left_out", "train.skip_steps=[5,6,7]").check())

    start("stopped", "train.stop_step=5").check()
    crashed = start("crashed", CRASH_STEP="8")
    assert crashed.codes == [1, 5] and crashed.column("rewinds")[-1] == 1
    for name in ("stopped", "crashed"):
        again = start(name).check()
        assert determined(again) == determined(run)
        assert_same_checkpoint(again, run)


def test_rewinds_are_bounded_and_pass_over_what_was_undone(config: Path, tmp_path: Path) -> None:
    """The checkpoint of step 6 was undone in step 7: in step 9 it is not gone back to."""
    settings = (*REWIND, "guards.max_rewinds=2", "checkpoint.keep_last=5")
    run = train(config, tmp_path / "run", *settings, world=2, patch=PATCH, FACTOR="10", STEPS="[7,9,10]")
    assert run.codes == [6, 6]
    assert run.log.count("go back to step 4, and the batches of steps 5 to") == 2
    for output in run.outputs:
        assert "the run has gone back 2 times (guards.max_rewinds=2)" in output and "Traceback" not in output


def test_without_a_checkpoint_to_go_back_to_the_step_is_skipped(config: Path, tmp_path: Path) -> None:
    settings = (*REWIND, "train.max_steps=6", "checkpoint.every_steps=5")
    run = train(config, tmp_path / "run", *settings, patch=PATCH, FACTOR="10", STEPS="[4]").check()
    assert run.column("skipped_steps") == [0, 0, 0, 1, 1, 1] and run.column("rewinds") == [0] * 6
    assert "step 4: no checkpoint to go back to" in run.log
