"""Configurations by chance, each trained in its layout and on one process.

A draw takes one value of every axis: family, depths, objective, auxiliary losses, ZeRO stage, layout, activation
checkpointing, dropout, documents, micro batch, precision. The 12 layouts and the 11 families take turns, so that 132
draws have every pair. What the product refuses is drawn again and counted by its message; it is a failure where the
documents do not say so. The draws of a seed are the same everywhere, so that a failure can be repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from pretrain.config.families import FAMILIES
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.parallel import megatron, zero
from tools.layout_runs import TOLERANCES, Difference, Trace, alone, partition_dims, train

NUM_STEPS, TIME_LIMIT_SEC = 3, 120.0

BASE = """
data: {path: unused}
model: {width: 16, num_heads: 4, ffn_width: 24, vocab_size: 61, vocab_multiple: 4, context_length: 16,
        value_gate_channels: 8, recurrence: {max_loops: 6}}
loss: {subspace_rank: 3, contrastive_tokens: 5, chunk_tokens: 24}
# AdamW's first update is the sign of the gradient, which rounding decides where there is hardly any.
optimizer: {lr: 1e-3, eps: 1e-8, muon_lr: 1e-2}
schedule: {warmup_steps: 10}
train: {max_steps: 20, global_batch_size: 8, precision: fp32}
zero: {bucket_elements: 1500}
"""

LAYOUTS = (
    (2, ""), (2, ""), (2, "parallel.tensor=2"), (2, "parallel.tensor=2 parallel.sequence_parallel=true"),
    (2, "parallel.pipeline=2"), (4, ""), (4, "parallel.tensor=2"), (4, "parallel.pipeline=2"),
    (4, "parallel.tensor=2 parallel.sequence_parallel=true"), (4, "parallel.tensor=2 parallel.pipeline=2"),
    (4, "parallel.tensor=2 parallel.pipeline=2 parallel.sequence_parallel=true"), (4, "parallel.pipeline=4"),
)  # fmt: skip
"""Processes, and how they are laid out."""

HEADS = "loss.loop_heads=0.3 model.auxiliary.loop_heads=2"
PREDICTION = "loss.state_prediction=0.3 model.auxiliary.state_predictor=true loss.state_prediction_loops=1"

AXES: tuple[tuple[str, ...], ...] = (
    # Output matrices of zeros would keep most of a layer, and of dropout in it, out of the first losses.
    ("model.init=scaled", "model.init=uniform"),
    tuple(f"model.prelude_layers={p} model.core_layers={r} model.coda_layers={c}" for p, r, c in (
        (0, 2, 0), (1, 2, 1), (0, 4, 1), (1, 4, 0), (1, 1, 1),
    )),
    ("", "", *(f"model.recurrence.state_init={kind}" for kind in ("input", "zero", "like_init"))),
    ("", "", "model.recurrence.readout=raw", "model.recurrence.readout=final_norm"),
    ("", "model.tie_embeddings=true", "model.tie_embeddings=false"),
    ("", "", "model.num_kv_heads=2", "model.sliding_window=5 model.window_pattern=SL", "model.logit_softcap=5"),
    ("", "", "model.dropout=0.2", "model.dropout=0.2"),
    ("", "", "data.mask_document_boundaries=true"),
    ("loss.objective=terminal", "loss.objective=per_loop", "loss.objective=last_third",
     "loss.objective=exit_weighted model.auxiliary.exit_gate=true loss.exit_entropy=0.1"),
    ("", "", "", HEADS, HEADS.replace("loop_heads=2", "loop_heads=1"), PREDICTION,
     PREDICTION.replace("loops=1", "loops=2"), "loss.contrastive=0.2", f"{HEADS} {PREDICTION} loss.contrastive=0.2"),
    ("", "", "loss.norm_penalty=0.1", "loss.scale_anchor=0.1", "loss.subspace_penalty=0.2"),
    ("", "", "loss.z_loss=1e-3", "loss.label_smoothing=0.1"),
    ("zero.stage=1", "zero.stage=1", "zero.stage=2", "zero.stage=3"),
    ("train.micro_batch_size=1", "train.micro_batch_size=1", "train.micro_batch_size=2"),
    tuple(f"train.activation_checkpointing={kind}" for kind in ("none", "loop", "layer", "every_k_loops")),
    ("", "", "", "train.precision=bf16"),
    ("optimizer.name=adamw", "optimizer.name=adamw", "optimizer.name=muon"),
    ("", "optimizer.clip_norm=null", "optimizer.clip_norm=0.1"),
)  # fmt: skip
"""Settings of which a draw takes one each, empty for the default."""

DEPTHS: tuple[tuple[str, ...], ...] = (
    tuple(f"model.recurrence.mean_loops={mean} model.recurrence.backprop_loops={most}" for mean, most in (
        (2, 2), (3, 1), (3, 3), (3, 6), (4, 2), (5, 6),
    )),
    tuple(f"model.recurrence.distribution={name}" for name in (
        "poisson", "poisson", "lognormal_poisson", "uniform", "fixed",
    )),
    ("", "", "model.recurrence.sampled_loops=no_grad"),
    ("", "", "", "model.recurrence.curriculum=linear model.recurrence.curriculum_steps=3"),
    tuple(f"model.recurrence.granularity={unit}" for unit in ("sequence", "sequence", "sequence", "batch", "token")),
)  # fmt: skip
"""The same, of families with loops."""

DOCUMENTED = (
    r"zero\.stage=.*parallel\.pipeline",
    r"model\.core_layers=.*a multiple of parallel\.pipeline",
    r"train\.activation_checkpointing='every_k_loops'.*parallel\.pipeline",
    r"model\.recurrence\.granularity='token'.*parallel\.pipeline",
    r"(parallel\.pipeline|parallel\.sequence_parallel)=.*since loss\.(objective=exit_weighted|contrastive|state_pred)",
    r"model\.recurrence\.backprop_loops=.*ties loops together",
    r"model\.recurrence\.mean_loops=.*the gradient loops that sampled_loops=no_grad gives",
    r"model\.recurrence\.state_init=.*nothing else brings e into the loops",
    r"loss\.objective=.*every row runs exactly one loop",
    r"train\.micro_batch_size=.*a multiple of parallel\.pipeline",
)  # fmt: skip
"""What docs/parallelism.md, docs/readout_blind_spot.md and docs/configuration.md say is refused."""


def candidates(seed: int, index: int) -> Iterator[tuple[int, str]]:
    """(number of processes, overrides) of draw `index`, over and over: one family in one layout."""
    chance, families = random.Random(f"{seed}:{index}"), sorted(FAMILIES)
    family, (processes, layout) = families[index % len(families)], LAYOUTS[index % len(LAYOUTS)]
    axes = AXES if family == "gpt" else (*DEPTHS, *AXES)
    while True:
        settings = [f"model.family={family}", layout, *(chance.choice(axis) for axis in axes)]
        yield processes, " ".join(filter(None, settings))


def config_of(overrides: str, processes: int) -> Config:
    """The configuration, as a user's is made and checked; ConfigError where it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.yaml"
        base.write_text(BASE, encoding="utf-8")
        cfg = load_config(base, overrides.split())
    validate(cfg, processes)
    return cfg


