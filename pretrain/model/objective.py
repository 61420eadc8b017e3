"""The training objective of one micro-batch, collected as its gradient loops go by.

Shapes: B rows, b active rows (a prefix), S sequence, s local share, d_h core width, T loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from pretrain.config.schema import LossConfig
from pretrain.model.attention_mask import Context
from pretrain.model.auxiliary import ExitWeights, Share, make_terms
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.loss import HeadSums, Totals, head_sums, loop_weights, state_penalty

if TYPE_CHECKING:
    from pretrain.model.looped import LoopedLM


class LossOutput(NamedTuple):
    """loss: this rank's share of the global loss, to call backward on. metrics: detached shares, to be summed."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Objective:
    """Collects the loss of one micro-batch as its gradient loops go by."""

    def __init__(
        self,
        model: LoopedLM,
        batch: MicroBatch,
        loops: Loops,
        cfg: LossConfig,
        totals: Totals,
        ctx: Context,
        values: Sequence[Tensor | None],
        step: int,
    ) -> None:
        """`step` (0-based) is what schedules of the weights go by."""
        self.model, self.batch, self.cfg, self.totals = model, batch, cfg, totals
        self.loops, self.ctx, self.values, self.num_loops = loops, ctx, values, len(loops.grad)
        rows = torch.tensor(loops.grad_loops, device=batch.tokens.device)[:, None]
        local = loops.local(model.ops.local_sequence(batch.tokens.shape[1])).tokens
        own, local_own = (rows if tokens is None else tokens.grad for tokens in (loops.tokens, local))
        self.readout_weights = loop_weights(own, rows, self.num_loops, cfg.objective)  # [T, B, 1 or S]
        self.state_weights = loop_weights(local_own, rows, self.num_loops, "per_loop")  # [T, B, 1 or s]
        # Of the deepest row of all ranks that run in lockstep: the readouts gather parameters too. A row of fewer loops
        # has weights of 0 in those before its own.
        self.first_readout = {
            "terminal": self.num_loops - 1, "per_loop": 0, "last_third": 2 * self.num_loops // 3, "exit_weighted": 0,
        }[cfg.objective]  # fmt: skip
        if loops.tokens is not None and cfg.objective == "last_third":
            self.first_readout = min(2, self.num_loops - 1)  # the earliest is that of a token of four loops
        self.weights = cfg.weights_at(step)
        share = Share(model, batch, cfg, totals, self.num_loops, rows, own, local_own, step)
        self.auxiliary = make_terms(share)
        self.exits = ExitWeights(share) if cfg.objective == "exit_weighted" else None
        self.terms: dict[str, Tensor] = {}

    @property
    def first_loop(self) -> int:
        """The first gradient loop (0-based) whose state has a part in the loss."""
        if self.cfg.norm_penalty or self.cfg.scale_anchor:
            return 0
        return min([self.first_readout, *(term.first_loop for term in self.auxiliary)])

    def _add(self, name: str, value: Tensor) -> None:
        self.terms[name] = self.terms[name] + value if name in self.terms else value

    def add(self, loop: int, state: Tensor) -> None:
        """Takes the state [b, s, d_h] after gradient loop `loop` (0-based)."""
        if loop >= self.first_readout:
            self._add_readout(loop, state, last=loop == self.num_loops - 1)
        if self.cfg.norm_penalty or self.cfg.scale_anchor:
            weights = self.state_weights[loop, : state.shape[0]] / self.batch.tokens.shape[1]
            penalty, anchor = state_penalty(state, weights, self.cfg)
            for name, value in (("norm_penalty", penalty), ("scale_anchor", anchor)):
                self._add(name, self.model.ops.sum_sequence(value) / self.totals.rows)
        for term in self.auxiliary:
            if loop >= term.first_loop and (share := term.add(loop, state)) is not None:
                self._add(term.name, share)

    def _add_readout(self, loop: int, state: Tensor, last: bool) -> None:
        model, count = self.model, state.shape[0]
        labels = self.batch.labels[:count]
        ctx = self.ctx.rows(count).in_loop(self.loops.number(loop, grad=True))
        y = model.decode(state, ctx, [v if v is None else v[:count] for v in self.values], None, last)
        y = model.ops.enter(y).flatten(0, 1)
        terminal = self.cfg.objective == "terminal"
        weights = None if terminal else self.readout_weights[loop, :count].expand(labels.shape).flatten()
        if self.exits is not None:
            p, entropy = self.exits.add(loop, state)
            self._add("exit_entropy", entropy)
            weights = p.flatten()
        settings = model.head_settings(self.cfg)
        sums: HeadSums = model.vocabulary_head(head_sums, y, labels.flatten(), weights, settings, model.ops)
        self._add("cross_entropy", sums.cross_entropy / self.totals.tokens)
        self._add("z_loss", sums.z / self.totals.tokens)

    def output(self) -> LossOutput:
        """The weighted sum of the terms, and each term by itself."""
        scale = {"cross_entropy": 1.0} | self.weights
        if "exit_entropy" in scale:
            scale["exit_entropy"] *= -1  # rewarded
        # A term whose schedule is at 0 stays in the sum: its parameters get a gradient in every step.
        loss = cast(Tensor, sum(scale[name] * value for name, value in self.terms.items() if name in scale))
        # What a path computes along the way differs between layouts; what has a weight does not.
        metrics = {name: value.detach() for name, value in self.terms.items() if name in scale}
        return LossOutput(loss, metrics | {"loss": loss.detach()})
