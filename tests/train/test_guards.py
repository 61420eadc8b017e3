"""What ends or disturbs a run: steps that are not finite, stops, exceptions on one rank, optional services."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pretrain.errors import STOPPED_EXIT_CODE
from tests.train.forked import Run, train
from tests.train.test_run import MUON, determined
from tests.train.test_spikes import assert_same_weights

PATCHES = "tests.train.patches"
SCALED = "tests.train.guard_patches:scale_losses"
FULL_DISK = "tests.train.guard_patches:full_disk"
slow = pytest.mark.slow


@pytest.mark.parametrize("stage", [1, 3])
def test_steps_that_are_not_finite_end_the_run_together(stage: int, config: Path, tmp_path: Path) -> None:
    """The first update is absurd; every step after it is skipped on both ranks, logged, counted, and then too many."""
    settings = ("optimizer.lr=1e30", "train.max_skipped_in_a_row=3", f"zero.stage={stage}")
    run = train(config, tmp_path / "run", *settings, world=2)
    assert run.codes == [6, 6]
    assert run.column("skipped_steps") == [0, 1, 2, 3]
    assert run.column("loss")[1:] == [None] * 3 and run.column("grad_norm")[1:] == [None] * 3
    assert run.log.count("not finite, so no rank updates its weights") == 3
    for rank, output in enumerate(run.outputs):
        assert re.search(rf"error on rank {rank} \(.+\): after step 4: 3 steps in a row", output)
        assert "Traceback" not in output and "lower optimizer.lr" in output
    assert "ERROR after step 4: 3 steps in a row" in run.log


@pytest.mark.parametrize(
    "settings",
    [
        ("zero.stage=1",),
        pytest.param(("zero.stage=2",), marks=slow),
        pytest.param(("zero.stage=3", *MUON), marks=slow),
        pytest.param(("parallel.tensor=2",), marks=slow),
        pytest.param(("parallel.pipeline=2", "model.core_layers=2"), marks=slow),
    ],
    ids=" ".join,
)
def test_a_nan_on_one_rank_is_a_step_that_no_rank_does(
    settings: tuple[str, ...], config: Path, tmp_path: Path
) -> None:
    """Rank 1's loss is NaN in step 3: weights and moments become what they are where that batch is left out."""
    settings = ("train.max_steps=5", "validation.every_steps=null", *settings)
    nan = {"FACTOR": "nan", "FAULTY_RANK": "1"}
    run = train(config, tmp_path / "run", *settings, world=2, patch=SCALED, STEPS="[3]", **nan).check()
    assert run.column("skipped_steps") == [0, 0, 1, 1, 1]
    assert run.column("grad_norm")[2] is None and run.log.count("not finite, so no rank updates its weights (1 in") == 1
    left_out = train(config, tmp_path / "left_out", *settings, "train.skip_steps=[3]", world=2).check()
    assert_same_weights(run, left_out)
    if "zero.stage" in settings[-1] or MUON[0] in settings:  # ranks that hold the same parameters
        assert len({re.findall("^weights .{8}$", output, re.MULTILINE)[0] for output in run.outputs}) == 1


def test_five_steps_that_are_not_finite_end_the_run(config: Path, tmp_path: Path) -> None:
    nan = {"FACTOR": "nan", "FAULTY_RANK": "1", "STEPS": "[2,4,5,6,7,8]"}
    run = train(config, tmp_path / "run", world=2, patch=SCALED, **nan)
    assert run.codes == [6, 6]
    assert run.column("skipped_steps") == [0, 1, 1, 2, 3, 4, 5, 6]
    assert "(5 in a row, train.max_skipped_in_a_row=5)" in run.log and "ERROR after step 8: 5 steps in a row" in run.log


