"""Counts and FLOPs of pretrain/accounting.py against the model itself and torch's FlopCounterMode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.accounting import (
    StepWork,
    count_parameters,
    device_peak_flops,
    forward_flops,
    hardware_flops,
    model_flops,
    parameter_table,
    utilization,
)
from pretrain.config.families import make_model_config
from pretrain.config.load import load_config
from pretrain.config.model import Family, ModelConfig
from pretrain.config.schema import Config, LossConfig, TrainConfig
from pretrain.model import loss
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.model.ops import TensorOps
from pretrain.sampling.plan import LoopPlan
from pretrain.sampling.sampler import Depths

FAMILIES: tuple[Family, ...] = get_args(Family)
CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))
# Attention is a third of a layer's FLOPs here, and the head does not drown the rest.
SIZES: dict[str, Any] = {"vocab_size": 250, "context_length": 192, "width": 64, "num_heads": 2, "ffn_width": 256}
LAYERS = {"prelude_layers": 1, "core_layers": 1, "coda_layers": 1}


def small(family: Family, **settings: Any) -> ModelConfig:
    """One layer in each part. `lt` has two in the core: the first product of its first gradient loop gives no gradient
    to its input, which the convention of 4 N ignores."""
    bare = family in ("blindspot", "flt", "flt_res") or family.startswith("lt")
    layers = {"core_layers": 2 if family == "lt" else 1} if bare else LAYERS
    return make_model_config(family, **SIZES | layers | settings)


# ------------------------------------------------------------------------------------------------------- parameters

SHAPES = [pytest.param(small(family), id=family) for family in FAMILIES] + [
    pytest.param(small("parcae", num_kv_heads=1, core_layers=3, qk_bias=True), id="grouped heads"),
    pytest.param(small("parcae", core_width=128, core_ffn_width=96), id="core width"),
    pytest.param(small("parcae", core_num_heads=4, num_heads=4, head_dim=8, norm_weight=False), id="own heads"),
    pytest.param(make_model_config("rdm", {"readout": "raw", "interloop_norm": True}, **SIZES), id="rdm variant"),
    pytest.param(make_model_config("blindspot", {"readout": "raw"}, **SIZES, tie_embeddings=False), id="raw, untied"),
]


def assert_same_parameters(cfg: ModelConfig) -> None:
    with torch.device("meta"):
        model = LoopedLM(cfg)
    table = parameter_table(cfg)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {n: p.shape for n, p in table.items()}
    assert {name for name, p in model.named_parameters() if p.use_muon} == {n for n, p in table.items() if p.muon}
    assert count_parameters(cfg).stored == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("cfg", SHAPES)
def test_table_is_the_model(cfg: ModelConfig) -> None:
    assert_same_parameters(cfg)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_table_is_the_model_of_shipped_configurations(path: Path) -> None:
    assert_same_parameters(load_config(path).model)


@pytest.mark.parametrize("family", FAMILIES)
def test_table_knows_what_tensor_parallelism_shards(family: Family) -> None:
    cfg, ops = small(family), TensorOps()
    ops.size = 2
    with torch.device("meta"):
        model = LoopedLM(cfg, ops)
    table = parameter_table(cfg)
    for name, p in model.named_parameters():
        assert p.tensor_partition_dim == table[name].partition_dim, name
        assert p.numel() == table[name].numel // (1 if table[name].partition_dim is None else 2), name


def test_effective_parameters_are_those_of_the_unrolled_model() -> None:
    looped_count = count_parameters(small("blindspot", core_layers=2))
    unrolled_count = count_parameters(small("blindspot", core_layers=6))
    assert looped_count.effective(3) == unrolled_count.stored


# ------------------------------------------------------------------------------------------------------------ FLOPs


class _NoModules(contextlib.nullcontext[None]):
    """In place of the counter's module tracker, which fails on the views that loops without gradient take."""

    parents = ("Global",)


@pytest.fixture
def plain_head(monkeypatch: pytest.MonkeyPatch) -> LossConfig:
    """A loss whose head is not recomputed and whose products the counter sees: the z-loss avoids the fused head."""
    monkeypatch.setattr(loss, "checkpoint", lambda function, *args, **_: function(*args))
    return LossConfig(z_loss=1e-4)


def counted_flops(cfg: Config, no_grad_loops: int, grad_loops: int, rows: int = 1) -> int:
    """FLOPs that torch counts in one training step with unfused attention."""
    model = LoopedLM(cfg.model)
    model.checkpointing = cfg.train.activation_checkpointing
    model.loops_per_checkpoint = cfg.train.checkpoint_every_loops
    tokens, places = torch.zeros(rows, cfg.model.context_length, dtype=torch.long), torch.arange(rows)
    depths = Depths(np.full(rows, no_grad_loops), np.full(rows, grad_loops))
    loops = Loops.of(LoopPlan.from_depths(depths), depths)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    with sdpa_kernel(SDPBackend.MATH), counter:
        batch = MicroBatch(tokens, tokens, places)
        model.training_loss(batch, loops, StateKey(0, 0, places), cfg.loss, Totals(1.0, 1.0)).loss.backward()
    return counter.get_total_flops()


def config(model: ModelConfig, loss_cfg: LossConfig | None = None, **train: Any) -> Config:
    return Config(model=model, loss=loss_cfg or LossConfig(), train=TrainConfig(max_steps=1, **train))


# A gpt runs its layers once: with loops and no injection, loops without gradient would cut off its prelude.
CASES = [(family, n) for family in FAMILIES for n in (0, 4) if (family, n) != ("gpt", 4)]


