"""What a configuration costs before it runs: work per step, communication, pipeline bubble, time (docs/accounting.md).

pretrain/memory.py adds the memory of a GPU. Symbols: B rows of a micro-batch, S sequence, d width, n and k loops
without and with gradient, M micro-batches of a rank per step, P pipeline ranks, D data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pretrain.accounting import (
    Parameter,
    StepWork,
    auxiliary_flops,
    forward_flops,
    model_flops,
    parameter_table,
    readouts_per_row,
)
from pretrain.config.schema import Config
from pretrain.sampling.distributions import expected_loops, loop_thresholds

FP32_BYTES = 4
_ADAMW_STATE_BYTES, _MUON_STATE_BYTES = 8, 4  # two moments; one momentum


def expected_work(cfg: Config) -> StepWork:
    """Mean work of one step of the global batch at the full mean loop count, after any curriculum."""
    thresholds = _thresholds(cfg, rows=1)
    most = backprop_loops(cfg)
    no_grad, grad = expected_loops(thresholds, most)
    # P(k >= j) = P(T >= j): the mean of a function of k is the sum of its increments times the chance to get there.
    at_least = [1.0, *(1 - p for p in thresholds[: most - 1])]

    def mean(of: Callable[[int], float]) -> float:
        counts = [0.0, *(of(k) for k in range(1, most + 1))]
        return sum(p * (counts[j] - counts[j - 1]) for j, p in enumerate(at_least, start=1))

    readouts = mean(lambda k: readouts_per_row(k, cfg.loss.objective, cfg.model.recurrence.per_token))
    auxiliary = mean(lambda k: auxiliary_flops(cfg, [k]))
    rows = cfg.train.global_batch_size
    return StepWork(rows, rows * no_grad, rows * grad, rows * readouts, rows * auxiliary)


def _thresholds(cfg: Config, rows: int) -> NDArray[np.float64]:
    """P(T <= t) for t = 1, 2, ... of the deepest of `rows` rows; a row runs to its deepest token."""
    recurrence = cfg.model.recurrence
    fixed_loops = backprop_loops(cfg) if recurrence.sampled_loops == "no_grad" else 0
    one = loop_thresholds(
        recurrence.distribution, recurrence.mean_loops, recurrence.lognormal_sigma, recurrence.max_loops, fixed_loops
    )
    independent = {"sequence": rows, "batch": 1, "token": rows * cfg.model.context_length}
    return one ** independent[recurrence.granularity]


def backprop_loops(cfg: Config) -> int:
    """mu_b, the most loops that get a gradient at the full mean loop count."""
    return cfg.model.recurrence.most_backprop_loops


def checkpoint_bytes(cfg: Config) -> int:
    """Size of one checkpoint: fp32 parameters and optimizer state, the same in every layout."""
    return sum(p.numel * (FP32_BYTES + optimizer_state_bytes(cfg, p)) for p in parameter_table(cfg.model).values())


def optimizer_state_bytes(cfg: Config, parameter: Parameter) -> int:
    """Bytes of optimizer state per element of `parameter`."""
    muon = cfg.optimizer.name == "muon" and parameter.muon
    return _MUON_STATE_BYTES if muon else _ADAMW_STATE_BYTES


@dataclass(frozen=True)
class Plan:
    """A configuration on `num_gpus` GPUs. The layout must be one that `pretrain.config.validate` accepts."""

    cfg: Config
    num_gpus: int

    @property
    def data_ranks(self) -> int:
        """D, the data-parallel ranks."""
        return self.num_gpus // (self.cfg.parallel.tensor * self.cfg.parallel.pipeline)

    @property
    def micro_batches(self) -> int:
        """M, micro-batches of a rank per step."""
        train = self.cfg.train
        return train.global_batch_size // (self.data_ranks * train.micro_batch_size)

    @cached_property
    def work(self) -> StepWork:
        """Mean work of a step, all ranks together."""
        return expected_work(self.cfg)

    @property
    def loops_per_row(self) -> tuple[float, float]:
        """Mean n and k of a row."""
        return self.work.no_grad_loops / self.work.rows, self.work.grad_loops / self.work.rows

    def parameters_of(self, pipeline_rank: int) -> dict[str, int]:
        """Elements of each parameter that a GPU of this pipeline rank works with: its tensor-parallel share."""
        tensor = self.cfg.parallel.tensor
        return {
            name: p.numel // (tensor if p.partition_dim is not None else 1)
            for name, p in parameter_table(self.cfg.model).items()
            if self._holds(pipeline_rank, name)
        }

    def _holds(self, pipeline_rank: int, name: str) -> bool:
        parallel, model = self.cfg.parallel, self.cfg.model
        first, last = pipeline_rank == 0, pipeline_rank == parallel.pipeline - 1
        part, index = name.split(".")[:2]
        if part == "core":
            return int(index) // (model.core_layers // parallel.pipeline) == pipeline_rank
        if part in ("output_projection", "coda", "final_norm", "head", "auxiliary"):
            return last
        return first or (part == "embedding" and last and model.tie_embeddings)

    # ------------------------------------------------------------------------------------------------ communication

    def communication(self) -> dict[str, float]:
        """Bytes that the busiest GPU sends per step: ZeRO's over the data ranks, tensor's, pipeline's."""
        parallel = self.cfg.parallel
        traffic = {"zero": max(self._zero_bytes(rank) for rank in range(parallel.pipeline))}
        if parallel.tensor > 1:
            traffic["tensor"] = max(self._tensor_bytes(rank) for rank in range(parallel.pipeline))
        if parallel.pipeline > 1:
            traffic["pipeline"] = self._pipeline_bytes()
        return traffic

    def _zero_bytes(self, pipeline_rank: int) -> float:
        """Reduce-scatter of fp32 gradients once (stage 1) or per micro-batch; all-gather of updated parameters once, or
        (stage 3) at every use."""
        held = self.parameters_of(pipeline_rank)
        ring = FP32_BYTES * (self.data_ranks - 1) / self.data_ranks
        stage, reductions = self.cfg.zero.stage, self.micro_batches if self.cfg.zero.stage >= 2 else 1
        core = sum(n for name, n in held.items() if name.startswith("core."))
        others = sum(held.values()) - core
        gathers: float = core + others
        if stage == 3:
            # Loop counts that change invalidate DeepSpeed's trace of uses, so nothing is kept from one to the next.
            no_grad, grad = self.loops_per_row
            again, others_again = self._recomputations
            gathers = self.micro_batches * ((2 + others_again) * others + (no_grad + (2 + again) * grad) * core)
        return ring * (reductions * (core + others) + gathers)

    def _tensor_bytes(self, pipeline_rank: int) -> float:
        """Two all-reduces per layer and pass, of [B, S, d] in the compute type (a reduce-scatter and an all-gather each
        under sequence parallelism: the same bytes)."""
        model, parallel = self.cfg.model, self.cfg.parallel
        first, last = pipeline_rank == 0, pipeline_rank == parallel.pipeline - 1
        no_grad, grad = self.loops_per_row
        again, outer_again = self._recomputations
        core = model.core_layers / parallel.pipeline * (no_grad + (2 + again) * grad) * model.width_of("core")
        outer = first * model.prelude_layers + last * model.coda_layers * self.work.readouts / self.work.rows
        elements = 2 * (core + outer * (2 + outer_again) * model.width)
        elements += first * model.width + last * model.width  # embedding forward, head backward
        if model.recurrence.feedback.startswith("attention"):  # the state's gradient from the queries
            layers = 1 if model.recurrence.feedback == "attention_first" else model.core_layers / parallel.pipeline
            elements += layers * grad * model.width_of("core")
        ring = 2 * (parallel.tensor - 1) / parallel.tensor * self.compute_bytes
        return ring * elements * self._rank_tokens

    def _pipeline_bytes(self) -> float:
        """The state of every row at each hop of the deepest micro-batch's loops, forward and (gradient loops) backward;
        twice where the previous loop's state goes along."""
        model, parallel = self.cfg.model, self.cfg.parallel
        rank_rows = self.cfg.train.global_batch_size // self.data_ranks
        no_grad, grad = expected_loops(_thresholds(self.cfg, rank_rows), backprop_loops(self.cfg))
        carried = 1 if model.recurrence.feedback == "none" else 2
        per_token = (no_grad + 2 * grad) * model.width_of("core") * carried * self.compute_bytes
        return per_token * self._rank_tokens / (parallel.tensor if parallel.sequence_parallel else 1)

    @property
    def _recomputations(self) -> tuple[int, int]:
        """Forward passes repeated in backward: of the core's gradient loops, and of prelude and coda."""
        policy = self.cfg.train.activation_checkpointing
        return int(policy != "none"), int(policy == "layer")

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of the compute type."""
        return 2 if self.cfg.train.precision == "bf16" else FP32_BYTES

    @property
    def _rank_tokens(self) -> float:
        return self.cfg.tokens_per_step / self.data_ranks

    # --------------------------------------------------------------------------------------------------------- time

    @property
    def bubble(self) -> float:
        """Share of a step that pipeline ranks idle while the two phases fill and drain.

        A phase of t loops has M t chunks per rank and P - 1 slots of fill or drain: (P - 1) / (M t + P - 1). A slot
        costs 1 without gradient and 3 with.
        """
        idle = self.cfg.parallel.pipeline - 1
        no_grad, grad = self.loops_per_row
        phases = [(loops * self.micro_batches, cost) for loops, cost in ((no_grad, 1), (grad, 3)) if loops > 0]
        return sum(idle * cost for _, cost in phases) / sum((busy + idle) * cost for busy, cost in phases)

    @property
    def balance(self) -> float:
        """Mean over largest FLOPs of the pipeline ranks: prelude and head stand on the first and the last alone."""
        flops, pipeline, work = forward_flops(self.cfg.model), self.cfg.parallel.pipeline, self.work
        core = (work.no_grad_loops + 3 * work.grad_loops) * flops.loop / pipeline
        ranks = [core] * pipeline
        ranks[0] += 3 * work.rows * flops.encode
        ranks[-1] += 3 * work.readouts * flops.readout
        return sum(ranks) / pipeline / max(ranks)

    def step_sec(self, peak_flops: float, mfu: float) -> float:
        """Seconds of a step where a GPU reaches `mfu` of `peak_flops` while it computes; bubble and balance on top."""
        efficiency = mfu * (1 - self.bubble) * self.balance
        return model_flops(self.cfg.model, self.work) / (self.num_gpus * peak_flops * efficiency)
