"""Processes and threads that die in whatever phase of a run: the others end at once, and by the right exit code."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from tests.train.forked import train

PATCHES = "tests.train.guard_patches"
SETTINGS = ("data.num_workers=1", "checkpoint.every_steps=3", "parallel.timeout_sec=8")
PHASES = {
    "meeting": "torch.distributed:init_process_group",
    "reading checkpoints": "pretrain.train.build:find_checkpoint",
    "model": "pretrain.train.build:build_model",
    "engine": "pretrain.train.build:ZeroEngine",
    "loader": "pretrain.data.loader:RowDataset",
    "validation": "pretrain.train.callbacks.validation:Validation.on_step",
    "save": "pretrain.train.checkpoint.writer:CheckpointWriter.save",
    "end": "pretrain.train.checkpoint.writer:CheckpointWriter.wait",
}
EVERYDAY = ("engine", "save")


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in PHASES]
)
def test_a_rank_that_dies_ends_the_others_with_5(phase: str, config: Path, tmp_path: Path) -> None:
    run = train(
        config, tmp_path / "run", *SETTINGS, world=2, patch=f"{PATCHES}:die_in", last_sec=30, WHERE=PHASES[phase]
    )
    assert run.codes == [5, -9], run.outputs[0]
    last = run.outputs[0].splitlines()[-1]
    assert re.match(r"error on rank 0 \(.+\): .*(another rank failed|could not meet)", last), run.outputs[0]


def test_a_loader_process_that_dies_in_the_middle_of_a_step(config: Path, tmp_path: Path) -> None:
    """Never an exception in the step: the next batch is what cannot be had."""
    patch = f"{PATCHES}:kill_a_loader_process_in_step_3"
    run = train(config, tmp_path / "run", *SETTINGS, world=2, patch=patch, last_sec=30)
    assert run.codes == [5, 3]
    words = r"error on rank 1 \(.+\): after step 3: loader process \d+ was ended by SIGKILL\. .* ran out of memory"
    assert re.match(words, run.outputs[1].splitlines()[-1]), run.outputs[1]
    assert "another rank failed" in run.outputs[0]


@pytest.mark.parametrize("thread", ["signals", "watchdog"])
def test_a_thread_that_fails_ends_the_process(thread: str, config: Path, tmp_path: Path) -> None:
    run = train(config, tmp_path / "run", patch=f"{PATCHES}:fail_in_thread", WHERE=thread)
    assert run.codes == [1]
    assert re.search(r"error on rank 0 \(.+\): thread [a-z-]+ failed: Traceback", run.outputs[0])
    assert run.outputs[0].splitlines()[-1] == "ValueError: a fault of the test"


def test_too_little_shared_memory_for_all_ranks_of_the_node(config: Path, tmp_path: Path) -> None:
    patch = f"{PATCHES}:little_shared_memory"
    run = train(config, tmp_path / "run", *SETTINGS, world=2, patch=patch, last_sec=30)
    assert run.codes == [2, 2]
    for output in run.outputs:
        assert re.search(r"/dev/shm of .+: 0\.0 MiB free, expected at least .* 2 processes of this node", output)
        assert "data.num_workers=1" in output and "Traceback" not in output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
@pytest.mark.parametrize(
    ("size", "code", "words"),
    [
        ("64k", 2, r"/dev/shm of .+: 0\.1 MiB free, expected at least 0\.1 MiB: .*docker run --shm-size=SIZE"),
        ("256k", 3, r"after step \d: a batch of 2112 bytes could not be put into /dev/shm \(.*No space left on device"),
    ],
)
def test_a_small_shared_memory(size: str, code: int, words: str, config: Path, tmp_path: Path) -> None:
    """Refused at the start where it is too small, and the end at once of a run where others fill it."""
    run = train(config, tmp_path / "run", *SETTINGS, patch=f"{PATCHES}:own_shared_memory", SIZE=size)
    assert run.codes == [code], run.outputs[0]
    assert re.search(words, run.outputs[0]), run.outputs[0]


@pytest.mark.torture
@pytest.mark.parametrize(("victim", "expected"), [("rank", {-9: 5}), ("loader", {3: 5, 0: 0})])
def test_deaths_at_random_moments(victim: str, expected: dict[int, int], config: Path, tmp_path: Path) -> None:
    """`expected`: the code of the rank that is killed, or whose loader process is, and with it that of the other."""
    generator = random.Random(victim)
    for number in range(12):
        rank, sec = generator.randrange(2), generator.uniform(0.2, 3.0)
        run = train(
            config, tmp_path / f"run{number}", *SETTINGS, "train.max_steps=30", "parallel.rendezvous_sec=5", world=2,
            patch=f"{PATCHES}:die_after", last_sec=40, FAULTY_RANK=str(rank), VICTIM=victim, SEC=str(sec),
        )  # fmt: skip
        own, other = run.codes[rank], run.codes[1 - rank]
        assert own in expected and other == expected[own], f"{sec} s: {run.codes}\n" + "\n".join(run.outputs)
