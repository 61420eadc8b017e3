"""Memory of one GPU at the peak of a training step, by part, before anything runs (docs/accounting.md).

Estimates for eager execution on GPUs with fused attention and norms; torch.compile needs less activation memory. Bytes
are those of tensors: the allocator's fragmentation and the CUDA context (about half a GiB) come on top.

Symbols: B rows of a micro-batch, S sequence, d width, V vocabulary, k gradient loops, P pipeline ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from pretrain.accounting import parameter_table, readouts_per_row, recomputes_head
from pretrain.planning import FP32_BYTES, Plan, backprop_loops, optimizer_state_bytes

Parts = dict[str, float]
"""Bytes by part."""


def peak_memory(plan: Plan, pipeline_rank: int = 0) -> Parts:
    """Bytes by part of a GPU of this pipeline rank when they add up to most: in backward of a micro-batch with the
    largest k, or in the optimizer's step."""
    in_backward, in_step = _Activations(plan, pipeline_rank).parts(), _optimizer_step(plan, pipeline_rank)
    return _model_state(plan, pipeline_rank) | _larger(in_backward, in_step)


def activation_memory(plan: Plan, pipeline_rank: int = 0) -> Parts:
    """The part of `peak_memory` that one micro-batch's forward and backward need beside parameters and gradients."""
    return _Activations(plan, pipeline_rank).parts()


def _larger(first: Parts, second: Parts) -> Parts:
    return max(first, second, key=lambda parts: sum(parts.values()))


def _model_state(plan: Plan, pipeline_rank: int) -> Parts:
    """fp32 parameters, gradients and optimizer state as DeepSpeed 0.19.8 keeps them.

    Stages 1 and 2 hold the parameters whole, and this rank's partition of them a second time for the optimizer; stage 3
    holds partitions only and gathers each module, and the next one, for its use.
    """
    cfg, zero, table = plan.cfg, plan.cfg.zero, parameter_table(plan.cfg.model)
    held, stage = plan.parameters_of(pipeline_rank), max(1, plan.cfg.zero.stage)
    numel = sum(held.values())
    shard = numel / plan.data_ranks
    parts = {
        "parameters": FP32_BYTES * (numel if stage < 3 else shard),
        "optimizer's copy": FP32_BYTES * shard if stage < 3 else 0,
        "gradients": FP32_BYTES * (numel if stage == 1 else shard),
        "optimizer state": sum(n * optimizer_state_bytes(cfg, table[name]) for name, n in held.items())
        / plan.data_ranks,
    }
    if stage >= 2:
        parts["reduction buckets"] = FP32_BYTES * min(zero.bucket_elements, numel) * (2 if zero.overlap_comm else 1)
    if stage == 3:
        parts["gathered parameters"] = FP32_BYTES * 2 * max(held.values())
    return parts


def _optimizer_step(plan: Plan, pipeline_rank: int) -> Parts:
    """What the step needs once the activations are gone: stage 1 reduces now, and gradients are flattened."""
    zero, numel = plan.cfg.zero, sum(plan.parameters_of(pipeline_rank).values())
    return {
        "reduction bucket of the step": FP32_BYTES * zero.bucket_elements if zero.stage <= 1 else 0,
        "flat gradient of the step": FP32_BYTES * numel / plan.data_ranks if zero.stage <= 2 else 0,
    }


