"""The start-up summary: numbers that follow from the configuration."""

from __future__ import annotations

from torch import nn

from pretrain.accounting import count_parameters, hardware_flops, model_flops
from pretrain.config.schema import Config
from pretrain.memory import peak_memory
from pretrain.planning import Plan, checkpoint_bytes


def summary(cfg: Config, model: nn.Module, world_size: int) -> str:
    """A page of derived numbers. `model` may be on the meta device; it confirms the parameter count."""
    counted = count_parameters(cfg.model)
    built = sum(p.numel() for p in model.parameters())
    assert built == counted.stored or cfg.parallel.tensor * cfg.parallel.pipeline > 1, (built, counted.stored)
    recurrence, loops = cfg.model.recurrence, cfg.model.recurrence.default_loops
    plan = Plan(cfg, world_size)
    no_grad, grad = plan.loops_per_row
    model_work, hardware_work = model_flops(cfg.model, plan.work), hardware_flops(cfg, plan.work)
    memory = max(sum(peak_memory(plan, rank).values()) for rank in range(cfg.parallel.pipeline))
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
        "compute": f"{model_work / cfg.tokens_per_step / 1e9:.4g} GFLOP per token "
        f"({hardware_work / cfg.tokens_per_step / 1e9:.4g} with recomputation), "
        f"{model_work * cfg.total_steps:.3g} FLOP in all",
        "validation": _validation(cfg),
        "layout": f"{world_size} processes = tensor {tensor} x pipeline {pipeline} x data {data}, "
        f"ZeRO {max(1, cfg.zero.stage)}",
        "precision": f"{cfg.train.precision} products; fp32 parameters, gradients and optimizer state",
        "optimizer": f"{cfg.optimizer.name}, {cfg.schedule.name} schedule",
        "memory": f"{memory / 2**30:.2f} GiB per GPU expected (tools/estimate.py shows the parts)",
        "checkpoint": f"{checkpoint_bytes(cfg) / 2**20:,.1f} MiB",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def _validation(cfg: Config) -> str:
    if cfg.validation.rows == 0:
        return "none (validation.rows=0): no validation loss, no probe of the state; tools that compare losses need one"
    every = cfg.validation.every_steps
    return f"{cfg.validation.rows} rows " + ("at the end" if every is None else f"every {every:,} steps and at the end")
