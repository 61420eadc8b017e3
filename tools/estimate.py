"""Prints what a configuration costs: parameters, FLOPs, memory per GPU by part, communication, bubble and time.

    python -m tools.estimate configs/parcae_1b3.yaml parallel.tensor=2 --gpus 16 --peak-tflops 989 --mfu 0.4

Overrides are those of pretrain/main.py. Needs neither torch nor the data. Formulas: docs/accounting.md. A refused
configuration or layout ends it with exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from pretrain.accounting import count_parameters, device_peak_flops, hardware_flops, model_flops
from pretrain.arguments import integer, number
from pretrain.config.bounds import require
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.memory import peak_memory
from pretrain.planning import Plan, checkpoint_bytes

GIB = 2**30
DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"
WIDTH = 30  # of the first column


def main(argv: Sequence[str]) -> int:
    """Prints the page; returns 2 with a message where the configuration or the layout is refused."""
    default_peak = device_peak_flops(DEFAULT_DEVICE)
    assert default_peak is not None
    parser = argparse.ArgumentParser(prog="estimate", description=__doc__, allow_abbrev=False)
    parser.add_argument("config", help="YAML file")
    parser.add_argument(
        "--gpus", type=integer(most=10**6), help="GPUs of the run (default: parallel.tensor x parallel.pipeline)",
    )  # fmt: skip
    parser.add_argument(
        "--peak-tflops", type=number(most=10**9), default=default_peak / 1e12,
        help=f"dense bf16 peak of a GPU (default: %(default)g, {DEFAULT_DEVICE})",
    )  # fmt: skip
    parser.add_argument(
        "--mfu", type=number(), default=0.4, help="MFU of a GPU while it computes (default: %(default)g)",
    )  # fmt: skip
    args, overrides = parser.parse_known_args(argv)
    try:
        require(0 < args.mfu <= 1, "--mfu", args.mfu, "a share in (0, 1], such as 0.4")
        require(args.peak_tflops > 0, "--peak-tflops", args.peak_tflops, "TFLOP/s of one GPU, > 0")
        cfg = load_config(args.config, overrides)
        num_gpus = cfg.parallel.tensor * cfg.parallel.pipeline if args.gpus is None else args.gpus
        require(num_gpus >= 1, "--gpus", num_gpus, "an integer >= 1")
        validate(cfg, num_gpus)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print("\n".join(page(Plan(cfg, num_gpus), args.peak_tflops * 1e12, args.mfu)))
    return 0


def page(plan: Plan, peak_flops: float, mfu: float) -> list[str]:
    """The lines of the page."""
    sections = [_parameters(plan.cfg), _flops(plan), _memory(plan), _communication(plan), _time(plan, peak_flops, mfu)]
    return [*_heading(plan), *(line for section in sections for line in ("", *section))]


def _row(name: str, *columns: str) -> str:
    return f"{name:<{WIDTH}}" + "".join(f"{column:>20}" for column in columns)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes else "-"


def _heading(plan: Plan) -> Iterator[str]:
    cfg, model, parallel = plan.cfg, plan.cfg.model, plan.cfg.parallel
    no_grad, grad = plan.loops_per_row
    yield (
        f"{cfg.run.name}: {model.family}, P/R/C {model.prelude_layers}/{model.core_layers}/{model.coda_layers}, width "
        f"{model.width}, vocabulary {model.padded_vocab_size:,}, context {model.context_length:,}"
    )
    yield (
        f"loops per row: {no_grad + grad:.2f} on average ({model.recurrence.distribution}), {no_grad:.2f} without and "
        f"{grad:.2f} with gradient"
    )
    yield (
        f"layout: {plan.num_gpus} GPUs = tensor {parallel.tensor} x pipeline {parallel.pipeline} x data "
        f"{plan.data_ranks}, ZeRO {max(1, cfg.zero.stage)}; {plan.micro_batches} micro-batches of "
        f"{cfg.train.micro_batch_size} rows per GPU; {cfg.train.precision}, checkpointing "
        f"{cfg.train.activation_checkpointing}"
    )


def _parameters(cfg: Config) -> Iterator[str]:
    count, loops = count_parameters(cfg.model), cfg.model.recurrence.default_loops
    yield "Parameters"
    for part, numel in count.parts.items():
        if numel:
            yield _row(f"  {part.replace('_', ' ')}", f"{numel:,}")
    yield _row("  stored", f"{count.stored:,}")
    yield _row("  recurrent", f"{count.recurrent:,}")
    yield _row(f"  effective at {loops} loops", f"{count.effective(loops):,}")
    yield _row("  checkpoint, GiB", f"{checkpoint_bytes(cfg) / GIB:,.2f}")


def _flops(plan: Plan) -> Iterator[str]:
    cfg, work = plan.cfg, plan.work
    model, hardware = model_flops(cfg.model, work), hardware_flops(cfg, work)
    yield _row("FLOPs", "model", "with recomputation")
    for name, divisor in ((f"  per token ({cfg.tokens_per_step:,} per step)", cfg.tokens_per_step), ("  per step", 1)):
        yield _row(name, f"{model / divisor:.4g}", f"{hardware / divisor:.4g}")
    yield _row(f"  run of {cfg.total_steps:,} steps", *(f"{x * cfg.total_steps:.4g}" for x in (model, hardware)))


def _memory(plan: Plan) -> Iterator[str]:
    ranks = range(plan.cfg.parallel.pipeline)
    memories = [peak_memory(plan, rank) for rank in ranks]
    yield _row("Memory per GPU, GiB", *([f"pipeline rank {rank}" for rank in ranks] if len(ranks) > 1 else []))
    for name in dict.fromkeys(name for parts in memories for name in parts):
        if any(parts.get(name) for parts in memories):
            yield _row(f"  {name}", *(_gib(parts.get(name, 0)) for parts in memories))
    yield _row("  peak", *(_gib(sum(parts.values())) for parts in memories))


def _communication(plan: Plan) -> Iterator[str]:
    labels = {"zero": "ZeRO, data ranks", "tensor": "tensor ranks", "pipeline": "pipeline ranks"}
    yield "Sent per step by the busiest GPU, GiB"
    for name, sent in plan.communication().items():
        yield _row(f"  {labels[name]}", f"{sent / GIB:.2f}")


def _time(plan: Plan, peak_flops: float, mfu: float) -> Iterator[str]:
    cfg, step_sec = plan.cfg, plan.step_sec(peak_flops, mfu)
    hours = step_sec * cfg.total_steps / 3600
    yield f"Time at {mfu:.0%} MFU of {peak_flops / 1e12:,.4g} TFLOP/s per GPU"
    if cfg.parallel.pipeline > 1:
        yield _row("  pipeline bubble", f"{plan.bubble:.1%}")
        yield _row("  balance of pipeline ranks", f"{plan.balance:.1%}")
        yield _row("  MFU of the whole step", f"{mfu * (1 - plan.bubble) * plan.balance:.1%}")
    yield _row("  step, sec", f"{step_sec:.3g}")
    yield _row("  tokens per second", f"{cfg.tokens_per_step / step_sec:,.0f}")
    yield _row("  run, hours", f"{hours:,.1f}")
    yield _row("  run, GPU hours", f"{hours * plan.num_gpus:,.0f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
