"""Faults that a run is started with; each function is called in every process before the entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch

from pretrain.model.layers import Layer
from pretrain.model.looped import LoopedLM
from pretrain.parallel import zero
from pretrain.sampling import Depths, DepthSampler
from pretrain.train.signals import StopSignals
from pretrain.train.step import StepReport, StepRunner


def before_step(step: int, action: Callable[[], None], rank: int = 0) -> None:
    """Calls `action` on `rank` where it begins the step, counted from 1."""
    original = StepRunner.run

    def run(self: StepRunner, number: int, *args: Any, **kwargs: Any) -> StepReport:
        if number + 1 == step and int(os.environ["RANK"]) == rank:
            action()
        return original(self, number, *args, **kwargs)

    StepRunner.run = run  # type: ignore[method-assign]


def _fail() -> None:
    raise ValueError("a fault of the test")


def fail_in_step_6() -> None:
    """On rank 0."""
    before_step(6, _fail)


def fail_in_step_3_on_the_last_rank() -> None:
    """While the others go on to the step's collectives."""
    before_step(3, _fail, rank=int(os.environ.get("WORLD_SIZE", "1")) - 1)


def fail_in_the_core_in_step_3_on_the_last_rank() -> None:
    """In the middle of a step, while the others are in its collectives."""
    forward = Layer.forward

    def fail(*_: Any, **__: Any) -> None:
        Layer.forward = forward  # type: ignore[method-assign]
        _fail()

    def plant() -> None:
        Layer.forward = fail  # type: ignore[method-assign, assignment]

    before_step(3, plant, rank=int(os.environ["WORLD_SIZE"]) - 1)


def draw_other_depths_in_step_3_on_the_last_rank() -> None:
    """As another version of numpy would."""
    draw = DepthSampler.draw

    def other(self: DepthSampler, step: int) -> Depths:
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        return draw(self, step + 1 if step + 1 == 3 and last else step)

    DepthSampler.draw = other  # type: ignore[method-assign]


def partition_small_parameters() -> None:
    """Stage 3 shards those of a small model too."""
    zero.PERSISTENT_ELEMENTS = 20


def stop_after_step_3_on_rank_1() -> None:
    """Rank 1 alone asks to stop, from step 3 on."""
    polls = 0

    def asked(self: StopSignals) -> str | None:
        nonlocal polls
        polls += 1
        return "a wish of the test" if polls >= 3 and os.environ["RANK"] == "1" else None

    StopSignals.stop_requested = asked  # type: ignore[method-assign]


def require_deterministic() -> None:
    """The run fails in step 1 unless torch refuses kernels that are not deterministic."""

    def check() -> None:
        assert torch.are_deterministic_algorithms_enabled()

    before_step(1, check)


def wandb_absent() -> None:
    """As where it is not installed."""
    sys.modules["wandb"] = None  # type: ignore[assignment]


def fake_wandb() -> None:
    """The package in tests/train/fakes, whose behaviour FAKE_WANDB names."""
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "fakes"))


def compile_without_kernels() -> None:
    """torch.compile traces as ever and runs the graphs op by op: what it makes of them takes minutes on a CPU."""
    LoopedLM.compile_core = partialmethod(LoopedLM.compile_core, backend="aot_eager")  # type: ignore[method-assign]
