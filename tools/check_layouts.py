"""Trains tiny models in every layout of four CPU processes and compares each with one process.

For each family and optimizer: loss and gradient norm of 20 steps and the final weights, with per-sequence loop counts
and loops without gradient, against the same steps on one process in fp32; in bf16 the losses. `--markdown FILE` puts
the differences into the table between the marks of a document and keeps its other lines, so that the table may be made
in parts.

    python tools/check_layouts.py
    python tools/check_layouts.py --families parcae --optimizers muon --markdown docs/parallelism.md
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

if not __package__:
    sys.path[:] = [str(Path(__file__).resolve().parents[1]), *sys.path[1:]]

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from pretrain.arguments import integer, pathname
from pretrain.config.families import FAMILIES
from pretrain.config.schema import Config
from pretrain.data.loader import RankBatch
from pretrain.data.place import rank_positions
from pretrain.files import write_text
from pretrain.messages import set_up_console
from pretrain.model.looped import LoopedLM
from pretrain.model.ops import shard
from pretrain.parallel import megatron, zero
from pretrain.parallel.megatron import Layout
from pretrain.parallel.tensor_ops import tensor_ops
from pretrain.parallel.zero import PARAMETER, ZeroEngine
from pretrain.sampling import DepthSampler
from pretrain.train.build import build_model
from pretrain.train.pipeline_step import make_runner

WORLD, ROWS = 4, 16
FAMILY_NAMES, OPTIMIZERS, PRECISIONS = ("parcae", "flt", "parcae_flt", "rdm"), ("adamw", "muon"), ("fp32", "bf16")
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"


@dataclass(frozen=True)
class Case:
    """A layout, with a model and a batch that are cheap in it: cost is in the number of operations, not their size."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    stage: int = 1
    micro_batch_size: int = ROWS
    """Two micro-batches per rank, or two rounds of a pipeline."""
    core_layers: int = 2


CASES = (
    Case("dp4", micro_batch_size=2),
    Case("dp4 ZeRO-2", stage=2, micro_batch_size=2),
    Case("dp4 ZeRO-3", stage=3, micro_batch_size=2),
    Case("tp2xdp2", tensor=2, micro_batch_size=4),
    Case("tp2xdp2 ZeRO-2", tensor=2, stage=2, micro_batch_size=4),
    Case("tp2xdp2 ZeRO-3", tensor=2, stage=3, micro_batch_size=4),
    Case("tp2xdp2 sequence parallel", tensor=2, sequence_parallel=True, micro_batch_size=4),
    Case("tp4", tensor=4, micro_batch_size=8),
    Case("pp2xdp2", pipeline=2, micro_batch_size=2),
    Case("tp2xpp2", tensor=2, pipeline=2, micro_batch_size=4),
    Case("tp2xpp2 sequence parallel", tensor=2, pipeline=2, sequence_parallel=True, micro_batch_size=4),
    Case("pp4", pipeline=4, micro_batch_size=2, core_layers=4),
)
CASE_NAMES = tuple(case.name for case in CASES)


@dataclass
class Trace:
    """What a run leaves to compare."""

    losses: list[float]
    norms: list[float]
    tensors: dict[tuple[str, str], torch.Tensor]
    """By name and key: this rank's share of weights and optimizer state."""
    copies_agree: bool
    """The two copies of a tied matrix are equal bit for bit."""


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
    """A model of four heads that the layout of `case` can share, and a batch for it."""
    from omegaconf import OmegaConf

    settings: dict[str, Any] = {
        "model": FAMILIES[family] | {"family": family},
        "optimizer": {"name": optimizer, "lr": 1e-3, "eps": 1e-8, "muon_lr": 1e-2},
        # AdamW's first update is the sign of the gradient, which rounding decides where there is hardly any.
        "schedule": {"warmup_steps": 10},
        "train": {
            "max_steps": 20, "global_batch_size": ROWS, "micro_batch_size": case.micro_batch_size,
            "precision": precision, "activation_checkpointing": checkpointing,
        },
        "parallel": {
            "tensor": case.tensor, "pipeline": case.pipeline, "sequence_parallel": case.sequence_parallel,
        },
        "zero": {"stage": case.stage},
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "width": 32, "num_heads": 4, "ffn_width": 64, "vocab_size": 250, "context_length": 32,
        "core_layers": case.core_layers,
        "recurrence": {"mean_loops": 2, "max_loops": 4, "backprop_loops": 2},
    }  # fmt: skip
    if FAMILIES[family].get("prelude_layers") != 0:
        sizes |= {"prelude_layers": 1, "coda_layers": 1}
    merged = OmegaConf.merge(OmegaConf.structured(Config), settings, {"model": sizes})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config


