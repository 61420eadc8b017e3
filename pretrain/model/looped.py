"""The looped language model.

    x   = embed(tokens)                       h_0 = initial state
    e   = prelude(x), normalised if set       h_t = core(inject(h_{t-1}, e)),  t = 1..T
    y   = coda(C h_T);  logits = head(Norm(y))

Rows of a training batch come in descending order of their loop counts, so the rows that a loop still needs are a
prefix: a row with fewer loops joins late, and all rows end together. Exact: a row sees exactly its own T updates.
Where counts belong to tokens, a row runs to its deepest token, and the others keep their last state meanwhile.

Shapes: B rows, b active rows (a prefix), S sequence, s local share, D width, d_h core width, V vocabulary, T loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config.model import ModelConfig
from pretrain.config.schema import LossConfig
from pretrain.model.attention_mask import Context, Segments, make_context
from pretrain.model.auxiliary import BlindDirections, Heads
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.cache import LoopCache
from pretrain.model.compiled import CompiledStep
from pretrain.model.counter import StateKey
from pretrain.model.dropout import Dropout, dropout_noise
from pretrain.model.injection import Drive, Injection
from pretrain.model.layers import Layer, Linear, Part, RMSNorm, mark
from pretrain.model.loss import HeadSettings, Totals, chunked_losses, head_logits
from pretrain.model.objective import LossOutput, Objective
from pretrain.model.ops import TensorOps
from pretrain.model.state import initial_state

Edit = Callable[[int, Tensor, Tensor], Tensor]
"""(loop from 1, state before it, state after it) -> the state to go on with."""


@dataclass(frozen=True)
class Stage:
    """The part of the model that one pipeline rank holds; by default all of it."""

    first: bool = True
    last: bool = True
    core_layers: range | None = None


class LoopInputs(NamedTuple):
    """What all loops of a forward share."""

    drive: Drive
    ctx: Context
    values: tuple[Tensor | None, ...]
    """Looked-up value embeddings of the core layers, [B, S, K, C] each."""

    def rows(self, count: int) -> LoopInputs:
        """Of the first `count` rows."""
        drive = Drive(self.drive.drive[:count], self.drive.decay)
        return LoopInputs(drive, self.ctx.rows(count), tuple(v if v is None else v[:count] for v in self.values))

    def in_loop(self, number: int) -> LoopInputs:
        """Of one loop, as `Context.in_loop`."""
        return self._replace(ctx=self.ctx.in_loop(number))


class PositionEmbedding(nn.Module):
    """Learned positions: [1 or B, s] -> [1 or B, s, D]."""

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        self.weight = mark(nn.Parameter(torch.empty(cfg.context_length, cfg.width)), ops)

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions, self.weight)


class VocabularyMatrix(nn.Module):
    """The vocabulary-sharded table [V, D] of the token embedding, the head, or both.

    forward(use, ...) returns use(weight, ...): every use of the matrix passes through the module's call, where ZeRO-3
    gathers its parameters.
    """

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        self.weight = mark(nn.Parameter(torch.empty(cfg.padded_vocab_size // ops.size, cfg.width)), ops, 0)

    def forward(self, use: Callable[..., Any], *args: Any) -> Any:
        return use(self.weight, *args)


class LoopedLM(nn.Module):
    """One model for every family (pretrain/config/families.py).

    `stage` restricts it to the part of one pipeline rank; names of parameters are the same in every layout.
    """

    # None in families and on pipeline ranks that have no use for it; what uses one runs only where it exists.
    embedding: Any
    injection: Any
    final_norm: Any
    head: Any
    auxiliary: Any

    def __init__(self, cfg: ModelConfig, ops: TensorOps | None = None, stage: Stage | None = None) -> None:
        super().__init__()
        self.cfg, self.ops, self.stage = cfg, ops or TensorOps(), stage or Stage()
        self.checkpointing, self.loops_per_checkpoint = "none", 1
        self.compute_dtype = torch.float32
        recurrence, ops, stage = cfg.recurrence, self.ops, self.stage
        self.embedding = VocabularyMatrix(cfg, ops) if stage.first or (stage.last and cfg.tie_embeddings) else None
        learned = stage.first and cfg.positions == "learned"
        self.position_embedding = PositionEmbedding(cfg, ops) if learned else None
        self.prelude = self._layers("prelude", range(cfg.prelude_layers if stage.first else 0))
        self.prelude_norm = RMSNorm(cfg.width, cfg, ops) if stage.first and recurrence.prelude_norm else nn.Identity()
        self.injection = Injection(cfg, ops) if stage.first else None
        core = range(cfg.core_layers) if stage.core_layers is None else stage.core_layers
        self.core = self._layers("core", core)
        needs_projection = stage.last and recurrence.output_projection
        self.output_projection = Linear(cfg.width_of("core"), cfg.width, ops) if needs_projection else nn.Identity()
        self.coda = self._layers("coda", range(cfg.coda_layers if stage.last else 0))
        has_norm = stage.last and (recurrence.readout != "raw" or cfg.norm_before_coda)
        self.final_norm = RMSNorm(cfg.width, cfg, ops) if has_norm else None
        untied = stage.last and not cfg.tie_embeddings
        self.head = VocabularyMatrix(cfg, ops) if untied else None
        self.auxiliary = Heads(cfg, ops) if stage.last else None
        self._blind_directions = BlindDirections()
        self.dropout = Dropout(cfg.dropout, "embedding")
        self._core_step: Callable[..., Tensor] = self.core_step

    def _layers(self, part: Part, indices: range) -> nn.ModuleDict:
        return nn.ModuleDict({str(i): Layer(self.cfg, part, i, self.ops) for i in indices})

    # ---------------------------------------------------------------------------------------------- parts of a forward

    @property
    def needs_first(self) -> bool:
        """Whether a row's first loop differs from later ones."""
        recurrence = self.cfg.recurrence
        return recurrence.feedback != "none" or recurrence.interloop_norm

    def look_up_values(self, part: Part, tokens: Tensor) -> tuple[Tensor | None, ...]:
        """Value embeddings of each layer of `part`: [B, S, K, C] in the compute type, or None."""
        tables = [layer.attention.value_table for layer in getattr(self, part).values()]
        return tuple(t if t is None else t(tokens).to(self.compute_dtype) for t in tables)

    def run_layers(
        self,
        part: Part,
        x: Tensor,
        ctx: Context,
        values: Sequence[Tensor | None],
        feedback: Tensor | None = None,
        first: Tensor | None = None,
        cache: LoopCache | None = None,
        loop: int = 0,
    ) -> Tensor:
        """x [B, s, D] through the layers of `part`."""
        for (name, layer), value in zip(getattr(self, part).items(), values, strict=True):
            slot = None if cache is None else cache.slot(part, int(name), loop)
            args = (x, ctx, value, feedback, first, slot)
            if self.checkpointing == "layer" and torch.is_grad_enabled():
                x = self.checkpointed(layer, *args)
            else:
                x = layer(*args)
        return x

    def checkpointed(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), computed again in backward instead of keeping its intermediate results."""
        # Nothing inside draws from a generator; saving them costs a device synchronisation per call.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    def encode(self, tokens: Tensor, ctx: Context, positions: Tensor, cache: LoopCache | None = None) -> Tensor:
        """e [B, s, D] in the compute type: embedding, prelude and its norm."""
        x = self.embedding(self.ops.embed, tokens)
        if self.cfg.scale_embeddings:
            x = x * self.cfg.width**0.5
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        x = self.dropout(x.to(self.compute_dtype), ctx.local_noise(self.ops))
        x = self.run_layers("prelude", x, ctx, self.look_up_values("prelude", tokens), cache=cache)
        return self.prelude_norm(x)

    def core_step(
        self, h: Tensor, inputs: LoopInputs, first: Tensor | None, cache: LoopCache | None = None, loop: int = 0
    ) -> Tensor:
        """One loop: h [b, s, d_h] -> h of the next loop. `first` [b, 1 or s, 1] marks rows in their first loop."""
        u, feedback = self.injection(h, inputs.drive, first)
        fed = feedback if self.cfg.recurrence.feedback != "none" else None
        return self.run_layers("core", u, inputs.ctx, inputs.values, fed, first, cache, loop)

    def decode(
        self,
        h: Tensor,
        ctx: Context,
        values: Sequence[Tensor | None],
        cache: LoopCache | None = None,
        last: bool = True,
    ) -> Tensor:
        """State h [B, s, d_h] -> the head's input [B, S, D]: C, coda, and the readout's norm."""
        y = self.output_projection(h)
        if self.cfg.norm_before_coda:
            y = self.final_norm(y)
        y = self.run_layers("coda", y, ctx, values, cache=cache)
        readout = self.cfg.recurrence.readout
        if readout == "norm" or (readout == "final_norm" and last):
            y = self.final_norm(y)
        return y

    def head_settings(self, cfg: LossConfig | None = None) -> HeadSettings:
        """How hidden states become token losses; without `cfg` the plain cross entropy."""
        cfg = cfg or LossConfig()
        return HeadSettings(
            self.cfg.vocab_size, self.cfg.logit_softcap, cfg.z_loss, cfg.label_smoothing, cfg.chunk_tokens
        )

    @property
    def vocabulary_head(self) -> VocabularyMatrix:
        """The output matrix: the embedding's where they are tied."""
        matrix: VocabularyMatrix = self.embedding if self.head is None else self.head
        return matrix

    def blind_directions(self, step: int, rank: int) -> Tensor:
        """The `rank` directions of the state that the readout reads least: fp64 [d_h, rank], made once per step."""
        return self._blind_directions.of(self, step, rank)

    def compile_core(self, **options: Any) -> None:
        """Compiles the step of one loop, with the loop outside; `options` are torch.compile's."""
        self._core_step = CompiledStep(self, **options)

    # --------------------------------------------------------------------------------------------------------- training

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`training_loss`, `loop_losses` or `logits` by name: what wraps the model hooks into its call."""
        return getattr(self, method)(*args, **kwargs)

    def training_loss(
        self, batch: MicroBatch, loops: Loops, key: StateKey, loss_cfg: LossConfig, totals: Totals
    ) -> LossOutput:
        """This micro-batch's share of the training loss, with truncated backpropagation through the loops."""
        tokens, ctx = batch.tokens, self.context_of(batch, key)
        e, h_0 = self.start(batch, ctx, key)
        inputs = LoopInputs(self.injection.input(e), ctx, self.look_up_values("core", tokens))
        values = self.look_up_values("coda", tokens)
        objective = Objective(self, batch, loops, loss_cfg, totals, ctx, values, key.step)
        local = loops.local(self.ops.local_sequence(tokens.shape[1]))
        for loop, state in enumerate(self.run_loops(h_0, inputs, local)):
            objective.add(loop, state)
        return objective.output()

    def context_of(self, batch: MicroBatch, key: StateKey | None) -> Context:
        """What layers and loops share in a training batch; `key` None is evaluation, which drops nothing."""
        length = batch.tokens.shape[1]
        drops = self.training and self.cfg.dropout > 0
        return make_context(
            self.cfg, length, batch.tokens.device, self.compute_dtype,
            positions=batch.positions, document_ids=batch.document_ids, segments=batch.segments,
            noise=dropout_noise(key, length) if drops and key is not None else None,
        )  # fmt: skip

    def start(self, batch: MicroBatch, ctx: Context, key: StateKey | None) -> tuple[Tensor, Tensor]:
        """(e [B, s, D], h_0 [B, s, d_h]) of a batch; `key` None is evaluation."""
        length = batch.tokens.shape[1]
        places = torch.arange(length, device=batch.tokens.device)[None, self.ops.local_sequence(length)]
        positions = places if batch.positions is None else batch.positions[:, self.ops.local_sequence(length)]
        e = self.encode(batch.tokens, ctx, positions)
        if batch.initial_state is not None:
            return e, batch.initial_state.to(e.dtype)
        return e, initial_state(self.cfg, e, key, positions if key is None else places)

    def run_loops(self, h_0: Tensor, inputs: LoopInputs, loops: Loops) -> Iterator[Tensor]:
        """Yields the state [b, s, d_h] after each gradient loop; the loops before run without gradient.

        The state is detached where the gradient loops begin, in both its uses (injection and feedback).
        """
        state = h_0[:0]
        with torch.no_grad():
            for loop in range(len(loops.no_grad)):
                updated = self._update(state, h_0, inputs, loops, loop, grad=False)
                state = self._advance(state, updated, h_0, loops, loop, grad=False)
        state = self._at_grad_loops(state, h_0, loops)
        group = {"loop": 1, "every_k_loops": self.loops_per_checkpoint}.get(self.checkpointing)
        size = group or len(loops.grad)
        for start in range(0, len(loops.grad), size):
            part = range(start, min(start + size, len(loops.grad)))

            def segment(state: Tensor, part: range = part) -> tuple[Tensor, ...]:
                updates: list[Tensor] = []
                for loop in part:
                    if updates:
                        state = self._advance(state, updates[-1], h_0, loops, loop - 1, grad=True)
                    updates.append(self._update(state, h_0, inputs, loops, loop, grad=True))
                return tuple(updates)

            # Recomputation stops at the last tensor that backward needs, which under ZeRO-3 must lie in the same module
            # on all ranks: they gather what it leaves behind together. So what waits is put back outside.
            updates = self.checkpointed(segment, state) if group and torch.is_grad_enabled() else segment(state)
            for loop, updated in zip(part, updates, strict=True):
                state = self._advance(state, updated, h_0, loops, loop, grad=True)
                yield state

    def _at_grad_loops(self, state: Tensor, h_0: Tensor, loops: Loops) -> Tensor:
        """The state where the gradient loops begin: a constant, except that what had no update yet still is h_0.

        With state_init=input h_0 depends on parameters; they get a gradient (zero) also where no row begins here.
        """
        started = loops.no_grad[-1].active if loops.no_grad else 0
        state = state[:started]
        if not h_0.requires_grad:
            return state
        updated = torch.ones((), dtype=torch.bool, device=h_0.device)
        if loops.tokens is not None:
            updated = loops.tokens.no_grad[:started, :, None] > 0
        return torch.where(updated, state, h_0[:started])

    def _update(self, state: Tensor, h_0: Tensor, inputs: LoopInputs, loops: Loops, loop: int, grad: bool) -> Tensor:
        """The core step of one loop, on the rows so far and newcomers with their h_0."""
        count = (loops.grad if grad else loops.no_grad)[loop].computed
        h = _join(state, h_0, count)
        own = inputs.rows(count).in_loop(loops.number(loop, grad))
        return self._core_step(h, own, self.in_first_loop(loops, loop, grad, h.device))

    def _advance(self, state: Tensor, updated: Tensor, h_0: Tensor, loops: Loops, loop: int, grad: bool) -> Tensor:
        """The state after a loop: `updated`, except that what waits keeps its own.

        What waits passes through the core with the rest: rows beyond the active ones, and tokens that have had their
        updates of this phase, which serve keys and values from the state that they keep (`TokenLoops`). Rows do not see
        each other and may join late; tokens do, so within a row none does. The discarded update stays in the graph with
        a gradient of zero: under ZeRO-3 a rank without active rows still gives every parameter its gradient.
        """
        waiting = self._waiting(loops, loop, grad, updated.device)
        return updated if waiting is None else torch.where(waiting, _join(state, h_0, len(updated)), updated)

    def in_first_loop(self, loops: Loops, loop: int, grad: bool, device: torch.device) -> Tensor | None:
        """What has had no update so far, bool [b, 1 or s, 1]; None where nothing depends on it."""
        step = (loops.grad if grad else loops.no_grad)[loop]
        if not self.needs_first:
            return None
        if loops.tokens is not None:
            return (loops.tokens.updates_before(loop, grad, step.computed) == 0)[..., None]
        return torch.arange(step.computed, device=device)[:, None, None] >= step.first

    def _waiting(self, loops: Loops, loop: int, grad: bool, device: torch.device) -> Tensor | None:
        """What waits in this loop, bool [b, 1 or s, 1]; None where nothing does."""
        step = (loops.grad if grad else loops.no_grad)[loop]
        if loops.tokens is not None:
            return loops.tokens.waiting(loop, grad, step.computed)[..., None]
        if step.active == step.computed:
            return None
        return torch.arange(step.computed, device=device)[:, None, None] >= step.active

    # ------------------------------------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def states(
        self,
        tokens: Tensor,
        num_loops: int,
        *,
        document_ids: Tensor | None = None,
        segments: Segments | None = None,
        positions: Tensor | None = None,
        key_valid: Tensor | None = None,
        state: Tensor | None = None,
        cache: LoopCache | None = None,
        edit: Edit | None = None,
    ) -> Iterator[tuple[Tensor, Context]]:
        """Yields (h_t [B, s, d_h], context) for t = 1..num_loops; deterministic, each row on its own.

        `edit(t, h_{t-1}, h_t)` is what takes the place of h_t, for this loop's readout and for the next loop.
        """
        length, past = tokens.shape[1], 0 if cache is None else cache.length
        places = torch.arange(past, past + length, device=tokens.device)[None]
        positions = places if positions is None else positions
        ctx = make_context(
            self.cfg, length, tokens.device, self.compute_dtype,
            positions=positions, document_ids=document_ids, segments=segments, key_valid=key_valid, past=past,
        )  # fmt: skip
        local = self.ops.local_sequence(length)
        e = self.encode(tokens, ctx, positions[:, local], cache)
        h = initial_state(self.cfg, e, None, positions[:, local]) if state is None else state.to(e.dtype)
        inputs = LoopInputs(self.injection.input(e), ctx, self.look_up_values("core", tokens))
        for t in range(num_loops):
            first = torch.full((h.shape[0], 1, 1), t == 0, device=h.device) if self.needs_first else None
            before = h
            h = self._core_step(h, inputs, first) if cache is None else self.core_step(h, inputs, first, cache, t)
            h = h if edit is None else edit(t + 1, before, h)
            yield h, ctx

    @torch.no_grad()
    def observe(
        self, see: Callable[[int, Tensor, Context], None], tokens: Tensor, num_loops: int, **kwargs: Any
    ) -> None:
        """Calls see(t, h_t [B, s, d_h], context) for t = 1 .. num_loops; keywords as in `states`."""
        for t, (h, ctx) in enumerate(self.states(tokens, num_loops, **kwargs), start=1):
            see(t, h, ctx)

    @torch.no_grad()
    def logits(self, tokens: Tensor, num_loops: int | None = None, **kwargs: Any) -> Tensor:
        """fp32 logits [B, S, vocab_size] after `num_loops` loops (default: mu); keywords as in `states`."""
        num_loops = num_loops or self.cfg.recurrence.default_loops
        for h, ctx in self.states(tokens, num_loops, **kwargs):
            last = h, ctx
        y = self.decode(*last, self.look_up_values("coda", tokens), kwargs.get("cache"))
        return self.readout_logits(y)

    def readout_logits(self, y: Tensor) -> Tensor:
        """Decoded states [B, s, D] -> fp32 logits over the whole vocabulary [B, S, vocab_size]."""
        return self._whole_logits(self.ops.enter(y))

    def _whole_logits(self, y: Tensor) -> Tensor:
        """fp32 [..., D] -> [..., vocab_size], the same on all tensor-parallel ranks."""
        logits = self.vocabulary_head(head_logits, y, self.head_settings(), self.ops)
        return self.ops.gather_vocab(logits)[..., : self.cfg.vocab_size]

    @torch.no_grad()
    def loop_losses(self, tokens: Tensor, labels: Tensor, num_loops: Sequence[int], **kwargs: Any) -> Tensor:
        """Cross entropy of each token at each of `num_loops`, from one pass: fp32 [len(num_loops), B, S].

        tokens, labels [B, S]; labels below 0 give 0. Readouts add only C, coda and head.
        """
        return self._at_loops(self.readout_losses, tokens, labels, num_loops, **kwargs)

    @torch.no_grad()
    def loop_scores(
        self, tokens: Tensor, labels: Tensor, num_loops: Sequence[int], candidates: Sequence[int] = (), **kwargs: Any
    ) -> Tensor:
        """`loop_losses`, and 1 where the label is the most likely token of `candidates` (empty: of all).

        [len(num_loops), 2, B, S].
        """
        readout = partial(self.readout_scores, candidates=candidates)
        return self._at_loops(readout, tokens, labels, num_loops, **kwargs)

    def _at_loops(
        self, readout: Callable[..., Tensor], tokens: Tensor, labels: Tensor, num_loops: Sequence[int], **kwargs: Any
    ) -> Tensor:
        """`readout` of the states after each of `num_loops`, stacked."""
        values = self.look_up_values("coda", tokens)
        found = {}
        for t, (h, ctx) in enumerate(self.states(tokens, max(num_loops), **kwargs), start=1):
            if t in num_loops:
                found[t] = readout(h, ctx, values, labels)
        return torch.stack([found[t] for t in num_loops])

    def readout_losses(self, h: Tensor, ctx: Context, values: Sequence[Tensor | None], labels: Tensor) -> Tensor:
        """Cross entropy of each token by the readout of a state h [B, s, d_h]: fp32 [B, S]."""
        y = self.ops.enter(self.decode(h, ctx, values)).flatten(0, 1)
        losses: Tensor = self.vocabulary_head(chunked_losses, y, labels.flatten(), self.head_settings(), self.ops)
        return losses.view(labels.shape)

    def readout_scores(
        self, h: Tensor, ctx: Context, values: Sequence[Tensor | None], labels: Tensor, candidates: Sequence[int] = ()
    ) -> Tensor:
        """(cross entropy, label is the most likely candidate) of each token: [2, B, S], 0 where labels are below 0.

        Only labelled tokens pass the head, in one call whose logits are whole: for few labels in long rows.
        """
        y = self.ops.enter(self.decode(h, ctx, values))
        valid = labels >= 0
        logits, wanted = self._whole_logits(y[valid]), labels[valid]
        scores = torch.zeros(2, *labels.shape, dtype=logits.dtype, device=labels.device)
        scores[0, valid] = F.cross_entropy(logits, wanted, reduction="none")
        if candidates:
            ids = torch.tensor(candidates, device=logits.device)
            best = ids[logits[:, ids].argmax(-1)]
        else:
            best = logits.argmax(-1)
        scores[1, valid] = (best == wanted).to(logits.dtype)
        return scores


def _join(state: Tensor, h_0: Tensor, count: int) -> Tensor:
    """The state of the first `count` rows: those so far, and newcomers with their h_0."""
    joined = state.shape[0]
    return state if joined == count else torch.cat((state, h_0[joined:count]))
