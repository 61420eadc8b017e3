"""Trains tiny models in every layout of four CPU processes and compares each with one process.

For each family: the loss and gradient-norm trace of 20 steps and the final weights, with per-sequence loop counts and
loops without gradient, against the same run on one process. Prints a table; `--markdown FILE` replaces the one between
the markers in a document.

    python tools/check_layouts.py
    python tools/check_layouts.py --families parcae --layouts pp2xdp2 tp4
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

if not __package__:
    sys.path[:] = [str(Path(__file__).resolve().parents[1]), *sys.path[1:]]

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from pretrain.config.families import FAMILIES
from pretrain.config.schema import Config
from pretrain.data.loader import RankBatch
from pretrain.data.place import rank_positions
from pretrain.model.ops import shard
from pretrain.parallel import megatron
from pretrain.parallel.megatron import Layout
from pretrain.parallel.zero import ZeroEngine
from pretrain.sampling import DepthSampler
from pretrain.train.build import build_model
from pretrain.train.pipeline_step import make_runner

WORLD = 4
FAMILY_NAMES = ("parcae", "flt", "parcae_flt", "rdm")
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"
TRACE_TOLERANCE, WEIGHT_TOLERANCE, BF16_TOLERANCE = 1e-5, 1e-4, 2e-2


@dataclass(frozen=True)
class Case:
    """One way to lay out four processes."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    stage: int = 1


CASES = (
    Case("dp4"),
    Case("dp4 ZeRO-2", stage=2),
    Case("dp4 ZeRO-3", stage=3),
    Case("tp2xdp2", tensor=2),
    Case("tp2xdp2 ZeRO-2", tensor=2, stage=2),
    Case("tp2xdp2 ZeRO-3", tensor=2, stage=3),
    Case("tp2xdp2 sequence parallel", tensor=2, sequence_parallel=True),
    Case("tp4", tensor=4),
    Case("pp2xdp2", pipeline=2),
    Case("tp2xpp2", tensor=2, pipeline=2),
    Case("tp2xpp2 sequence parallel", tensor=2, pipeline=2, sequence_parallel=True),
    Case("pp4", pipeline=4),
)


@dataclass
class Trace:
    """What a run leaves to compare."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


class Rows:
    """A loader of fixed random rows, dealt to ranks as the real one deals them."""

    bos_id = 0

    def __init__(self, cfg: Config, layout: Layout) -> None:
        self.cfg, self.layout = cfg, layout
        self.all_positions = rank_positions(cfg.train.global_batch_size, layout.data_size)

    def batch(self, step: int) -> RankBatch:
        """This rank's rows of a step."""
        shape = (self.cfg.train.global_batch_size, self.cfg.model.context_length + 1)
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(1, self.cfg.model.vocab_size, shape, generator=generator)
        positions = torch.from_numpy(self.all_positions[self.layout.data_rank])
        return RankBatch(rows[positions], positions)


def tiny_config(family: str, optimizer: str, precision: str, case: Case, checkpointing: str = "none") -> Config:
    """A model that every layout of four processes can share: four heads, four core layers."""
    from omegaconf import OmegaConf

    settings: dict[str, Any] = {
        "model": FAMILIES[family] | {"family": family},
        "optimizer": {"name": optimizer, "lr": 1e-3, "eps": 1e-8, "muon_lr": 1e-2},
        "train": {
            "max_steps": 20, "global_batch_size": 32, "micro_batch_size": 2 if case.pipeline == 4 else 4,
            "precision": precision, "activation_checkpointing": checkpointing,
        },
        "parallel": {
            "tensor": case.tensor, "pipeline": case.pipeline, "sequence_parallel": case.sequence_parallel,
        },
        "zero": {"stage": case.stage},
    }  # fmt: skip
    sizes = {"width": 32, "num_heads": 4, "ffn_width": 64, "vocab_size": 250, "context_length": 32, "core_layers": 4}
    if FAMILIES[family].get("prelude_layers") != 0:
        sizes |= {"prelude_layers": 1, "coda_layers": 1}
    merged = OmegaConf.merge(
        OmegaConf.structured(Config), settings, {"model": sizes | {"recurrence": {"mean_loops": 4}}}
    )
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config


def train(cfg: Config, layout: Layout, num_steps: int) -> Trace:
    """Trains `num_steps` steps in `layout`; the trace, with this rank's share of the final weights."""
    model = build_model(cfg, layout)
    engine = ZeroEngine(model, cfg, layout)
    sampler = DepthSampler.from_config(
        cfg.model.recurrence, seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size
    )
    rows = Rows(cfg, layout)
    runner = make_runner(cfg, engine, layout, sampler, rows)
    losses, norms = [], []
    for step in range(num_steps):
        report = runner.run(step, rows.batch(step))
        losses.append(report.terms["loss"])
        norms.append(report.grad_norm or 0.0)
    weights = {name: tensor.clone() for name, key, tensor in engine.saved_tensors() if key == "parameter"}
    engine.close()
    return Trace(losses, norms, weights)


