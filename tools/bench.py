"""Ratios of step times: what compaction, hoisting, compilation, checkpointing and the chunked head gain or cost.

    python -m tools.bench [--rows 32] [--mean-loops 8] [--layers 2 2 2] [--width 256] [--vocab-size 8192] [--length 64]
    python -m tools.bench --set --out docs/benchmarks.md               (make bench)
    python -m tools.bench --cache                                      (the cache of generation alone)

On a GPU (bf16) also MFU and peak memory of parcae_140m and parcae_1b3 beside the plain GPTs of the same layers.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain.model.objective as objective
from pretrain.accounting import StepWork, device_peak_flops, forward_flops, model_flops, utilization
from pretrain.arguments import integer, number, pathname
from pretrain.config.families import make_model_config
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.schema import LossConfig
from pretrain.model.attention_mask import Context
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.init import init_parameters
from pretrain.model.looped import LoopedLM, LoopInputs
from pretrain.model.loss import HeadSettings, HeadSums, Totals, head_logits
from pretrain.model.ops import TensorOps
from pretrain.sampling import Depths, DepthSampler
from tools.bench_cache import cache_section
from tools.one_process import make_micro_batch

SEED = 0
BASE = "compact"
METHOD = """\
Written by `make bench`. All variants run in one process, in turns (A B C A B C ...), on the same draws of depths, so
that load from outside meets all of them alike. A figure is the median over rounds of time / time of `compact` in the
same round, with its quartiles: above 1 is slower. Load moves these ratios little; times are true for an idle machine
only.

`core` is the loops with what they start from, forward and backward; `step` is forward, backward and AdamW of the whole
model, all rows in one micro-batch. Variants:

- `compact`, the base: each row runs exactly its own loops; no recomputation.
- `masked`: every row passes the core in every loop of the micro-batch, and keeps its state where it waits.
- `recomputed`: drive and value embeddings are computed again in every loop instead of once.
- `compiled`: the core's step by torch.compile.
- `loop`, `layer`, `every_2_loops`: activation checkpointing.
- `plain head`: full logits and torch's cross entropy instead of chunks.
"""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Size:
    """What one table is about."""

    rows: int = 32
    mean_loops: float = 8.0
    layers: tuple[int, int, int] = (2, 2, 2)
    width: int = 256
    vocab_size: int = 8_192
    length: int = 64

    def model(self) -> ModelConfig:
        """A Parcae of this size, heads of 64 channels."""
        prelude, core, coda = self.layers
        return make_model_config(
            "parcae", {"mean_loops": self.mean_loops}, vocab_size=self.vocab_size, context_length=self.length,
            width=self.width, num_heads=max(1, self.width // 64), ffn_width=4 * self.width, prelude_layers=prelude,
            core_layers=core, coda_layers=coda,
        )  # fmt: skip

    def __str__(self) -> str:
        layers = "/".join(map(str, self.layers))
        return (
            f"{self.rows} rows of {self.length} tokens, mean loops {self.mean_loops:g}, P/R/C {layers}, "
            f"d {self.width}, vocabulary {self.vocab_size:,}"
        )


LARGER = Size(rows=8, layers=(2, 4, 2), width=512, length=256)


class RecomputedInputs(LoopInputs):
    """Loop inputs whose drive and value embeddings are computed again for every loop."""

    source: Callable[[int], LoopInputs]

    def rows(self, count: int) -> LoopInputs:
        """Of the first `count` rows, computed now."""
        return self.source(count)


class RecomputingLM(LoopedLM):
    """The model without hoisting: each loop starts from e and the tokens."""

    e: Tensor
    tokens: Tensor

    def start(self, batch: MicroBatch, ctx: Context, key: StateKey | None) -> tuple[Tensor, Tensor]:
        """As LoopedLM.start."""
        self.e, h_0 = super().start(batch, ctx, key)
        self.tokens = batch.tokens
        return self.e, h_0

    def run_loops(self, h_0: Tensor, inputs: LoopInputs, loops: Loops) -> Iterator[Tensor]:
        """As LoopedLM.run_loops."""
        recomputed = RecomputedInputs(*inputs)
        recomputed.source = lambda count: LoopInputs(
            self.injection.input(self.e[:count]),
            inputs.ctx.rows(count),
            self.look_up_values("core", self.tokens[:count]),
        )
        yield from super().run_loops(h_0, recomputed, loops)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step."""

    masked: bool = False
    recomputed: bool = False
    compiled: bool = False
    checkpointing: str = "none"
    plain_head: bool = False


VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "masked": Variant(masked=True),
    "recomputed": Variant(recomputed=True),
    "compiled": Variant(compiled=True),
    "loop": Variant(checkpointing="loop"),
    "layer": Variant(checkpointing="layer"),
    "every_2_loops": Variant(checkpointing="every_k_loops"),
    "plain head": Variant(plain_head=True),
}


def plain_head_sums(
    weight: Tensor, hidden: Tensor, labels: Tensor, weights: Tensor | None, settings: HeadSettings, ops: TensorOps
) -> HeadSums:
    """`head_sums` by the full logits."""
    loss = F.cross_entropy(head_logits(weight, hidden, settings, ops), labels, reduction="sum")
    return HeadSums(loss, loss.new_zeros(()))


class Bench:
    """Times variants of one model on draws of depths that all variants share."""

    def __init__(self, cfg: ModelConfig, rows: int, device: torch.device) -> None:
        self.cfg, self.device = cfg, device
        self.sampler = DepthSampler.from_config(cfg.recurrence, seed=SEED, global_batch_size=rows)
        generator = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(cfg.vocab_size, (rows, cfg.context_length + 1), generator=generator).to(device)
        self.totals = Totals(float(rows * cfg.context_length), float(rows))
        self.models: dict[tuple[bool, bool], tuple[LoopedLM, torch.optim.Optimizer]] = {}

    def model(self, variant: Variant) -> tuple[LoopedLM, torch.optim.Optimizer]:
        """The model set up for the variant, and its optimizer."""
        key = variant.compiled, variant.recomputed
        if key not in self.models:
            model = (RecomputingLM if variant.recomputed else LoopedLM)(self.cfg)
            init_parameters(model, self.cfg, SEED, model.ops)
            model.to(self.device)
            model.compute_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            if variant.compiled:
                model.compile_core()
            self.models[key] = model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        model, optimizer = self.models[key]
        model.checkpointing, model.loops_per_checkpoint = variant.checkpointing, 2
        return model, optimizer

    def core(self, variant: Variant, depths: Depths) -> float:
        """Seconds of the loops and what they start from (drive, value embeddings), forward and backward."""
        model, _ = self.model(variant)
        batch, loops = make_micro_batch(self.tokens, depths, bucket=len(depths) if variant.masked else 1)
        with torch.no_grad():
            key = StateKey(SEED, 0, batch.rows)
            ctx = model.context_of(batch, key)
            e, h_0 = model.start(batch, ctx, key)
        e.requires_grad_()
        model.zero_grad()

        def run() -> None:
            inputs = LoopInputs(model.injection.input(e), ctx, model.look_up_values("core", batch.tokens))
            *_, last = model.run_loops(h_0, inputs, loops)
            last.backward(torch.ones_like(last))

        return self._time(run)

    def step(self, variant: Variant, depths: Depths) -> float:
        """Seconds of a whole step: forward, backward, AdamW."""
        model, optimizer = self.model(variant)
        batch, loops = make_micro_batch(self.tokens, depths, bucket=len(depths) if variant.masked else 1)
        key = StateKey(SEED, 0, batch.rows)

        def run() -> None:
            model.training_loss(batch, loops, key, LossConfig(), self.totals).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        head = plain_head_sums if variant.plain_head else objective.head_sums
        with mock.patch.object(objective, "head_sums", head):
            return self._time(run)

    def _time(self, run: Callable[[], None]) -> float:
        self._wait()
        started = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compare(self, names: Sequence[str], part: str, rounds: int) -> dict[str, list[float]]:
        """Seconds of each variant in each round, after one round that is not counted. `part` is core or step."""
        measure = getattr(self, part)
        sec: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-1, rounds):
            depths = self.sampler.draw(max(turn, 0))
            for name in names:
                value = measure(VARIANTS[name], depths)
                if turn >= 0:
                    sec[name].append(value)
        return sec


def table(part: str, sec: dict[str, list[float]]) -> list[str]:
    """Markdown lines: variant, median time, time relative to the base with quartiles."""
    lines = [f"| {part} | median | time / {BASE} | quartiles |", "|---|---|---|---|"]
    for name, values in sec.items():
        ratios = [value / base for value, base in zip(values, sec[BASE], strict=True)]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        lines.append(f"| {name} | {np.median(values):.3f} s | {middle:.2f} | {low:.2f} - {high:.2f} |")
    return lines