def test_skipped_batches_are_read_and_not_trained_on(config: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=5", "train.skip_steps=[2,3]", "schedule.name=constant", *MUON)
    one, two = (train(config, tmp_path / f"{n}", *settings, world=n).check() for n in (1, 2))
    for run in (one, two):
        assert [loss is None for loss in run.column("loss")] == [False, True, True, False, False]
        assert run.column("tokens") == [256, 512, 768, 1024, 1280]
        assert run.column("skipped_steps") == [0] * 5
        assert "step 2: its batch was read and not trained on (train.skip_steps)" in run.log
    plain = train(config, tmp_path / "plain", "train.max_steps=5", "schedule.name=constant", *MUON).check()
    assert one.column("loss")[0] == plain.column("loss")[0] and one.column("loss")[4] != plain.column("loss")[4]
    assert two.column("loss")[4] == pytest.approx(one.column("loss")[4], rel=1e-5)


def test_wall_clock_budget(config: Path, tmp_path: Path) -> None:
    """Step 1 is done, since the budget is looked at before a step; the run saves, ends with 85, and can go on."""
    straight = train(config, tmp_path / "straight", "train.max_steps=3").check()
    run = train(config, tmp_path / "run", "train.max_steps=3", "train.max_hours=1e-6", world=2)
    assert run.codes == [STOPPED_EXIT_CODE] * 2
    assert run.column("step") == [1]
    assert "stopped after step 1 of 3" in run.log and "(train.max_hours=1e-06 is over)" in run.log
    resumed = train(config, tmp_path / "run", "train.max_steps=3").check()
    assert resumed.column("step") == straight.column("step")


def test_one_rank_that_asks_stops_all_after_the_same_step(config: Path, tmp_path: Path) -> None:
    run = train(config, tmp_path / "run", world=2, patch=f"{PATCHES}:stop_after_step_3_on_rank_1")
    assert run.codes == [STOPPED_EXIT_CODE] * 2
    assert run.rows[-1]["step"] == 3
    assert "stopped after step 3 of 8" in run.log and "asked for by another rank" in run.log
    assert (run.folder / "checkpoints/latest").read_text().strip() == "step_00000003"


def test_an_exception_on_one_rank(config: Path, tmp_path: Path) -> None:
    """That rank says rank, host and step, shows its traceback first and ends by itself, without a collective."""
    patch = f"{PATCHES}:fail_in_step_3_on_the_last_rank"
    run = train(config, tmp_path / "run", "data.num_workers=1", world=2, patch=patch)
    assert run.codes == [5, 1]
    assert re.match(r"error on rank 0 \(.+\): after step 2: another rank failed", run.outputs[0].splitlines()[-1])
    lines = run.outputs[1].splitlines()
    assert re.fullmatch(r"error on rank 1 \(.+\): after step 2: Traceback \(most recent call last\):", lines[0])
    assert lines[-1] == "ValueError: a fault of the test"
    assert run.column("step")[-1] == 2


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_save_in_the_background_that_fails_is_made_up_for(at_the_end: bool, config: Path, tmp_path: Path) -> None:
    """Once: another one follows at once. No success is reported before the last save is complete."""
    every = "null" if at_the_end else "3"
    settings = ("checkpoint.background=true", f"checkpoint.every_steps={every}", "validation.every_steps=null")
    run = train(config, tmp_path / "run", *settings, world=2, patch=FULL_DISK, FAILURES="1").check()
    failed = 8 if at_the_end else 3
    assert f"ERROR checkpoint of step {failed} was not saved" in run.log and "No space left on device" in run.log
    assert run.log.count("; saving once more") == 1
    assert (run.folder / "checkpoints/latest").read_text().strip() == "step_00000008"
    assert 0 < run.log.index("checkpoint of step 8: 0") < run.log.index("stopped after step 8 of 8")
    if not at_the_end:
        # At the next step, or, on a machine whose thread is slower than three steps, by the save of step 6.
        noticed = [row["step"] for row in run.rows if row.get("save_failed")] or [6]
        assert len(noticed) == 1 and noticed[0] > 3
        assert (run.folder / f"checkpoints/step_{noticed[0]:08d}").is_dir()


def test_a_disk_that_stays_full_ends_the_run(config: Path, tmp_path: Path) -> None:
    settings = ("checkpoint.background=true", "checkpoint.every_steps=2", "validation.every_steps=null")
    run = train(config, tmp_path / "run", *settings, world=2, patch=FULL_DISK, FAILURES="99")
    assert run.codes == [4, 4]
    assert "stopped after" not in run.log and not (run.folder / "checkpoints/latest").exists()
    assert "No space left on device" in run.outputs[0] and "Traceback" not in run.outputs[0]


def test_deterministic_and_worker_processes_and_profile(config: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=4", "train.deterministic=true", "data.num_workers=1", "logging.profile_steps=[2,3]")
    run = train(config, tmp_path / "run", *settings, patch=f"{PATCHES}:require_deterministic").check()
    plain = train(config, tmp_path / "plain", "train.max_steps=4").check()
    assert determined(run) == determined(plain)
    trace = json.loads((run.folder / "trace_2_3.json").read_text())
    assert len(trace["traceEvents"]) > 1_000


@pytest.mark.parametrize("how", ["absent", "init", "log", "well"])
def test_wandb_never_stops_a_run(how: str, config: Path, tmp_path: Path) -> None:
    """It starts and fails in every way, and only the main rank imports it."""

    def start(*overrides: str) -> Run:
        patch = f"{PATCHES}:wandb_absent" if how == "absent" else f"{PATCHES}:fake_wandb"
        settings = ("train.max_steps=3", "logging.wandb=online", *overrides)
        world = 2 if how == "well" else 1
        return train(config, tmp_path / "run", *settings, world=world, patch=patch, FAKE_WANDB=how).check()

    run = start("train.stop_step=2")
    assert run.column("loss") and run.column("step")[-1] == 2
    assert run.log.count("wandb is off for the rest of this run") == (how != "well")
    assert run.outputs[0].count("wandb imported") == (how != "absent")
    if how == "well":
        resumed = start()
        assert "wandb" not in run.outputs[1] + resumed.outputs[1]
        ids = [re.search(r"wandb run (\w+) online", each.outputs[0]) for each in (run, resumed)]
        assert ids[0] and ids[1] and ids[0][1] == ids[1][1]
        assert [json.loads(row)["step"] for row in re.findall("wandb row (.*)", resumed.outputs[0])] == [3, 3]
        assert '"val_loss/1": ' in resumed.outputs[0] and "wandb finished" in resumed.outputs[0]


def test_a_port_in_use_is_named(config: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        run = train(config, tmp_path / "run", MASTER_PORT=port)
    assert run.codes == [5]
    assert f"127.0.0.1:{port}" in run.outputs[0] and "--master_port" in run.outputs[0]
