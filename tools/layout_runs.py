"""Tiny models trained in a layout of CPU processes, and how far they are from one process.

What tools/check_layouts.py and its draws share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from pretrain.config.schema import Config
from pretrain.data.loader import RankBatch
from pretrain.data.place import rank_positions
from pretrain.model.looped import LoopedLM
from pretrain.model.ops import shard
from pretrain.parallel.megatron import Layout
from pretrain.parallel.tensor_ops import tensor_ops
from pretrain.parallel.zero import PARAMETER, ZeroEngine
from pretrain.sampling import DepthSampler
from pretrain.train.build import build_model
from pretrain.train.inputs import Inputs
from pretrain.train.pipeline_step import make_runner
from pretrain.train.step import StepRunner

TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-5, "weights": 1e-4, "bf16 loss": 2e-2}
"""By column: the largest relative difference that is accepted."""


@dataclass
class Trace:
    """What a run leaves to compare."""

    losses: list[float]
    norms: list[float]
    tensors: dict[tuple[str, str], torch.Tensor]
    """By name and key: this rank's share of weights and optimizer state."""
    copies_agree: bool
    """The two copies of a tied matrix are equal bit for bit."""
    others: dict[str, list[float]] = field(default_factory=dict)
    """The loss's other terms by step, and the evaluation after the last one by loop count."""


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
        # Documents are an option: without, no row has a border.
        lowest = 0 if self.cfg.data.mask_document_boundaries else 1
        rows = torch.randint(lowest, self.cfg.model.vocab_size, shape, generator=generator)
        positions = torch.from_numpy(self.all_positions[self.layout.data_rank])
        return RankBatch(rows[positions], positions)


def train(
    cfg: Config, layout: Layout, num_steps: int, sampler: Any = None, evaluated_loops: Sequence[int] = ()
) -> Trace:
    """Trains `num_steps` steps in `layout`, with the loop counts of `sampler` (default: the configuration's)."""
    model = build_model(cfg, layout)
    engine = ZeroEngine(model, cfg, layout)
    sampler = sampler or DepthSampler.from_config(
        cfg.model.recurrence, seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size
    )
    rows = Rows(cfg, layout)
    runner = make_runner(cfg, engine, layout, sampler, rows)
    losses: list[float] = []
    norms: list[float] = []
    others: dict[str, list[float]] = {}
    for step in range(num_steps):
        report = runner.run(step, rows.batch(step))
        losses.append(report.terms["loss"])
        norms.append(report.grad_norm or 0.0)
        for name in ("cross_entropy", *cfg.loss.weights_at(step)):
            others.setdefault(name, []).append(report.terms[name])
    if evaluated_loops:
        others["evaluation"] = _evaluated(runner, rows.batch(num_steps), evaluated_loops)
    tensors = {(name, key): tensor.clone() for name, key, tensor in engine.saved_tensors()}
    agree = _copies_agree(engine, layout)
    engine.close()
    return Trace(losses, norms, tensors, agree, others)


def _evaluated(runner: StepRunner, batch: RankBatch, num_loops: Sequence[int]) -> list[float]:
    """Sums of the cross entropy over the global batch, as the validation makes them."""
    assert batch.tokens is not None
    rows = batch.tokens.split(runner.cfg.train.micro_batch_size)
    items = [Inputs.of(part, runner.cfg, runner.bos_id, runner.layout.device) for part in rows]
    sums = torch.zeros(len(num_loops), dtype=torch.float64)
    runner.engine.module.eval()
    for losses in runner.loop_losses(items, num_loops):
        sums += losses.sum((1, 2), dtype=torch.float64)
    return runner.reduce(sums)


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
    other: float = 0.0
    """Of the loss's terms and the evaluation."""

    @staticmethod
    def between(trace: Trace, reference: Trace, layout: Layout, dims: dict[str, int | None]) -> Difference:
        """Of this layout's run; collective over all ranks."""
        ops = tensor_ops(layout)

        def relative(own: Sequence[float], other: Sequence[float], least: float = 0.0) -> float:
            return largest(abs(a - b) / max(abs(b), least) for a, b in zip(own, other, strict=True))

        weights, states = [0.0 if trace.copies_agree else math.inf], [0.0]
        for (name, key), tensor in trace.tensors.items():
            expected = shard(reference.tensors[name, key], dims[name], ops)
            difference = float((tensor - expected).norm() / expected.norm().clamp(min=1e-12))
            (weights if key == PARAMETER else states).append(difference)
        losses, norms = relative(trace.losses, reference.losses), relative(trace.norms, reference.norms)
        # Of terms alone: some, as the scale anchor, are squares of what is left between two equal numbers.
        terms = (relative(trace.others[name], value, 1e-3) for name, value in reference.others.items())
        others = largest([0.0, *terms])
        values = torch.tensor([losses, norms, largest(weights), largest(states), others], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return Difference(*values.tolist())


def partition_dims(cfg: Config) -> dict[str, int | None]:
    """Dimension that tensor parallelism shards, by parameter."""
    from pretrain.accounting import parameter_table

    return {name: p.partition_dim for name, p in parameter_table(cfg.model).items()}