def compare_size(size: Size, names: Sequence[str], rounds: int, device: torch.device) -> list[str]:
    """A section on one size, as Markdown lines; also printed as it comes."""
    bench = Bench(size.model(), size.rows, device)
    sections = [[f"## {size}", ""]]
    for part in ("core", "step"):
        own = [name for name in names if part == "step" or not VARIANTS[name].plain_head]
        sections.append([*table(part, bench.compare(own, part, rounds)), ""])
        print("\n".join(sections[-1]), flush=True)
    return [line for section in sections for line in section]


def utilization_section(device: torch.device, rounds: int) -> list[str]:
    """MFU and peak memory on a GPU, of the looped models and of plain GPTs of the same layers."""
    peak = device_peak_flops(torch.cuda.get_device_name(device))
    lines = [
        "## MFU and peak memory, bf16, one GPU",
        "",
        "| model | rows | step MFU | core MFU | peak GiB of a step | core MFU / plain GPT's step MFU |",
        "|---|---|---|---|---|---|",
    ]
    for looped, plain in (("parcae_140m", "gpt_140m"), ("parcae_1b3", "gpt_1b3")):
        reference = None
        for name in (plain, looped):
            cfg = load_config(ROOT / "configs" / f"{name}.yaml", [])
            bench = Bench(cfg.model, cfg.train.micro_batch_size, device)
            variant = Variant(checkpointing=cfg.train.activation_checkpointing)
            depths = bench.sampler.draw(0)
            torch.cuda.reset_peak_memory_stats(device)
            step = statistics.median([bench.step(variant, depths) for _ in range(rounds + 1)][1:])
            gib = torch.cuda.max_memory_allocated(device) / 2**30
            core = statistics.median([bench.core(variant, depths) for _ in range(rounds + 1)][1:])
            work = StepWork.of(depths.no_grad_loops, depths.grad_loops, "terminal")
            core_flops = (work.no_grad_loops + 3 * work.grad_loops) * forward_flops(cfg.model).loop
            of_step = utilization(model_flops(cfg.model, work), step, 1, peak)
            of_core = utilization(core_flops * cfg.model.context_length, core, 1, peak)
            reference = reference or of_step
            cells = [name, str(len(depths)), _share(of_step), _share(of_core), f"{gib:.1f}"]
            ratio = of_core / reference if name == looped and of_core and reference else None
            lines.append(f"| {' | '.join(cells)} | {_share(ratio)} |")
            del bench
            torch.cuda.empty_cache()
    print("\n".join(lines), flush=True)
    return [*lines, ""]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def machine(device: torch.device) -> str:
    """What the figures are from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    threads = f", {torch.get_num_threads()} thread(s)" if device.type == "cpu" else ""
    return f"{name}{threads}, load average {os.getloadavg()[0]:.1f} at the start; torch {torch.__version__}."


def main(argv: Sequence[str]) -> int:
    """Measures, prints, and writes --out; returns 0."""
    size = Size()
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=integer(1, 2**24), default=size.rows, help="of the micro-batch")
    parser.add_argument("--mean-loops", type=number(1, 1_000), default=size.mean_loops)
    parser.add_argument("--layers", type=integer(0, 512), nargs=3, default=size.layers, metavar=("P", "R", "C"))
    parser.add_argument("--width", type=integer(1, 2**20), default=size.width)
    parser.add_argument("--vocab-size", type=integer(1, 2**24), default=size.vocab_size)
    parser.add_argument("--length", type=integer(1, 2**24), default=size.length, help="tokens of a row")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS)[1:], default=list(VARIANTS)[1:])
    parser.add_argument("--rounds", type=integer(1, 10**6), default=5)
    parser.add_argument("--threads", type=integer(1, 1_024), default=1, help="of the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--set", action="store_true", help="the sizes and variants of docs/benchmarks.md; no other flags"
    )
    parser.add_argument("--cache", action="store_true", help="the cache of generation alone, by the size flags")
    parser.add_argument("--out", type=pathname, help="Markdown file to write")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    lines = ["# Benchmarks", "", *METHOD.splitlines(), "", machine(device), ""]
    own = replace(
        size, rows=args.rows, mean_loops=args.mean_loops, layers=tuple(args.layers), width=args.width,
        vocab_size=args.vocab_size, length=args.length,
    )  # fmt: skip
    if not args.cache:
        lines += compare_size(own, [BASE, *args.variants], args.rounds, device)
    if args.set:
        lines += compare_size(LARGER, [BASE, "masked", "recomputed"], args.rounds, device)
    if args.set or args.cache:
        lines += cache_section(own.model(), args.rounds, device)
    if device.type == "cuda" and not args.cache:
        lines += utilization_section(device, args.rounds)
    if args.out:
        args.out.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