@dataclass(frozen=True)
class Outcome:
    """Of one draw: where it was refused or failed a message, else how far it was from one process."""

    index: int
    processes: int
    overrides: str
    refused: str = ""
    failed: str = ""
    values: dict[str, float] | None = None

    @property
    def good(self) -> bool:
        """Refused as documented, or within the tolerances."""
        return not self.failed and (not self.refused or any(re.search(rule, self.refused) for rule in DOCUMENTED))

    def __str__(self) -> str:
        verdict = f"REFUSED against the documents: {self.refused}" if self.refused else f"FAILED: {self.failed}"
        values = ", ".join(f"{name} {value:.1e}" for name, value in (self.values or {}).items())
        return f"draw {self.index}: {values}{'' if self.good else ' ' + verdict}: {self.processes} x {self.overrides}"


def outcomes(seed: int, index: int) -> Iterator[Outcome]:
    """Of draw `index`: what is refused, and at last what is trained."""
    for processes, overrides in candidates(seed, index):
        found = outcome(index, processes, overrides)
        yield found
        if not found.refused:
            return


def outcome(index: int, processes: int, overrides: str) -> Outcome:
    """Trains one configuration in its layout and on one process."""
    try:
        cfg = config_of(overrides, processes)
    except ConfigError as error:
        return Outcome(index, processes, overrides, refused=str(error))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "values.json"
        failure = _run(cfg, processes, result)
        if failure:
            return Outcome(index, processes, overrides, failed=failure)
        values = json.loads(result.read_text(encoding="utf-8"))
    precise = cfg.train.precision == "fp32"
    columns = {"loss": "loss" if precise else "bf16 loss", "gradient norm": "gradient norm", "weights": "weights"}
    large = [name for name, value in values.items() if not value <= TOLERANCES[columns[name]]]
    return Outcome(index, processes, overrides, values=values, failed=f"too large: {', '.join(large)}" if large else "")


