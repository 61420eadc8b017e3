"""Whole runs through the entry point: the layout changes nothing, and neither does a stop and a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.train.checkpoint.find import open_checkpoint
from tests.train.forked import Run, train

FLT = (
    "model.family=flt", "model.prelude_layers=0", "model.core_layers=2", "model.coda_layers=0",
    "model.recurrence.mean_loops=3", "model.recurrence.distribution=poisson",
)  # fmt: skip
MUON = ("optimizer.name=muon", "optimizer.muon_lr=8e-3")
PER_LOOP = ("loss.objective=per_loop",)
MASK = ("data.mask_document_boundaries=true",)
DROPOUT = ("model.dropout=0.2",)
DETERMINED = ("step", "loss", "grad_norm", "lr", "tokens", "num_loops_mean", "skipped_steps", "val_loss")


def determined(run: Run) -> list[dict[str, Any]]:
    """What of metrics.jsonl does not depend on time."""
    return [{name: row[name] for name in DETERMINED if name in row} for row in run.rows]


def assert_close(run: Run, reference: Run, tolerance: float) -> None:
    """Every determined number equal to the relative tolerance."""

    def numbers(row: dict[str, Any]) -> dict[str, float]:
        return {k: v for k, v in row.items() if k != "val_loss"} | row.get("val_loss", {})

    pairs = list(zip(map(numbers, determined(run.check())), map(numbers, determined(reference)), strict=True))
    assert len(pairs) > 4
    for own, expected in pairs:
        assert own == pytest.approx(expected, rel=tolerance, abs=0), f"\n{own}\n{expected}"


def assert_same_checkpoint(run: Run, reference: Run) -> None:
    """Weights, moments and the run's position equal bit for bit."""
    with open_checkpoint(run.folder) as own, open_checkpoint(reference.folder) as expected:
        assert own.state() == expected.state()
        assert own.names() == expected.names()
        for name in own.names():
            assert own.kinds(name) == expected.kinds(name)
            for kind in own.kinds(name):
                assert torch.equal(own.read(name, kind), expected.read(name, kind)), (name, kind)


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        (("optimizer.name=adamw",), (1, 2, 3)),
        ((*MUON, *FLT, *PER_LOOP, *MASK, *DROPOUT), (1, 2, 3)),
    ],
    ids=["parcae-adamw", "flt-muon-per_loop-mask-dropout"],
)
def test_processes_zero_stages_and_micro_batches_change_nothing(
    settings: tuple[str, ...], stages: tuple[int, ...], config: Path, tmp_path: Path
) -> None:
    """Depths are drawn per row: under stage 3 ranks run each other's loops along (lockstep), also to recompute them."""
    settings = (*settings, "train.max_steps=5", "model.recurrence.backprop_loops=2")
    alone = train(config, tmp_path / "alone", *settings, "train.micro_batch_size=8").check()
    assert len(alone.column("loss")) == 5 and len(alone.column("val_loss")) == 3
    for stage in stages:
        recompute = f"train.activation_checkpointing={'loop' if stage == 3 else 'none'}"
        more = (*settings, f"zero.stage={stage}", "train.micro_batch_size=2", recompute)
        both = train(config, tmp_path / f"stage_{stage}", *more, world=2)
        assert_close(both, alone, 1e-5)
        assert (max(both.column("waste")) > 1) == (stage == 3)


def test_zero_3_on_one_process_and_checkpointed_loops_change_nothing(config: Path, tmp_path: Path) -> None:
    plain = train(config, tmp_path / "plain", "train.max_steps=4", *MUON).check()
    for more in ("zero.stage=3", "train.activation_checkpointing=loop"):
        settings = ("train.max_steps=4", "train.micro_batch_size=4", *MUON, more)
        assert_close(train(config, tmp_path / more, *settings), plain, 1e-5)


@pytest.mark.parametrize(("stage", "settings"), [(1, (*MUON, *DROPOUT)), (3, (*MUON, *FLT, *PER_LOOP, *MASK))])
def test_resume_is_exact(stage: int, settings: tuple[str, ...], config: Path, tmp_path: Path) -> None:
    """6 steps straight = 3 steps, stopped, and 3 more: bit for bit."""
    settings = (*settings, f"zero.stage={stage}", "train.max_steps=6", "optimizer.eps=1e-8")
    straight = train(config, tmp_path / "straight", *settings, world=2).check()
    stopped = train(config, tmp_path / "resumed", *settings, "train.stop_step=3", world=2).check()
    assert stopped.column("step")[-1] == 3
    resumed = train(config, tmp_path / "resumed", *settings, world=2).check()
    assert determined(resumed) == determined(straight)
    assert_same_checkpoint(resumed, straight)
    assert "resuming from" in resumed.log and "changed since it was saved: train.stop_step: 3 -> None" in resumed.log