def train(cfg: Config, layout: Layout, num_steps: int, sampler: Any = None) -> Trace:
    """Trains `num_steps` steps in `layout`, with the loop counts of `sampler` (default: the configuration's)."""
    model = build_model(cfg, layout)
    engine = ZeroEngine(model, cfg, layout)
    sampler = sampler or DepthSampler.from_config(
        cfg.model.recurrence, seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size
    )
    rows = Rows(cfg, layout)
    runner = make_runner(cfg, engine, layout, sampler, rows)
    losses, norms = [], []
    for step in range(num_steps):
        report = runner.run(step, rows.batch(step))
        losses.append(report.terms["loss"])
        norms.append(report.grad_norm or 0.0)
    tensors = {(name, key): tensor.clone() for name, key, tensor in engine.saved_tensors()}
    agree = _copies_agree(engine, layout)
    engine.close()
    return Trace(losses, norms, tensors, agree)


def _copies_agree(engine: ZeroEngine, layout: Layout) -> bool:
    model = cast(LoopedLM, engine.module)
    if layout.embedding_group is None or not model.cfg.tie_embeddings or not (model.stage.first or model.stage.last):
        return True
    copies = [torch.empty_like(model.embedding.weight) for _ in range(2)]
    dist.all_gather(copies, model.embedding.weight.detach(), group=layout.embedding_group)
    return torch.equal(*copies)


def alone(layout: Layout) -> Layout:
    """The layout of one process, this one, inside a larger world."""
    groups = [dist.new_group([rank]) for rank in range(layout.world_size)]
    own = cast(dist.ProcessGroup, groups[layout.rank])
    return replace(
        layout, rank=0, tensor_size=1, tensor_rank=0, pipeline_size=1, pipeline_rank=0, data_size=1, data_rank=0,
        sequence_parallel=False, tensor_group=own, pipeline_group=own, data_group=own, model_group=own,
        embedding_group=None, world_size=1, world_group=own,
    )  # fmt: skip


def largest(differences: Iterable[float]) -> float:
    """The largest, and infinity where one is not a number: `max` would pass over it."""
    return max(math.inf if math.isnan(x) else x for x in differences)


@dataclass(frozen=True)
class Difference:
    """Largest relative differences from the run on one process, over all ranks."""

    loss: float
    norm: float
    weight: float
    """Relative L2 of a tensor; inf where the copies of a tied matrix differ."""
    state: float
    """The same of the optimizer's state."""

    @staticmethod
    def between(trace: Trace, reference: Trace, layout: Layout, dims: dict[str, int | None]) -> Difference:
        """Of this layout's run; collective over all ranks."""
        ops = tensor_ops(layout)

        def relative(own: Sequence[float], other: Sequence[float]) -> float:
            return largest(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))

        weights, states = [0.0 if trace.copies_agree else math.inf], [0.0]
        for (name, key), tensor in trace.tensors.items():
            expected = shard(reference.tensors[name, key], dims[name], ops)
            difference = float((tensor - expected).norm() / expected.norm().clamp(min=1e-12))
            (weights if key == PARAMETER else states).append(difference)
        losses, norms = relative(trace.losses, reference.losses), relative(trace.norms, reference.norms)
        values = torch.tensor([losses, norms, largest(weights), largest(states)], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return Difference(*values.tolist())


def differences(
    families: Sequence[str],
    optimizers: Sequence[str],
    layouts: Sequence[str],
    precisions: Sequence[str],
    num_steps: int,
) -> Iterator[tuple[str, str, str, str, Difference]]:
    """(family, optimizer, layout, precision, difference) of every case. Collective over the four processes."""
    # The models are smaller than what stage 3 keeps whole.
    zero.PERSISTENT_ELEMENTS = 20
    single = alone(megatron.initialize(1, 1, False, 120.0))
    for family in families:
        for optimizer in optimizers:
            references: dict[int, Trace] = {}
            for case in (case for case in CASES if case.name in layouts):
                if case.core_layers not in references:
                    one = Case("one process", core_layers=case.core_layers)
                    references[one.core_layers] = train(tiny_config(family, optimizer, "fp32", one), single, num_steps)
                layout = megatron.initialize(case.tensor, case.pipeline, case.sequence_parallel, 120.0)
                for precision in precisions:
                    cfg = tiny_config(family, optimizer, precision, case)
                    trace = train(cfg, layout, num_steps)
                    difference = Difference.between(
                        trace, references[case.core_layers], layout, partition_dims(cfg)
                    )
                    yield family, optimizer, case.name, precision, difference


def partition_dims(cfg: Config) -> dict[str, int | None]:
    """Dimension that tensor parallelism shards, by parameter."""
    from pretrain.accounting import parameter_table

    return {name: p.partition_dim for name, p in parameter_table(cfg.model).items()}


# ------------------------------------------------------------------------------------------------------------ table

TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-5, "weights": 1e-4, "bf16 loss": 2e-2}
"""By column: the largest relative difference that is accepted."""