def alone(layout: Layout) -> Layout:
    """The layout of one process, this one, inside a larger world."""
    groups = [dist.new_group([rank]) for rank in range(layout.world_size)]
    own = cast(dist.ProcessGroup, groups[layout.rank])
    return replace(
        layout, tensor_size=1, tensor_rank=0, pipeline_size=1, pipeline_rank=0, data_size=1, data_rank=0,
        sequence_parallel=False, tensor_group=own, pipeline_group=own, data_group=own, model_group=own,
        embedding_group=None, world_size=1, world_group=own,
    )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Largest relative differences from the run on one process, over all ranks."""

    loss: float
    norm: float
    weight: float
    worst: str
    """Parameter of the largest difference on this rank."""

    @staticmethod
    def between(trace: Trace, reference: Trace, layout: Layout, dims: dict[str, int | None]) -> Difference:
        """Of this layout's run; collective over all ranks."""
        from pretrain.parallel.tensor_ops import tensor_ops

        ops = tensor_ops(layout)

        def largest(own: Sequence[float], other: Sequence[float]) -> float:
            return max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))

        weights = {"none": 0.0}
        for name, tensor in trace.weights.items():
            expected = shard(reference.weights[name], dims[name], ops)
            weights[name] = float((tensor - expected).norm() / expected.norm().clamp(min=1e-12))
        worst = max(weights, key=lambda name: weights[name])
        values = torch.tensor(
            [largest(trace.losses, reference.losses), largest(trace.norms, reference.norms), weights[worst]]
        )
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        loss, norm, weight = values.tolist()
        return Difference(loss, norm, weight, worst)


def differences(
    families: Sequence[str], layouts: Sequence[str], optimizers: Sequence[str], precision: str, num_steps: int
) -> Iterator[tuple[str, str, str, Difference]]:
    """(family, optimizer, layout, difference) of every case. Collective over the four processes."""
    chosen = [case for case in CASES if case.name in layouts]
    base = megatron.initialize(1, 1, False, 120.0)
    single = alone(base)
    for family in families:
        for optimizer in optimizers:
            reference = train(tiny_config(family, optimizer, "fp32", Case("one")), single, num_steps)
            for case in chosen:
                cfg = tiny_config(family, optimizer, precision, case)
                layout = megatron.initialize(case.tensor, case.pipeline, case.sequence_parallel, 120.0)
                dims = partition_dims(cfg)
                trace = train(cfg, layout, num_steps)
                yield family, optimizer, case.name, Difference.between(trace, reference, layout, dims)


def partition_dims(cfg: Config) -> dict[str, int | None]:
    """Dimension that tensor parallelism shards, by parameter."""
    from pretrain.accounting import parameter_table

    return {name: p.partition_dim for name, p in parameter_table(cfg.model).items()}


def within(precision: str, difference: Difference) -> bool:
    """Whether a difference keeps the stated tolerances: 1e-5 and 1e-4 in fp32, 2e-2 on the loss in bf16."""
    if precision == "bf16":
        return difference.loss <= BF16_TOLERANCE
    return max(difference.loss, difference.norm) <= TRACE_TOLERANCE and difference.weight <= WEIGHT_TOLERANCE


def _worker(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    lines, failed = [], False
    for family, optimizer, name, difference in differences(
        args.families, args.layouts, args.optimizers, args.precision, args.steps
    ):
        good = within(args.precision, difference)
        failed = failed or not good
        lines.append(
            f"| {family} | {optimizer} | {name} | {difference.loss:.1e} | {difference.norm:.1e} | "
            f"{difference.weight:.1e} | {'ok' if good else 'TOO LARGE'} |"
        )
        if rank == 0:
            print(lines[-1], flush=True)
        if not good and difference.weight > WEIGHT_TOLERANCE:
            print(f"  rank {rank}: {difference.worst}", flush=True)
    if rank == 0 and args.markdown is not None:
        _write_table(args.markdown, [*HEADER, *lines])
    dist.barrier()
    megatron.shutdown()
    if failed:
        sys.exit(1)


HEADER = (
    "| family | optimizer | layout | loss | gradient norm | weights | |",
    "|---|---|---|---|---|---|---|",
)


def _write_table(path: Path, lines: list[str]) -> None:
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    """Starts the four processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILY_NAMES), choices=sorted(FAMILIES), metavar="NAME")
    parser.add_argument("--layouts", nargs="+", default=[c.name for c in CASES], choices=[c.name for c in CASES])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"], choices=["adamw", "muon"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--markdown", type=Path, help="document whose table is replaced")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print("\n".join(HEADER))
    spawn(_worker, (port, args), nprocs=WORLD)


if __name__ == "__main__":
    main()