@dataclass(frozen=True)
class _Activations:
    """What forward leaves for backward on one GPU, and the largest working set on top of it.

    `*_elements` are elements of the compute type per token of a micro-batch.
    """

    plan: Plan
    rank: int

    def parts(self) -> Parts:
        """Bytes by part at the worse of two moments: when backward begins at the readouts, or is in the loops."""
        per_element = self.plan.compute_bytes * self._tokens
        readout = per_element * self._readout_elements()
        cfg = self.plan.cfg
        per_token = cfg.model.recurrence.per_token
        readouts = readouts_per_row(self._grad_loops, cfg.loss.objective, per_token) if self._is_last else 0
        at_readouts = {"readouts": readouts * readout, "head": self._head_bytes() if self._is_last else 0}
        in_loops = {
            "readouts": max(0, readouts - 1) * readout,
            "recomputed": per_element * self._recomputed_elements() + self._cast_bytes(self._passes_in_piece, "core."),
            "gradients of shared weights": self._shared_gradient_bytes(),
        }
        two_phases = self.plan.cfg.parallel.pipeline > 1 and self.plan.work.no_grad_loops > 0
        between = self.plan.micro_batches if two_phases and self.rank == 0 else 0
        return {
            "prelude and look-ups": per_element * self._encode_elements() * self._micro_batches_in_flight,
            "loops": per_element * self._stored_elements() * self._loops_in_flight,
            "states between the phases": per_element * self._state_elements * between,
            "weights in bf16": self._stored_cast_bytes(),
        } | _larger(at_readouts, in_loops)

    # ---------------------------------------------------------------------------------------- what is there at a time

    @property
    def _is_last(self) -> bool:
        return self.rank == self.plan.cfg.parallel.pipeline - 1

    @property
    def _policy(self) -> str:
        return self.plan.cfg.train.activation_checkpointing

    @property
    def _tokens(self) -> int:
        return self.plan.cfg.train.micro_batch_size * self.plan.cfg.model.context_length

    @property
    def _core_layers(self) -> int:
        """Core layers of this rank."""
        return self.plan.cfg.model.core_layers // self.plan.cfg.parallel.pipeline

    @cached_property
    def _held(self) -> dict[str, int]:
        return self.plan.parameters_of(self.rank)

    @property
    def _grad_loops(self) -> int:
        """k of the deepest micro-batch."""
        recurrence = self.plan.cfg.model.recurrence
        bounds = [backprop_loops(self.plan.cfg)]
        if recurrence.max_loops is not None:
            bounds.append(recurrence.max_loops)
        if recurrence.distribution == "fixed":
            bounds.append(int(recurrence.mean_loops))
        return min(bounds)

    @property
    def _loops_in_flight(self) -> int:
        """Loops that wait for their backward: k. With a pipeline, what megatron-core's interleaved schedule starts
        before its first backward: 2 (P - 1 - rank) + (k - 1) P + 1."""
        pipeline, loops = self.plan.cfg.parallel.pipeline, self._grad_loops
        if pipeline == 1:
            return loops
        return min(self.plan.micro_batches * loops, 2 * (pipeline - 1 - self.rank) + (loops - 1) * pipeline + 1)

    @property
    def _micro_batches_in_flight(self) -> int:
        """Micro-batches whose encoded input waits for its backward: the schedule works in groups of P."""
        pipeline = self.plan.cfg.parallel.pipeline
        return 1 if pipeline == 1 else min(self.plan.micro_batches, 2 * pipeline)

    @property
    def _passes_in_piece(self) -> float:
        """Passes through this rank's core layers that backward recomputes, and holds, at a time."""
        several = min(self.plan.cfg.train.checkpoint_every_loops, self._grad_loops)
        return {"none": 0, "loop": 1, "every_k_loops": several, "layer": 1 / self._core_layers}[self._policy]

    # ------------------------------------------------------------------------------------------ elements and bytes

    @property
    def _sequence_share(self) -> int:
        """Ranks that share the sequence between the products."""
        parallel = self.plan.cfg.parallel
        return parallel.tensor if parallel.sequence_parallel else 1

    @property
    def _state_elements(self) -> float:
        return self.plan.cfg.model.width_of("core") / self._sequence_share

    def _layer_elements(self, part: str) -> float:
        """Of one layer, for its backward: inputs of norms and products, q, k, v, attention's output, MLP."""
        model, tensor = self.plan.cfg.model, self.plan.cfg.parallel.tensor
        width, channels = model.width_of(part), model.head_channels
        q, kv = model.heads_of(part) * channels, model.kv_heads_of(part) * channels
        feedback = model.recurrence.feedback if part == "core" else "none"
        norm_inputs = (4 if model.block == "sandwich" else 2) + (feedback == "residual")
        product_inputs = 2 + (feedback == "attention")  # of the whole sequence, also under sequence parallelism
        attention: float = (1 + model.qk_norm) * (q + kv) + kv + q
        if model.dropout > 0:  # fp32 softmax, the mask, and what is left in the compute type
            attention += self._attention_weights(part) * (1 + (FP32_BYTES + 1) / self.plan.compute_bytes)
        mlp = (4 if model.mlp == "swiglu" else 2) * model.ffn_width_of(part)
        return (norm_inputs / self._sequence_share + product_inputs) * width + (attention + mlp) / tensor

    def _attention_weights(self, part: str) -> int:
        """Of one token in one layer: dropout materialises them."""
        return self.plan.cfg.model.heads_of(part) * self.plan.cfg.model.context_length

    def _kept_layer_elements(self, part: str) -> float:
        """Of one layer, kept from forward to backward: its input alone where layers are checkpointed."""
        if self._policy == "layer":
            return self.plan.cfg.model.width_of(part) / self._sequence_share
        return self._layer_elements(part)

    def _value_elements(self, *parts: str) -> float:
        """Looked-up value embeddings of this rank's layers in `parts`."""
        tables = (n for name, n in self._held.items() if "value_table" in name and name.startswith(parts))
        return sum(tables) / self.plan.cfg.model.padded_vocab_size

    def _encode_elements(self) -> float:
        """Look-ups of this rank's layers; on the first one also prelude, e, its drive and h_0."""
        model, values = self.plan.cfg.model, self._value_elements("prelude", "core", "coda")
        if self.rank > 0:
            return values
        drive = {"diagonal": 2, "concat": 1}.get(model.recurrence.injection, 0)
        ends = 2 * model.width / self._sequence_share + (drive + 1) * self._state_elements
        return values + ends + model.prelude_layers * self._kept_layer_elements("prelude")

    def _stored_elements(self) -> float:
        """Of one loop, from forward to backward: the state, and all layers unless whole loops are recomputed.

        A pipeline rank keeps what it received and what it sent, each with the previous state where that goes along.
        """
        state = self._state_elements
        if self.plan.cfg.parallel.pipeline > 1:
            state *= 2 if self.plan.cfg.model.recurrence.feedback == "none" else 4
        if self._policy in ("loop", "every_k_loops"):
            return state * math.ceil(self._grad_loops / self._passes_in_piece) / self._grad_loops
        return state + self._core_layers * self._kept_layer_elements("core")

    def _recomputed_elements(self) -> float:
        """Of the piece whose backward runs: its activations, the temporary gradients of one MLP or attention, those of
        value embeddings, which wait until all loops are done."""
        model, tensor = self.plan.cfg.model, self.plan.cfg.parallel.tensor
        wide = 3 * model.ffn_width_of("core")
        if model.dropout > 0:  # of attention's weights, with fp32 gradients before and after the mask
            wide = max(wide, 2 * self._attention_weights("core") * FP32_BYTES // self.plan.compute_bytes)
        temporary = 2 * model.width_of("core") + wide / tensor
        temporary += self._value_elements("core", "coda")
        loop = self._core_layers * self._layer_elements("core") + self._state_elements
        return temporary + self._passes_in_piece * loop

    def _readout_elements(self) -> float:
        """Of one readout: coda, final norm, the head's input."""
        model = self.plan.cfg.model
        ends = model.width * (1 + 1 / self._sequence_share)
        return ends + model.coda_layers * self._kept_layer_elements("coda")

    def _head_bytes(self) -> float:
        """Logits of one chunk of tokens, and what the head's backward holds.

        Fused: the gradients of input and weight, which the forward pass makes, and an fp32 sum for the latter. Else
        fp32 logits, their exponentials and gradients, two more with a softcap, and the weight's gradient twice.
        """
        cfg, compute_bytes = self.plan.cfg, self.plan.compute_bytes
        vocab, width = cfg.model.padded_vocab_size / cfg.parallel.tensor, cfg.model.width
        chunk = min(cfg.loss.chunk_tokens, self._tokens) * vocab
        if recomputes_head(cfg):
            copies = 4 if cfg.model.logit_softcap is None else 6
            return FP32_BYTES * copies * chunk + (compute_bytes + 2 * FP32_BYTES) * vocab * width
        gradients = compute_bytes * width * (self._tokens + vocab) + FP32_BYTES * width * vocab
        return chunk * (compute_bytes + FP32_BYTES) + gradients

    def _products(self, *prefixes: str) -> int:
        """Elements of this rank's matrices that multiply and whose names begin so."""
        table = parameter_table(self.plan.cfg.model)
        return sum(n for name, n in self._held.items() if table[name].use == "product" and name.startswith(prefixes))

    def _cast_bytes(self, uses: float, *prefixes: str) -> float:
        """bf16 copies of matrices, of which autograd keeps one for each use."""
        return 2 * uses * self._products(*prefixes) if self.plan.cfg.train.precision == "bf16" else 0

    def _stored_cast_bytes(self) -> float:
        """Copies kept from forward to backward: outside the core, and in it where nothing is recomputed."""
        if self._policy == "layer":
            return 0
        outside = self._cast_bytes(self._micro_batches_in_flight, "prelude", "injection")
        outside += self._cast_bytes(1, "output_projection", "coda", "head")
        if self._is_last and self.plan.cfg.model.tie_embeddings and self.plan.cfg.train.precision == "bf16":
            outside += 2 * self._held["embedding.weight"]
        return outside + (self._cast_bytes(self._loops_in_flight, "core.") if self._policy == "none" else 0)

    def _shared_gradient_bytes(self) -> float:
        """fp32 sums over a weight's uses that autograd forms beside the gradients of earlier micro-batches: the core's
        over the loops, and the head's until that of the embedding it is tied to is known."""
        cfg = self.plan.cfg
        if self.plan.micro_batches == 1:
            return 0
        core = self._products("core.") if self._grad_loops > 1 else 0
        tied = self._held["embedding.weight"] if cfg.model.tie_embeddings and cfg.parallel.pipeline == 1 else 0
        return FP32_BYTES * (core + tied)