Key = tuple[str, str, str]
"""Family, optimizer and layout."""


def columns(precision: str, difference: Difference) -> dict[str, float]:
    """What a case says in the table."""
    if precision == "bf16":
        return {"bf16 loss": difference.loss}
    return {"loss": difference.loss, "gradient norm": difference.norm, "weights": difference.weight}


def within(values: dict[str, float]) -> bool:
    """Whether all columns keep their tolerances."""
    return all(value <= TOLERANCES[name] for name, value in values.items())


def merge_table(text: str, key: Key, values: dict[str, float]) -> str:
    """`text` with `values` in the line of `key` in the table between its marks, and everything else kept."""
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    table: dict[Key, dict[str, float]] = {}
    for line in old.strip().splitlines()[2:]:
        family, optimizer, layout, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        named = zip(TOLERANCES, cells, strict=True)
        table[family, optimizer, layout] = {name: float(cell) for name, cell in named if cell != "-"}
    table[key] = table.get(key, {}) | values
    header = ["family", "optimizer", "layout", *TOLERANCES]
    lines = [header, ["---"] * len(header)]
    for key in product(FAMILY_NAMES, OPTIMIZERS, CASE_NAMES):
        if key in table:
            lines.append([*key, *(_cell(table[key].get(name)) for name in TOLERANCES)])
    return before + "\n".join([BEGIN, *(f"| {' | '.join(line)} |" for line in lines), END]) + after


def _has_marks(document: Path) -> bool:
    """Whether it can be read and has one place for the table."""
    if not document.is_file():
        return False
    begin, found, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    return bool(found) and BEGIN not in rest and END not in begin and rest.count(END) == 1


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


# ---------------------------------------------------------------------------------------------------- command line


def _worker(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    good = True
    for *key, precision, difference in differences(
        args.families, args.optimizers, args.layouts, args.precisions, args.steps
    ):
        values = columns(precision, difference)
        good = good and within(values)
        if rank == 0:
            verdict = "" if within(values) else "  TOO LARGE"
            print(", ".join([*key, *(f"{name} {value:.1e}" for name, value in values.items())]) + verdict, flush=True)
            if args.markdown is not None:
                text = args.markdown.read_text(encoding="utf-8")
                write_text(args.markdown, merge_table(text, cast(Key, tuple(key)), values))
    megatron.shutdown()
    if not good:
        sys.exit(1)


def main() -> None:
    """Starts the four processes; exit code 1 where a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (
        ("families", FAMILY_NAMES), ("optimizers", OPTIMIZERS), ("layouts", CASE_NAMES), ("precisions", PRECISIONS),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", nargs="+", default=choices, choices=choices, metavar="NAME")
    parser.add_argument("--steps", type=integer(1, 10**6), default=20)
    parser.add_argument("--markdown", type=pathname, help="document whose table takes the differences")
    args = parser.parse_args()
    if args.markdown is not None and not _has_marks(args.markdown):
        parser.error(f"--markdown={args.markdown}: expected a document with the lines {BEGIN} and {END} around a table")
    set_up_console()
    logging.getLogger("pretrain").setLevel(logging.WARNING)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Imported once: the processes are forks of this one.
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    try:
        start_processes(_worker, (port, args), nprocs=WORLD, start_method="fork")
    except ProcessExitedException as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
