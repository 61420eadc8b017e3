"""Trains tiny models in every layout of four CPU processes and compares each with one process.

For each family and optimizer: loss and gradient norm of 20 steps and the final weights, with per-sequence loop counts
and loops without gradient, against the same steps on one process in fp32; in bf16 the losses. `--markdown FILE` puts
the differences into the table between the marks of a document and keeps its other lines, so that the table may be made
in parts. `--draws` looks elsewhere: it draws configurations (tools/layout_draws.py), each for 3 steps.

    python tools/check_layouts.py
    python tools/check_layouts.py --draws 100 --seed 7
    python tools/check_layouts.py --families parcae --optimizers muon --markdown docs/parallelism.md
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

if not __package__:
    sys.path[:] = [str(Path(__file__).resolve().parents[1]), *sys.path[1:]]

import torch
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from pretrain.arguments import integer, pathname
from pretrain.config.families import FAMILIES
from pretrain.config.schema import Config
from pretrain.files import write_text
from pretrain.messages import set_up_console
from pretrain.parallel import megatron, zero
from pretrain.processes import end_with_parent
from tools.layout_draws import main_draws
from tools.layout_runs import TOLERANCES, Difference, Trace, alone, partition_dims, train

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


# ------------------------------------------------------------------------------------------------------------ table

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


def _worker(rank: int, parent: int, port: int, args: argparse.Namespace) -> None:
    end_with_parent(parent, signal.SIGKILL)  # torch asks for INT, which a collective does not let through
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


def _configuration(text: str) -> str:
    if re.fullmatch(r"[1-9]\d* x \S.*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 'PROCESSES x OVERRIDES'")
    return text


def main() -> None:
    """Starts the four processes; exit code 1 where a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (
        ("families", FAMILY_NAMES), ("optimizers", OPTIMIZERS), ("layouts", CASE_NAMES), ("precisions", PRECISIONS),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", nargs="+", default=choices, choices=choices, metavar="NAME")
    parser.add_argument("--draws", type=integer(0, 10**6), default=0, metavar="N",
                        help="in place of the table: N draws")  # fmt: skip
    parser.add_argument(
        "--configurations", nargs="+", metavar="P x OVERRIDES", type=_configuration,
        help="in place of the table: configurations as a draw prints them, such as '2 x model.family=gpt zero.stage=2'",
    )  # fmt: skip
    parser.add_argument("--seed", type=integer(0), default=0, help="of the draws")
    parser.add_argument("--first", type=integer(0), default=0, help="number of the first draw")
    parser.add_argument("--steps", type=integer(1, 10**6), default=20)
    parser.add_argument("--markdown", type=pathname, help="document whose table takes the differences")
    args = parser.parse_args()
    if args.markdown is not None and not _has_marks(args.markdown):
        parser.error(f"--markdown={args.markdown}: expected a document with the lines {BEGIN} and {END} around a table")
    set_up_console()
    logging.getLogger("pretrain").setLevel(logging.WARNING)
    # Imported once: the processes are forks of this one.
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    if args.draws or args.configurations:
        sys.exit(main_draws(args))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        start_processes(_worker, (os.getpid(), port, args), nprocs=WORLD, start_method="fork")
    except ProcessExitedException as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
