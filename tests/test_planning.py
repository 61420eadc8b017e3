"""Estimates of pretrain/planning.py and pretrain/memory.py against draws, simulated schedules and measured bytes."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pretrain.accounting import StepWork, count_parameters
from pretrain.config.families import make_model_config
from pretrain.config.load import load_config
from pretrain.config.model import Family
from pretrain.config.schema import Config, LossConfig, ParallelConfig, TrainConfig, ZeroConfig
from pretrain.memory import activation_memory, peak_memory
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.planning import Plan, checkpoint_bytes, expected_work
from pretrain.sampling import Depths, DepthSampler
from pretrain.sampling.plan import LoopPlan

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def shipped(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


# ------------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("objective", ["terminal", "per_loop", "last_third"])
@pytest.mark.parametrize("distribution", ["poisson", "lognormal_poisson", "uniform", "fixed"])
@pytest.mark.parametrize("sampled_loops", ["all", "no_grad"])
def test_expected_work_is_the_mean_of_draws(sampled_loops: str, distribution: str, objective: str) -> None:
    name = "model.recurrence."
    loops = [f"{name}distribution={distribution}", f"{name}sampled_loops={sampled_loops}", f"{name}backprop_loops=6"]
    cfg = shipped("parcae_140m", *loops, f"loss.objective={objective}")
    sampler = DepthSampler.from_config(cfg.model.recurrence, seed=0, global_batch_size=cfg.train.global_batch_size)
    draws = [sampler.draw(step) for step in range(40)]
    works = [StepWork.of(d.no_grad_loops.tolist(), d.grad_loops.tolist(), objective) for d in draws]
    for field in dataclasses.fields(StepWork):
        drawn = np.mean([getattr(work, field.name) for work in works])
        assert getattr(expected_work(cfg), field.name) == pytest.approx(drawn, rel=5e-3), field.name


def test_a_row_with_depths_per_token_runs_to_its_deepest_token() -> None:
    cfg = shipped("tiny", "model.recurrence.granularity=token", "train.global_batch_size=16")
    sampler = DepthSampler.from_config(cfg.model.recurrence, seed=0, global_batch_size=16)
    draws = [sampler.draw_tokens(step, cfg.model.context_length) for step in range(20)]
    deepest = np.mean([draw.no_grad_loops.max(1).sum() for draw in draws])
    assert expected_work(cfg).no_grad_loops == pytest.approx(deepest, rel=0.05)
    cfg.model.recurrence.backprop_loops, cfg.loss.objective = 8, "last_third"
    rows = [Depths.truncated(draw.num_loops, 8).of_deepest_token() for draw in draws]
    works = [StepWork.of(r.no_grad_loops, r.grad_loops, "last_third", per_token=True) for r in rows]
    assert expected_work(cfg).readouts == pytest.approx(np.mean([work.readouts for work in works]), rel=0.05)


# ----------------------------------------------------------------------------------------------------------- memory


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes of tensors alive at once, those in `known` aside."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.references: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in self.references:
            return

        def forget(_: Any) -> None:
            del self.references[key]
            self.live -= size

        self.references[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input for backward and nothing else, as the CUDA kernel does; the CPU's keeps more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), None if weight is None else torch.zeros_like(weight)


def measured_peak(cfg: Config, grad_loops: int) -> int:
    """Bytes alive at the peak of one micro-batch, beside parameters and their gradients."""
    model = LoopedLM(cfg.model)
    model.checkpointing = cfg.train.activation_checkpointing
    model.loops_per_checkpoint = cfg.train.checkpoint_every_loops
    rows = cfg.train.micro_batch_size
    tokens, places = torch.zeros(rows, cfg.model.context_length, dtype=torch.long), torch.arange(rows)
    depths = Depths(np.full(rows, 1), np.full(rows, grad_loops))
    loops = Loops.of(LoopPlan.from_depths(depths), depths)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    batch, key = MicroBatch(tokens, tokens, places), StateKey(0, 0, places)
    with PeakBytes([tensor for p in parameters for tensor in (p, p.grad)]) as meter:
        model.training_loss(batch, loops, key, cfg.loss, Totals(1.0, 1.0)).loss.backward()
    return meter.peak


def small(family: Family, policy: Any, grad_loops: int, **settings: Any) -> Config:
    recurrence = {"mean_loops": 2 * grad_loops, "backprop_loops": grad_loops}
    sizes: dict[str, Any] = {"vocab_size": 512, "context_length": 128, "width": 128, "num_heads": 4, "ffn_width": 512}
    return Config(
        model=make_model_config(family, recurrence, **sizes | {"core_layers": 2} | settings),
        loss=LossConfig(chunk_tokens=128),
        train=TrainConfig(
            max_steps=1, global_batch_size=8, micro_batch_size=4, precision="fp32", activation_checkpointing=policy
        ),
    )


@pytest.mark.parametrize("policy", ["none", "loop", "every_k_loops", "layer"])
@pytest.mark.parametrize("family, dropout", [("parcae", 0.0), ("rdm", 0.0), ("flt", 0.0), ("parcae", 0.1)])
def test_activation_memory_is_what_a_micro_batch_takes(
    family: Family, dropout: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: FusedNorm.apply(x, weight))
    cfg = small(family, policy, grad_loops=4, dropout=dropout)
    measured, estimate = measured_peak(cfg, 4), sum(activation_memory(Plan(cfg, 1)).values())
    assert 0.95 * measured < estimate < 1.25 * measured


def test_sixteen_loops_take_the_memory_of_four_and_their_states() -> None:
    """With policy `loop` each further loop keeps one state: rows x tokens x width x bytes."""
    few, many = (measured_peak(small("parcae", "loop", loops), loops) for loops in (4, 16))
    states = 16 * 4 * 128 * 128 * 4
    assert many <= 1.3 * few + states
    assert many - few == pytest.approx(12 / 16 * states, rel=0.02)


def test_zero_shards_what_its_stage_says() -> None:
    numel = count_parameters(shipped("parcae_1b3").model).stored
    for stage, whole in ((1, ("parameters", "gradients")), (2, ("parameters",)), (3, ())):
        parts = peak_memory(Plan(shipped("parcae_1b3", f"zero.stage={stage}", "optimizer.name=adamw"), 8))
        for name in ("parameters", "gradients"):
            assert parts[name] == 4 * numel / (1 if name in whole else 8)
        assert parts["optimizer state"] == 8 * numel / 8


def test_muon_keeps_one_moment() -> None:
    cfg = shipped("parcae_140m")
    stored, layers = count_parameters(cfg.model).stored, 6 * 12 * 768**2
    assert checkpoint_bytes(cfg) == 12 * stored - 4 * layers


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (1, 8)])
def test_ranks_hold_the_model_between_them(tensor: int, pipeline: int) -> None:
    cfg = shipped("parcae_1b3")
    cfg.parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    plan = Plan(cfg, tensor * pipeline)
    whole = Plan(shipped("parcae_1b3"), 1).parameters_of(0)
    for name in whole:
        holders = [held[name] for held in map(plan.parameters_of, range(pipeline)) if name in held]
        tied = name == "embedding.weight" and pipeline > 1
        assert len(holders) == (2 if tied else 1), name
        assert holders[0] in (whole[name], whole[name] // tensor), name


# --------------------------------------------------------------------------------------- communication and schedule


def test_gradients_and_parameters_cross_the_data_ranks_once_a_step() -> None:
    numel = count_parameters(shipped("parcae_140m").model).stored
    assert Plan(shipped("parcae_140m"), 1).communication() == {"zero": 0}
    assert Plan(shipped("parcae_140m"), 8).communication() == {"zero": 2 * 4 * numel * 7 / 8}
    two = shipped("parcae_140m")
    two.zero = ZeroConfig(stage=2)
    assert Plan(two, 8).communication() == {"zero": (2 + 1) * 4 * numel * 7 / 8}  # 2 micro-batches


def test_tensor_ranks_exchange_activations_in_every_pass() -> None:
    cfg = shipped("flt_base")
    cfg.parallel = ParallelConfig(tensor=2)
    tokens, width = 512 * 1024, 768
    # Per layer and loop: attention and MLP, forward, backward and recomputed; the gradient of the fed-back state.
    all_reduces = 12 * 6 * (2 * 3 + 1) + 2
    assert Plan(cfg, 2).communication()["tensor"] == 2 * 1 / 2 * 2 * tokens * width * all_reduces


def simulated_slots(num_ranks: int, micro_batches: int, num_loops: int) -> int:
    """Duration of a forward-only phase in chunks: each rank takes micro-batches in groups of P, loop by loop."""
    order = [
        (micro_batch, loop)
        for group in range(0, micro_batches, num_ranks)
        for loop in range(num_loops)
        for micro_batch in range(group, group + num_ranks)
    ]
    ends: dict[tuple[int, int, int], int] = {}
    free = [0] * num_ranks
    for i in range(len(order)):
        for rank in range(num_ranks):
            micro_batch, loop = order[i]
            before = (rank - 1, micro_batch, loop) if rank else (num_ranks - 1, micro_batch, loop - 1)
            free[rank] = ends[rank, micro_batch, loop] = max(free[rank], ends.get(before, 0)) + 1
    return max(free)


@pytest.mark.parametrize(("num_ranks", "micro_batches", "num_loops"), [(2, 4, 3), (4, 8, 1), (4, 4, 6), (8, 16, 2)])
def test_bubble_is_that_of_the_circular_schedule(num_ranks: int, micro_batches: int, num_loops: int) -> None:
    slots = simulated_slots(num_ranks, micro_batches, num_loops)
    loops = [f"model.recurrence.{key}={num_loops}" for key in ("mean_loops", "backprop_loops")]
    cfg = shipped("flt_base", "model.core_layers=16", *loops)
    cfg.parallel = ParallelConfig(pipeline=num_ranks)
    cfg.train.micro_batch_size = cfg.train.global_batch_size // micro_batches
    assert Plan(cfg, num_ranks).bubble == pytest.approx(1 - micro_batches * num_loops / slots)


def test_time_adds_bubble_and_imbalance_to_the_given_mfu() -> None:
    alone = Plan(shipped("flt_base"), 4)
    assert alone.bubble == 0 and alone.balance == 1
    piped = Plan(shipped("flt_base_pp2"), 4)
    assert 0 < piped.bubble < 0.05 and 0.8 < piped.balance < 0.9  # the head is as large as the core
    assert piped.step_sec(1e15, 0.4) == pytest.approx(alone.step_sec(1e15, 0.4) / ((1 - piped.bubble) * piped.balance))
