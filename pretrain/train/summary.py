"""The start-up summary: numbers that follow from the configuration."""

from __future__ import annotations

from torch import nn

from pretrain.accounting import StepWork, count_parameters, hardware_flops, model_flops, parameter_table
from pretrain.config.schema import Config
from pretrain.sampling import DepthSampler

_STATE_BYTES = {"adamw": 8, "muon": 4}


def checkpoint_bytes(cfg: Config) -> int:
    """Bytes of one checkpoint: fp32 weights, and two fp32 moments (AdamW) or one momentum (Muon) for each."""
    muon = muon_parameters(cfg)
    stored = count_parameters(cfg.model).stored
    return stored * 4 + muon * _STATE_BYTES["muon"] + (stored - muon) * _STATE_BYTES["adamw"]


def muon_parameters(cfg: Config) -> int:
    """Parameters that Muon updates."""
    if cfg.optimizer.name != "muon":
        return 0
    return sum(p.numel for p in parameter_table(cfg.model).values() if p.muon)


def summary(cfg: Config, model: nn.Module, world_size: int) -> str:
    """A page of derived numbers. `model` may be on the meta device; it confirms the parameter count."""
    counted = count_parameters(cfg.model)
    built = sum(p.numel() for p in model.parameters())
    assert built == counted.stored or cfg.parallel.tensor * cfg.parallel.pipeline > 1, (built, counted.stored)
    recurrence, loops = cfg.model.recurrence, cfg.model.recurrence.default_loops
    sampler = DepthSampler.from_config(recurrence, seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size)
    no_grad, grad = sampler.expected_loops(cfg.total_steps)
    work = StepWork.of([round(no_grad)], [max(1, round(grad))], cfg.loss.objective)
    per_token = model_flops(cfg.model, work) / cfg.model.context_length
    hardware = hardware_flops(cfg, work) / cfg.model.context_length
    tensor, pipeline = cfg.parallel.tensor, cfg.parallel.pipeline
    data = max(1, world_size // (tensor * pipeline))
    lines = {
        "run": f"{cfg.run.dir}/{cfg.run.name}",
        "model": f"{cfg.model.family}, P/R/C {cfg.model.prelude_layers}/{cfg.model.core_layers}/"
        f"{cfg.model.coda_layers}, width {cfg.model.width}, vocabulary {cfg.model.padded_vocab_size:,}",
        "parameters": f"{counted.stored:,} stored, {round(counted.effective(loops)):,} effective at {loops} loops",
        "loops": f"mean {recurrence.mean_loops:g} ({recurrence.distribution}, per {recurrence.granularity}): "
        f"{no_grad:.2f} without + {grad:.2f} with gradient",
        "batch": f"{cfg.train.global_batch_size} rows x {cfg.model.context_length} tokens = "
        f"{cfg.tokens_per_step:,} tokens per step, micro-batches of {cfg.train.micro_batch_size}",
        "length": f"{cfg.total_steps:,} steps, {cfg.total_steps * cfg.tokens_per_step:,} tokens",
        "compute": f"{per_token / 1e9:.4g} GFLOP per token ({hardware / 1e9:.4g} with recomputation), "
        f"{per_token * cfg.tokens_per_step * cfg.total_steps:.3g} FLOP in all",
        "layout": f"{world_size} processes = tensor {tensor} x pipeline {pipeline} x data {data}, "
        f"ZeRO {max(1, cfg.zero.stage)}",
        "precision": f"{cfg.train.precision} products; fp32 parameters, gradients and optimizer state",
        "optimizer": f"{cfg.optimizer.name}, {cfg.schedule.name} schedule",
        "checkpoint": f"{checkpoint_bytes(cfg) / 2**20:,.1f} MiB",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())