def test_resume_after_a_crash_measures_the_lost_steps_again(config: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=6", "checkpoint.every_steps=2")
    straight = train(config, tmp_path / "straight", *settings).check()
    patch = "tests.train.patches:fail_in_step_6"
    crashed = train(config, tmp_path / "resumed", *settings, patch=patch)
    assert crashed.codes == [1]
    assert crashed.column("step")[-1] == 5
    resumed = train(config, tmp_path / "resumed", *settings).check()
    assert determined(resumed) == determined(straight)
    assert_same_checkpoint(resumed, straight)
    assert "metrics.jsonl: removed 1 rows after step 4" in resumed.log
    finished = train(config, tmp_path / "resumed", *settings).check()
    assert determined(finished) == determined(straight)
    assert "stopped after step 6 of 6" in finished.outputs[0]


def test_changes_on_resume(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = train(config, folder, "train.max_steps=4", "train.stop_step=2").check()
    refused = train(config, folder, "train.max_steps=4", "model.width=64", "train.seed=1", "optimizer.lr=2e-3", world=2)
    assert refused.codes == [2, 2]
    for output in refused.outputs:
        assert "model.width: 32 -> 64: the weights in the checkpoint have this architecture" in output
        assert "train.seed: 0 -> 1" in output
        assert "optimizer.lr: 0.001 -> 0.002" in output and "run.override=true allows it" in output
        assert "Traceback" not in output
    assert determined(train(config, folder, "train.max_steps=4", "train.stop_step=2").check()) == determined(first)
    allowed = (
        "train.max_steps=5", "train.micro_batch_size=4", "zero.stage=2", "run.override=true", "optimizer.lr=2e-3",
    )  # fmt: skip
    longer = train(config, folder, *allowed, world=2).check()
    assert longer.column("lr")[:2] == first.column("lr")
    assert longer.column("lr")[2] == pytest.approx(2e-3)
    assert "changed since it was saved: optimizer.lr: 0.001 -> 0.002" in longer.log
    assert longer.column("step")[-1] == 5


def test_the_saved_configuration_starts_the_same_run(config: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=3", "optimizer.lr=1e-3", *MUON)
    first = train(config, tmp_path / "first", *settings).check()
    again = train(first.folder / "config.yaml", tmp_path / "again").check()
    assert determined(again) == determined(first)
    environment = json.loads((again.folder / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.") and len(environment["git"]) == 40
    assert {"python", "command_line", "host"} <= environment.keys()


def test_a_row_holds_what_other_tools_rely_on(config: Path, tmp_path: Path) -> None:
    run = train(config, tmp_path / "run", "train.max_steps=2", "loss.z_loss=1e-4", *MUON).check()
    step, _, validation = run.rows
    assert {
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_sec", "mfu", "num_loops_mean", "skipped_steps",
        "muon_lr", "muon_momentum", "z_loss", "step_sec", "wait_sec", "waste",
    } <= step.keys()  # fmt: skip
    assert step["tokens"] == 256 and step["tokens_per_sec"] == pytest.approx(256 / step["step_sec"])
    assert validation["step"] == 2 and validation["val_loss"].keys() == {"1", "2", "3", "4"}


def test_bf16_is_close_to_fp32(config: Path, tmp_path: Path) -> None:
    fp32 = train(config, tmp_path / "fp32", "train.max_steps=5").check()
    bf16 = train(config, tmp_path / "bf16", "train.max_steps=5", "train.precision=bf16")
    assert_close(bf16, fp32, 2e-2)
    assert bf16.column("loss") != fp32.column("loss")


def test_start_from_the_weights_of_another_run(config: Path, tmp_path: Path) -> None:
    first = train(config, tmp_path / "first", "train.max_steps=4").check()
    settings = ("train.max_steps=4", f"checkpoint.initial_weights={first.folder}", "validation.every_steps=1")
    second = train(config, tmp_path / "second", *settings, world=2).check()
    assert second.column("step")[0] == 1
    assert second.column("loss")[0] < first.column("loss")[0] - 0.2
