"""Whole runs in every layout of four processes: what they log, validate, save, resume and generate; how they fail."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.train.forked import Run, train
from tests.train.test_launchers import arguments, launch, losses
from tests.train.test_run import assert_close, assert_same_checkpoint, determined
from tools.generate import generate
from tools.loading import load_model

PATCHES = "tests.train.patches"
LAYOUTS = {
    "dp4": ("zero.stage=0",),  # run as stage 1
    "dp4 ZeRO-2": ("zero.stage=2",),
    "dp4 ZeRO-3": ("zero.stage=3",),
    "tp2xdp2": ("parallel.tensor=2",),
    "tp2xdp2 ZeRO-2": ("parallel.tensor=2", "zero.stage=2"),
    "tp2xdp2 ZeRO-3": ("parallel.tensor=2", "zero.stage=3"),
    "tp2xdp2 sequence parallel": ("parallel.tensor=2", "parallel.sequence_parallel=true"),
    "tp4": ("parallel.tensor=4",),
    "pp2xdp2": ("parallel.pipeline=2",),
    "tp2xpp2": ("parallel.tensor=2", "parallel.pipeline=2"),
    "tp2xpp2 sequence parallel": ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence_parallel=true"),
    "pp4": ("parallel.pipeline=4",),
}
SETTINGS = (
    "model.num_heads=4", "model.core_layers=4", "model.recurrence.max_loops=5", "train.max_steps=4",
    "optimizer.name=muon", "optimizer.muon_lr=8e-3",
)  # fmt: skip


def some_layouts(*names: str) -> list[pytest.ParameterSet]:
    """All layouts; those that are not named are slow."""
    return [
        pytest.param(name, marks=() if name in names else pytest.mark.slow, id=name.replace(" ", "-"))
        for name in LAYOUTS
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run on one process."""
    return train(config, tmp_path_factory.mktemp("alone") / "run", *SETTINGS).check()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one whose words are the numbers of the tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.WordLevel({"<|bos|>": 0, **{str(i): i for i in range(1, 256)}}, unk_token="<|bos|>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|bos|>").save_pretrained(folder)
    return folder


def generated(run: Run, tokenizer: Path) -> list[list[int]]:
    """What the saved model goes on with after some tokens."""
    prompt = torch.arange(1, 13).view(3, 4)
    return generate(load_model(run.folder, tokenizer=tokenizer).model, prompt, 20, temperature=0).tolist()


@pytest.mark.parametrize("layout", some_layouts("tp2xpp2 sequence parallel"))
def test_losses_validation_resume_and_generation(
    layout: str, config: Path, tmp_path: Path, alone: Run, tokenizer: Path
) -> None:
    """As on one process; and 4 steps = 2 steps, a stop, and 2 more, bit for bit."""
    settings, patch = (*SETTINGS, *LAYOUTS[layout]), f"{PATCHES}:partition_small_parameters"
    straight = train(config, tmp_path / "straight", *settings, world=4, patch=patch).check()
    assert len(straight.column("val_loss")) == 2
    assert_close(straight, alone, 1e-5)
    stopped = train(config, tmp_path / "resumed", *settings, "train.stop_step=2", world=4, patch=patch).check()
    assert stopped.column("step")[-1] == 2
    resumed = train(config, tmp_path / "resumed", *settings, world=4, patch=patch).check()
    assert "resuming from" in resumed.log
    assert determined(resumed) == determined(straight)
    assert_same_checkpoint(resumed, straight)
    assert generated(straight, tokenizer) == generated(alone, tokenizer)
    assert ("zero.stage=0 is run as zero.stage=1" in straight.log) == (layout == "dp4")


FAULTY = {
    "dp2 ZeRO-1": (2, ()),
    "dp2 ZeRO-3": (2, LAYOUTS["dp4 ZeRO-3"]),
    "tp2": (2, LAYOUTS["tp2xdp2"]),
    "pp2": (2, LAYOUTS["pp2xdp2"]),
    "tp2xpp2": (4, LAYOUTS["tp2xpp2"]),
}


def some_faulty(*names: str) -> list[pytest.ParameterSet]:
    """As `some_layouts`, of those that faults are tried in."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in FAULTY]


@pytest.mark.parametrize("layout", some_faulty("tp2xpp2"))
def test_an_exception_in_the_core_of_one_rank_ends_all(layout: str, config: Path, tmp_path: Path) -> None:
    """Those that wait for it in collectives end by themselves, and name rank, host and step."""
    world, own = FAULTY[layout]
    begin = time.monotonic()
    patch = f"{PATCHES}:fail_in_the_core_in_step_3_on_the_last_rank"
    run = train(config, tmp_path / "run", *SETTINGS, *own, world=world, patch=patch, last_sec=60)
    assert time.monotonic() - begin < 60
    assert run.codes == [5] * (world - 1) + [1]
    for rank, output in enumerate(run.outputs):
        reason = "another rank failed" if rank < world - 1 else "Traceback"
        assert re.search(rf"error on rank {rank} \(.+\): after step 2: {reason}", output), output
    assert "ValueError: a fault of the test" in run.outputs[-1]


@pytest.mark.parametrize("layout", some_faulty("pp2"))
def test_other_depths_on_one_rank_end_all(layout: str, config: Path, tmp_path: Path) -> None:
    world, own = FAULTY[layout]
    begin = time.monotonic()
    patch = f"{PATCHES}:draw_other_depths_in_step_3_on_the_last_rank"
    run = train(config, tmp_path / "run", *SETTINGS, *own, world=world, patch=patch, last_sec=60)
    assert time.monotonic() - begin < 60
    assert run.codes == [5] * world
    for rank, output in enumerate(run.outputs):
        assert re.search(rf"error on rank {rank} \(.+\): after step 2: step 3: 1 of {world} ranks \(", output), output
        assert "Traceback" not in output


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["tp2xdp2 ZeRO-3", "tp2xpp2 sequence parallel", "pp4"])
def test_through_the_deepspeed_launcher(layout: str, config: Path, tmp_path: Path, alone: Run) -> None:
    own = arguments(config, tmp_path / "run", *SETTINGS, *LAYOUTS[layout])
    code, output = launch("deepspeed", *own, world=4)
    assert code == 0, output
    assert losses(tmp_path / "run") == pytest.approx(alone.column("loss"), rel=1e-5)