@pytest.mark.parametrize(("family", "no_grad_loops"), CASES)
def test_model_flops_are_those_that_torch_counts(family: Family, no_grad_loops: int, plain_head: LossConfig) -> None:
    cfg = config(small(family), plain_head, activation_checkpointing="none")
    for grad_loops in (1, 4, 8):
        work = StepWork.of([no_grad_loops], [grad_loops], "terminal")
        counted = counted_flops(cfg, no_grad_loops, grad_loops)
        assert model_flops(cfg.model, work, halve_attention=False) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    "settings",
    [{"num_kv_heads": 1}, {"core_width": 128}, {"mlp": "swiglu", "core_layers": 3}, {"tie_embeddings": False}],
    ids=str,
)
def test_model_flops_of_other_shapes(settings: dict[str, Any], plain_head: LossConfig) -> None:
    cfg = config(small("parcae", **settings), plain_head, activation_checkpointing="none")
    work = StepWork.of([1, 1], [2, 2], "terminal")
    counted = counted_flops(cfg, 1, 2, rows=2)
    assert model_flops(cfg.model, work, halve_attention=False) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("policy", ["none", "loop", "layer", "every_k_loops"])
@pytest.mark.parametrize(("family", "objective"), [("parcae", "terminal"), ("rdm", "per_loop")])
def test_hardware_flops_are_those_that_torch_counts(family: Family, policy: str, objective: Any) -> None:
    # The z-loss takes the chunked head, which is recomputed; the fused one is invisible to the counter.
    chunked = LossConfig(objective=objective, z_loss=1e-4)
    cfg = config(small(family), chunked, activation_checkpointing=policy, checkpoint_every_loops=2)
    work = StepWork.of([1], [4], objective)
    counted = counted_flops(cfg, 1, 4)
    assert hardware_flops(cfg, work, halve_attention=False) == pytest.approx(counted, rel=5e-3)
    assert counted > model_flops(cfg.model, work, halve_attention=False)


def test_fused_head_of_fp32_is_not_recomputed() -> None:
    fused, chunked = (
        config(small("parcae"), activation_checkpointing="none", precision=precision)
        for precision in ("fp32", "bf16")
    )
    work = StepWork.of([0], [2], "terminal")
    assert hardware_flops(fused, work) == model_flops(fused.model, work)
    assert hardware_flops(chunked, work) > model_flops(chunked.model, work)


def test_a_pipeline_encodes_once_more_where_loops_run_without_gradient() -> None:
    alone, piped = (config(small("parcae"), activation_checkpointing="none") for _ in range(2))
    piped.parallel.pipeline = 2
    encode = 2 * piped.model.context_length * forward_flops(piped.model).encode
    work = StepWork.of([1, 4], [2, 2], "terminal")
    assert hardware_flops(piped, work) - hardware_flops(alone, work) == pytest.approx(encode)
    without = StepWork.of([0, 0], [2, 2], "terminal")
    assert hardware_flops(piped, without) == hardware_flops(alone, without)


@pytest.mark.parametrize("window", [None, 32, 192, 1_000])
def test_reported_attention_counts_visible_keys(window: int | None) -> None:
    # Two equal bare layers, of which the first slides.
    cfg = small("flt", core_layers=2, sliding_window=window)
    length, channels = cfg.context_length, cfg.num_heads * cfg.head_channels
    seen = [np.minimum(np.arange(length) + 1, keys).mean() for keys in (window or length, length)]
    reported = forward_flops(cfg).loop - forward_flops(small("flt", core_layers=2, context_length=1)).loop
    assert reported == pytest.approx(4 * channels * sum(seen), rel=0.02)


def test_attention_is_18_per_cent_of_a_140m_layer() -> None:
    cfg = load_config(CONFIGS[0].parent / "parcae_140m.yaml").model
    products = sum(2 * p.numel for name, p in parameter_table(cfg).items() if name.startswith("core.") and p.muon)
    assert 1 - products / forward_flops(cfg).loop == pytest.approx(0.18, abs=0.005)


def test_work_counts_rows_loops_and_readouts() -> None:
    no_grad, grad = [0, 0, 5], [1, 3, 4]
    assert StepWork.of(no_grad, grad, "terminal") == StepWork(3, 5, 8, 3)
    assert StepWork.of(no_grad, grad, "per_loop") == StepWork(3, 5, 8, 8)
    assert StepWork.of(no_grad, grad, "last_third") == StepWork(3, 5, 8, 1 + 1 + 2)
    assert StepWork.of(no_grad, grad, "last_third", per_token=True) == StepWork(3, 5, 8, 1 + 1 + 2)
    assert StepWork.of([0], [9], "last_third", per_token=True) == StepWork(1, 0, 9, 7)


def test_a_loop_without_gradient_costs_a_third() -> None:
    cfg = small("parcae")
    cost: Callable[[int, int], float] = lambda n, k: model_flops(cfg, StepWork(1, n, k, 1))  # noqa: E731
    assert cost(4, 4) - cost(1, 4) == pytest.approx(cost(0, 5) - cost(0, 4))


# ------------------------------------------------------------------------------------------------------ utilisation


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A100 80GB PCIe", 311.9),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2_250.0),
        ("NVIDIA GB200", 2_500.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L40", 181.1),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
    ],
)
def test_peaks_by_device_name(name: str, tflops: float | None) -> None:
    peak = device_peak_flops(name)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_utilization_is_unknown_where_the_peak_is() -> None:
    assert utilization(8e15, sec=2.0, num_devices=8, peak_flops=1e15) == pytest.approx(0.5)
    assert utilization(8e15, sec=2.0, num_devices=8, peak_flops=None) is None
