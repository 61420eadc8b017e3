"""Every layout of four processes trains as one process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import REPOSITORY, end_processes, run_ranks

NUM_LAYOUTS = 12


def check_layouts(*arguments: str, timeout_sec: float) -> list[list[float]]:
    """Differences of loss, gradient norm and weights that tools/check_layouts.py prints, by case."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "tools/check_layouts.py", *arguments], cwd=REPOSITORY, env=environment,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_sec)
    finally:
        end_processes([process])
    lines = re.findall(r"loss (\S+), gradient norm (\S+), weights (\S+)", output.decode())
    return [list(map(float, line)) for line in lines]


@pytest.mark.layouts
def test_every_layout_trains_as_one_process_does() -> None:
    """The family with everything in it: diagonal injection, feedback, value embeddings, tied matrices."""
    only = ("--families", "parcae_flt", "--optimizers", "muon", "--precisions", "fp32", "--steps", "3")
    found = check_layouts(*only, timeout_sec=600)
    assert len(found) == NUM_LAYOUTS
    for loss, norm, weights in found:
        assert loss <= 1e-5 and norm <= 1e-5 and weights <= 1e-4


LOOPS = "model.recurrence.max_loops=6 model.recurrence.mean_loops=4 model.recurrence.backprop_loops=6"
THIN = "model.prelude_layers=1 model.core_layers=1 model.coda_layers=1"
FOUR = "model.recurrence.mean_loops=4 model.recurrence.backprop_loops=4"
FEW = "model.recurrence.mean_loops=2 model.recurrence.backprop_loops=4 train.global_batch_size=2"
ALONE = "train.micro_batch_size=1"
PREDICTOR = "model.auxiliary.state_predictor=true loss.state_prediction=0.3"
HEADS = "model.auxiliary.loop_heads=2 loss.loop_heads=0.3"
GATE = "loss.objective=exit_weighted model.auxiliary.exit_gate=true"
SEQUENCE_IN_PIPELINE = "parallel.tensor=2 parallel.pipeline=2 parallel.sequence_parallel=true"
BARE = "model.prelude_layers=0 model.coda_layers=0"
CONFIGURATIONS = (
    # Readouts are module calls, which stage 3 makes on all ranks together, whatever the depths of their rows.
    *(f"2 x zero.stage=3 {THIN} loss.objective={name} {LOOPS} {ALONE}" for name in ("per_loop", "last_third")),
    f"2 x zero.stage=3 {THIN} {GATE} {LOOPS} {ALONE}",
    # Heads that a rank's rows do not come to: in a whole step (stage 1 sums once), or in a micro-batch.
    *(f"2 x zero.stage=1 {THIN} {head} {FEW} {ALONE}" for head in (HEADS, PREDICTOR)),
    *(f"2 x zero.stage={stage} {THIN} {HEADS} {FOUR} {ALONE}" for stage in (2, 3)),
    f"2 x zero.stage=2 {THIN} {PREDICTOR} {GATE} {FOUR} {ALONE}",
    f"2 x zero.stage=2 {THIN} {HEADS} loss.objective=last_third {LOOPS} {ALONE} model.tie_embeddings=false",
    f"4 x parallel.pipeline=2 {HEADS} {FOUR} {ALONE}",
    # The state that a pipeline sends begins as the embedding.
    *(f"4 x {SEQUENCE_IN_PIPELINE} {family} {ALONE}" for family in (
        f"model.family=gpt {BARE}", f"model.family=blindspot {BARE} model.dropout=0.2",
        f"model.family=add {BARE} {FOUR} model.recurrence.state_init=input", f"model.family=lt {BARE} {FOUR}",
    )),
    f"2 x model.family=flt {BARE} model.core_layers=1 {FOUR} model.dropout=0.2 zero.stage=3 {ALONE} "
    "data.mask_document_boundaries=true",
)  # fmt: skip
"""What failed once: (processes) x (overrides), as tools/check_layouts.py --configurations takes them."""

NUM_DRAWS = 22  # two of each family, and every layout at least once


def failures(*arguments: str) -> tuple[int, list[str]]:
    """Configurations that were trained, and the lines of tools/layout_draws.py that are not good."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "tools/check_layouts.py", *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end_processes([process])
    lines = [line for line in output.decode().splitlines() if line.startswith("draw ")]
    bad = [line for line in lines if "FAILED" in line or "REFUSED" in line]
    assert (process.returncode == 0) == (not bad)
    return len(lines), bad


@pytest.mark.layouts
def test_configurations_that_failed_once() -> None:
    assert failures("--configurations", *CONFIGURATIONS) == (len(CONFIGURATIONS), [])


@pytest.mark.layouts
def test_configurations_by_chance_train_as_on_one_process() -> None:
    """Also: what is refused is what the documents say."""
    assert failures("--draws", str(NUM_DRAWS), "--seed", "1") == (NUM_DRAWS, [])


@pytest.mark.layouts
def test_what_is_not_a_number_is_too_large() -> None:
    from tools.check_layouts import columns, within
    from tools.layout_runs import Difference, largest

    assert largest([0.0, 1e-9, float("nan"), 1e-8]) == float("inf")
    assert within(columns("fp32", Difference(1e-9, 1e-9, largest([1e-9, 1e-8]), 0.0)))
    assert not within(columns("fp32", Difference(1e-9, 1e-9, largest([0.0, float("nan")]), 0.0)))


@pytest.mark.layouts
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "--steps: 0: expected an integer >= 1"),
        (["--markdown", "README.md"], "with the lines <!--"),
        (["--draws", "-1"], "--draws: -1: expected an integer >= 0"),
        (["--configurations", "model.family=gpt"], "expected 'PROCESSES x OVERRIDES'"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_training(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.check_layouts import main

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["check_layouts.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    """Of each rank of tests/layout_cases.py."""
    return run_ranks(4, "tests.layout_cases:run", timeout_sec=600)


@pytest.mark.slow
def test_activation_checkpointing_leaves_gradients_as_they_are(report: list[dict[str, Any]]) -> None:
    for rank in report:
        assert len(rank["gradients"]) == 8 * 4 + 4 * 3
        assert {case: x for case, x in rank["gradients"].items() if not x <= 1e-6} == {}


@pytest.mark.slow
def test_zero_takes_loop_counts_that_change_with_every_step(report: list[dict[str, Any]]) -> None:
    for rank in report:
        assert len(rank["loops"]) == 3 * 4
        assert {case: x for case, x in rank["loops"].items() if not x <= 1e-5} == {}
