"""The looped model as a circular pipeline: every loop runs over all pipeline ranks.

Rank r holds core layers [r R / P, (r + 1) R / P) once; the first rank also embedding, prelude and injection, the last
one C, coda and head. Virtual chunk t of the interleaved schedule is loop t: the T chunks of a rank share its weights,
and T may change with every step. A step has two phases (a loop without gradient inside a normal schedule would send no
gradient, and its neighbour would wait for ever):

1. loops without gradient: a forward-only pass; the last rank hands the states to the first one;
2. gradient loops: a normal pass with backward.

Micro-batches come in order of depth. One with fewer loops than the deepest joins late: before that its state passes
through the chunks untouched. Within a micro-batch, rows that have not joined are carried and not computed.

What does not depend on the loop (Bbar e, Abar, value embeddings) is computed in chunk 0. Later chunks of the rank use
detached copies, whose gradients are handed to the originals in chunk 0's backward, which comes last.

Shapes: B rows of a micro-batch, s local share of the sequence, d_h width of the state. Between ranks travel
[c B, s, d_h]: the state, and with feedback (c = 2) also the previous loop's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config.schema import LossConfig
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.injection import Drive
from pretrain.model.looped import LoopedLM, Stage
from pretrain.model.loss import Totals
from pretrain.model.objective import Objective
from pretrain.parallel.megatron import Layout, circular_schedule
from pretrain.sampling import LoopStep


def stage_of(num_core_layers: int, layout: Layout) -> Stage:
    """This pipeline rank's part of the model."""
    share, rank = num_core_layers // layout.pipeline_size, layout.pipeline_rank
    return Stage(
        first=rank == 0,
        last=rank == layout.pipeline_size - 1,
        core_layers=range(rank * share, (rank + 1) * share),
    )


class _HandBack(torch.autograd.Function):
    """Identity on x whose backward gives `originals` the gradients that later chunks left on their detached copies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, copies: Sequence[Tensor], invariants: dict[str, Any], *originals: Tensor
    ) -> Tensor:
        ctx.copies, ctx.invariants = copies, invariants
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The micro-batch's last backward on this rank: nothing of it is needed any more.
        ctx.invariants.clear()
        return (gradients[0], None, None, *(copy.grad for copy in ctx.copies))


class _AddLoss(torch.autograd.Function):
    """Identity on x that also sends a gradient of 1 to `loss`: a readout before the last chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


@dataclass
class Part:
    """One micro-batch as this rank sees it."""

    batch: MicroBatch
    loops: Loops
    key: StateKey | None
    """None in evaluation."""
    state: Tensor | None = None
    """First rank: states [B, s, d_h] after the loops without gradient."""
    invariants: dict[str, Any] = field(default_factory=dict)
    """What chunk 0 has left for later chunks of the phase."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Last rank: terms of the loss so far."""