def _run(cfg: Config, processes: int, result: Path) -> str:
    """What went wrong, or an empty string."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (port, processes, cfg, result)
    started = start_processes(_worker, arguments, nprocs=processes, join=False, start_method="fork")
    assert started is not None
    deadline = time.monotonic() + TIME_LIMIT_SEC
    try:
        while not started.join(timeout=1.0):
            if time.monotonic() > deadline:
                return f"no end within {TIME_LIMIT_SEC:.0f} s"
    except ProcessException as error:
        return " ".join(str(error).strip().splitlines()[-3:])
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
                process.join()
    return ""


def _worker(rank: int, port: int, processes: int, cfg: Config, result: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    zero.PERSISTENT_ELEMENTS = 20  # stage 3 would keep models so small whole
    parallel = cfg.parallel
    layout = megatron.initialize(parallel.tensor, parallel.pipeline, parallel.sequence_parallel, TIME_LIMIT_SEC)
    loops = [1] if cfg.model.family == "gpt" else [1, 3]
    reference = reference_of(cfg, alone(layout), rank, loops)
    trace = train(cfg, layout, NUM_STEPS, evaluated_loops=loops)
    found = Difference.between(trace, reference, layout, partition_dims(cfg))
    values = {"loss": max(found.loss, found.other)}
    if cfg.train.precision == "fp32":
        values |= {"gradient norm": found.norm, "weights": found.weight}
    if rank == 0:
        result.write_text(json.dumps(values), encoding="utf-8")
    megatron.shutdown()


def reference_of(cfg: Config, single: megatron.Layout, rank: int, evaluated_loops: Sequence[int]) -> Trace:
    """Of one process in fp32, all rows in one micro-batch and nothing recomputed; made by rank 0 for all."""
    cfg = config_of_one_process(cfg)
    made = [train(cfg, single, NUM_STEPS, evaluated_loops=evaluated_loops) if rank == 0 else None]
    dist.broadcast_object_list(made, src=0)
    assert made[0] is not None
    return made[0]


def config_of_one_process(cfg: Config) -> Config:
    """The same run without what a layout changes: the simplest path of each."""
    rows = cfg.train.global_batch_size
    train = replace(cfg.train, precision="fp32", micro_batch_size=rows, activation_checkpointing="none")
    return replace(cfg, train=train, parallel=type(cfg.parallel)(), zero=type(cfg.zero)())


def main_draws(args: argparse.Namespace) -> int:
    """Prints each outcome, then what was refused as documented; 1 where one is not good."""
    good, refused = True, Counter[str]()
    for found in _named(args.configurations) if args.configurations else _drawn(args):
        good = good and found.good
        if found.refused and found.good:
            refused[next(rule for rule in DOCUMENTED if re.search(rule, found.refused))] += 1
        else:
            print(found, flush=True)
    for rule, count in refused.most_common():
        print(f"refused as documented, {count} times: {rule}")
    return 0 if good else 1


def _drawn(args: argparse.Namespace) -> Iterator[Outcome]:
    for index in range(args.first, args.first + args.draws):
        yield from outcomes(args.seed, index)


def _named(configurations: Sequence[str]) -> Iterator[Outcome]:
    for index, text in enumerate(configurations):
        processes, overrides = text.split(" x ", 1)
        yield outcome(index, int(processes), overrides)