class CircularPipeline:
    """Runs micro-batches through the pipeline. Its methods are collective over the ranks of one model."""

    def __init__(self, model: LoopedLM, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.slots = 2 if model.cfg.recurrence.feedback != "none" else 1

    # --------------------------------------------------------------------------------------------------------- training

    def train(
        self, parts: list[Part], loss_cfg: LossConfig, totals: Totals, scale_loss: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Accumulates the gradients of the micro-batches' loss; terms of the loss on the last rank, {} elsewhere."""
        if most := max(len(part.loops.no_grad) for part in parts):
            with torch.no_grad():
                self._states_before(parts, most)
        num_chunks = max(len(part.loops.grad) for part in parts)

        def chunk(part: Part, t: int, received: Tensor | None) -> Tensor:
            loop, last = t - (num_chunks - len(part.loops.grad)), t == num_chunks - 1
            x = self._pass_on(part, t, loop, part.loops.grad, received, grad=True)
            if not self.model.stage.last or loop < 0:
                return x
            ctx = part.invariants["ctx"]
            # Looked up for each readout: chunks run backward one by one, so none may share a graph with another.
            values = self.model.look_up_values("coda", part.batch.tokens)
            step = 0 if part.key is None else part.key.step
            objective = Objective(self.model, part.batch, part.loops, loss_cfg, totals, ctx, values, step)
            if loop < objective.first_loop:
                return x
            objective.add(loop, x[: part.loops.grad[loop].active])
            output = objective.output()
            for name, value in output.metrics.items():
                part.metrics[name] = part.metrics[name] + value if name in part.metrics else value
            # The schedule divides what the last chunk returns by the number of micro-batches.
            return scale_loss(output.loss) * len(parts) if last else _AddLoss.apply(x, scale_loss(output.loss))

        circular_schedule(self.layout, parts, num_chunks, chunk, self._shape(parts), self._dtype, backward=True)
        self._sum_tied_gradients()
        metrics: dict[str, Tensor] = {}
        for part in parts:
            for name, value in part.metrics.items():
                metrics[name] = metrics[name] + value if name in metrics else value
        return metrics

    def _states_before(self, parts: list[Part], num_chunks: int) -> None:
        """Phase 1: leaves the states after the loops without gradient in the first rank's parts."""

        def chunk(part: Part, t: int, received: Tensor | None) -> Tensor:
            loop = t - (num_chunks - len(part.loops.no_grad))
            return self._pass_on(part, t, loop, part.loops.no_grad, received, grad=False)

        shape = self._shape(parts)
        outputs = circular_schedule(self.layout, parts, num_chunks, chunk, shape, self._dtype, backward=False)
        group, rows = self.layout.pipeline_group, parts[0].batch.rows.shape[0]
        first, last = (dist.get_global_rank(group, r) for r in (0, self.layout.pipeline_size - 1))
        for i, part in enumerate(parts):
            part.invariants.clear()
            if self.model.stage.last:
                dist.send(outputs[i][:rows].contiguous(), first, group=group)
            elif self.model.stage.first:
                part.state = torch.empty(rows, *shape[1:], dtype=self._dtype, device=self.layout.device)
                dist.recv(part.state, last, group=group)

    def _sum_tied_gradients(self) -> None:
        """The tied matrix has a copy on the first and on the last rank, with one half of the gradient each."""
        model = self.model
        if not model.cfg.tie_embeddings or not (model.stage.first or model.stage.last):
            return
        dist.all_reduce(model.embedding.weight.grad, group=self.layout.embedding_group)

    # ----------------------------------------------------------------------------------------------------- one chunk

    def _pass_on(
        self, part: Part, t: int, loop: int, steps: tuple[LoopStep, ...], received: Tensor | None, *, grad: bool
    ) -> Tensor:
        """Loop `loop` (below 0: not joined yet) of one micro-batch over this rank's layers: what the next rank gets."""
        originals, copies = self._prepare(part, grad) if t == 0 else ([], [])
        if self.model.stage.first and t == 0:
            state, fed = part.invariants["h_0"], None
        else:
            assert received is not None
            state, *rest = received.chunk(self.slots)
            fed = rest[0] if rest else None
        if loop >= 0:
            invariants = part.invariants["originals" if t == 0 else "copies"]
            state, fed = self._loop(part, invariants, state, fed, steps[loop], loop, grad)
        x = state if self.slots == 1 else torch.cat((state, state if fed is None else fed))
        if originals:
            x = _HandBack.apply(x, copies, part.invariants, *originals)
        return x

    def _prepare(self, part: Part, grad: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Chunk 0: what all chunks share. Returns the tensors with a gradient, and the copies that later chunks use."""
        model, shared = self.model, part.invariants
        shared["ctx"] = model.context_of(part.batch, part.key)
        held: list[Tensor | None] = []
        if model.stage.first:
            e, h_0 = model.start(part.batch, shared["ctx"], part.key)
            shared["h_0"] = self._joined(part, h_0, grad)
            held += list(model.injection.input(e))
        held += list(model.look_up_values("core", part.batch.tokens))
        live = {i: x for i, x in enumerate(held) if x is not None and grad and x.requires_grad}
        copies = {i: x.detach().requires_grad_() for i, x in live.items()}
        shared["originals"] = held
        shared["copies"] = [copies.get(i, x) for i, x in enumerate(held)]
        return list(live.values()), list(copies.values())

    def _joined(self, part: Part, h_0: Tensor, grad: bool) -> Tensor:
        """The states that the gradient loops start from: rows without earlier loops keep h_0 and its gradient."""
        if not grad or part.state is None:
            return h_0
        done = part.loops.no_grad[-1].active if part.loops.no_grad else 0
        return torch.cat((part.state[:done], h_0[done:]))

    def _loop(
        self,
        part: Part,
        invariants: list[Tensor | None],
        state: Tensor,
        fed: Tensor | None,
        step: LoopStep,
        loop: int,
        grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(state, feedback) after this rank's share of a loop; rows that have not joined are carried along."""
        model, count = self.model, step.active
        ctx = part.invariants["ctx"].rows(count).in_loop(part.loops.number(loop, grad))
        first = model.in_first_loop(part.loops, loop, grad, state.device)
        first = first if first is None else first[:count]
        values = [v if v is None else v[:count] for v in invariants[2 if model.stage.first else 0 :]]
        drive = None
        if model.stage.first and (driven := invariants[0]) is not None:
            drive = Drive(driven[:count], invariants[1])

        def run(x: Tensor, feedback: Tensor | None) -> tuple[Tensor, Tensor | None]:
            if drive is not None:
                x, feedback = model.injection(x, drive, first)
            feedback = feedback if self.slots == 2 else None
            return model.run_layers("core", x, ctx, values, feedback, first), feedback

        own = None if fed is None else fed[:count]
        checkpointed = grad and model.checkpointing == "loop" and torch.is_grad_enabled()
        x, feedback = model.checkpointed(run, state[:count], own) if checkpointed else run(state[:count], own)
        if count == state.shape[0]:
            return x, feedback
        # The next ranks of this loop need feedback for active rows only; the rest of its slot is filler.
        fed = None if feedback is None else torch.cat((feedback, state[count:]))
        return torch.cat((x, state[count:])), fed

    # ----------------------------------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def loop_losses(self, parts: list[Part], num_loops: Sequence[int]) -> list[Tensor] | None:
        """Last rank: cross entropy of each token of each part, fp32 [len(num_loops), B, S]; None elsewhere."""
        wanted = {t: i for i, t in enumerate(num_loops)}
        results: dict[int, Tensor] = {}

        def see(part: Part, t: int, h: Tensor) -> None:
            if t in wanted:
                labels, ctx = part.batch.labels, part.invariants["ctx"]
                out = results.setdefault(id(part), torch.zeros(len(num_loops), *labels.shape, device=h.device))
                values = self.model.look_up_values("coda", part.batch.tokens)
                out[wanted[t]] = self.model.readout_losses(h, ctx, values, labels)

        self.evaluate(parts, max(num_loops), see)
        return [results[id(part)] for part in parts] if self.model.stage.last else None

    @torch.no_grad()
    def evaluate(self, parts: list[Part], num_loops: int, see: Callable[[Part, int, Tensor], None]) -> None:
        """Runs the parts' loops without gradient; the last rank calls see(part, t, h_t [B, s, d_h]) from t = 1 on."""

        def chunk(part: Part, t: int, received: Tensor | None) -> Tensor:
            x = self._pass_on(part, t, t, part.loops.no_grad, received, grad=False)
            if self.model.stage.last:
                see(part, t + 1, x[: part.batch.rows.shape[0]])
            return x

        circular_schedule(self.layout, parts, num_loops, chunk, self._shape(parts), self._dtype, backward=False)

    def _shape(self, parts: list[Part]) -> tuple[int, int, int]:
        rows, length = parts[0].batch.rows.shape[0], self.model.cfg.context_length
        local = self.model.ops.local_sequence(length)
        return self.slots * rows, local.stop - local.start, self.model.cfg.width_of("core")

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.compute_dtype

