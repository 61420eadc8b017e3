"""Auxiliary losses of the recurrent state: each a class with its equation, added to the objective loop by loop.

They supervise what a normalised readout does not see (docs/readout_blind_spot.md). Every value is a mean over a row's
own gradient loops (a token's, where loop counts belong to tokens) and over positions, divided by the global number of
rows or tokens, so that micro-batches and layouts do not change it. Weights are `loss.<name>` in the configuration,
scheduled by `loss.schedules`.

Shapes: B rows, b active rows (a prefix), S sequence, s local share, d_h core width, T gradient loops of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.config.schema import LossConfig
from pretrain.model.batch import MicroBatch
from pretrain.model.layers import Linear, RMSNorm, mark
from pretrain.model.loss import Totals, head_sums
from pretrain.model.ops import TensorOps, fp32_at_least
from pretrain.model.subspace import readout_directions

if TYPE_CHECKING:
    from pretrain.model.looped import LoopedLM

TINY = 1e-12


class Heads(nn.Module):
    """Parameters that auxiliary losses bring along (`model.auxiliary`); on the pipeline rank that has the head."""

    # None where the configuration does not ask for it.
    state_predictor: Any
    exit_gate: Any

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        width, auxiliary = cfg.width_of("core"), cfg.auxiliary
        self.state_predictor = Linear(width, width, ops) if auxiliary.state_predictor else None
        self.exit_gate = ExitGate(width, ops) if auxiliary.exit_gate else None
        self.loop_heads = nn.ModuleList(LoopHead(cfg, ops) for _ in range(auxiliary.loop_heads))


class ExitGate(nn.Module):
    """lambda = sigmoid(w . h + b): h [..., d_h] -> fp32 [...]."""

    def __init__(self, width: int, ops: TensorOps) -> None:
        super().__init__()
        self.weight = mark(nn.Parameter(torch.zeros(1, width)), ops)
        self.bias = mark(nn.Parameter(torch.zeros(1)), ops)

    def forward(self, h: Tensor) -> Tensor:
        h = fp32_at_least(h)
        return torch.sigmoid(F.linear(h, self.weight.to(h.dtype), self.bias.to(h.dtype))).squeeze(-1)


class LoopHead(nn.Module):
    """A norm and a vocabulary matrix [V, d_h] of its own."""

    def __init__(self, cfg: ModelConfig, ops: TensorOps) -> None:
        super().__init__()
        width = cfg.width_of("core")
        self.norm = RMSNorm(width, cfg, ops)
        self.weight = mark(nn.Parameter(torch.empty(cfg.padded_vocab_size // ops.size, width)), ops, 0)

    def forward(self, h: Tensor, *args: Any) -> Any:
        """head_sums of the state h [b, s, d_h]; `args` are those after the hidden states."""
        ops: TensorOps = args[-1]
        return head_sums(self.weight, ops.enter(self.norm(h)).flatten(0, 1), *args)


class Term(Protocol):
    """One auxiliary loss of one micro-batch."""

    name: str
    first_loop: int
    """The first gradient loop (0-based) that it looks at."""

    def add(self, loop: int, state: Tensor) -> Tensor | None:
        """This rank's share of the term, unweighted, from the state [b, s, d_h] after gradient loop `loop`."""


class Share:
    """What a term knows of its micro-batch: own gradient loops of rows or tokens, and the denominators."""

    def __init__(
        self, model: LoopedLM, batch: MicroBatch, cfg: LossConfig, totals: Totals, num_loops: int, row: Tensor,
        own: Tensor, local_own: Tensor, step: int,
    ) -> None:  # fmt: skip
        self.model, self.batch, self.cfg, self.totals, self.num_loops = model, batch, cfg, totals, num_loops
        self.row, self.own, self.local_own, self.step = row, own, local_own, step
        """Gradient loops of rows [B, 1]; of rows or tokens, int64 [B, 1 or S], and for the local share of the sequence.
        A token's are the first of its row's, which are the last of all."""
        self.per_token = own is not row

    def index(self, loop: int) -> Tensor:
        """Which of a row's loops `loop` is (0-based; below 0: it has not joined): int64 [B, 1]."""
        return loop - (self.num_loops - self.row)

    def weights(self, loop: int, lag: int = 0) -> Tensor:
        """[B, 1 or s]: 1 / n in its own loops after the first `lag`, of which it has n, else 0."""
        index, own = self.index(loop), self.local_own
        return ((index >= lag) & (index < own)) / (own - lag).clamp(min=1)

    def per_position(self, values: Tensor, weights: Tensor) -> Tensor:
        """Share of the mean over positions: values [b, s], weights [b, 1 or s]."""
        total = (values * weights).sum() / self.batch.tokens.shape[1]
        return self.model.ops.sum_sequence(total) / self.totals.rows


class StatePrediction:
    """mean_t ||P(h_t) - sg(h_{t+k})||^2 / ||sg(h_{t+k})||^2 with P(h) = h + W h and sg the stop-gradient.

    Relative to the target, so that the weight means the same at any norm; the target's radius is part of it.
    """

    name, first_loop = "state_prediction", 0

    def __init__(self, share: Share) -> None:
        self.share, self.lag = share, share.cfg.state_prediction_loops
        self.states: dict[int, Tensor] = {}

    def add(self, loop: int, state: Tensor) -> Tensor | None:
        self.states[loop] = state
        if loop < self.lag:
            return None
        h = self.states.pop(loop - self.lag)
        predictor = self.share.model.auxiliary.state_predictor
        target, predicted = fp32_at_least(state[: len(h)].detach()), fp32_at_least(h + predictor(h))
        error = (predicted - target).square().sum(-1) / target.square().sum(-1).clamp(min=TINY)
        return self.share.per_position(error, self.share.weights(loop, self.lag)[: len(h)])


class Contrastive:
    """mean_t mean_i -log softmax_j(cos(h_t^i, h_{t+1}^j) / tau)_i: a token's next state among those of its row.

    i and j run over `contrastive_tokens` evenly spaced positions. Needs whole rows: no sequence parallelism.
    """

    name, first_loop = "contrastive", 0

    def __init__(self, share: Share) -> None:
        self.share, self.before = share, None
        length = share.batch.tokens.shape[1]
        count = min(share.cfg.contrastive_tokens, length)
        self.places = torch.arange(count, device=share.batch.tokens.device) * length // count

    before: Tensor | None

    def add(self, loop: int, state: Tensor) -> Tensor | None:
        h, self.before = self.before, F.normalize(fp32_at_least(state[:, self.places]), dim=-1)
        if h is None:
            return None
        scores = h @ self.before[: len(h)].mT / self.share.cfg.contrastive_temperature
        losses = scores.logsumexp(-1) - scores.diagonal(dim1=-2, dim2=-1)
        weights = self.share.weights(loop, 1)[: len(h)]
        weights = weights if weights.shape[1] == 1 else weights[:, self.places]
        return (losses * weights).sum() / len(self.places) / self.share.totals.rows


class SubspacePenalty:
    """mean_t mean ||U^T h_t||^2 / d_h, U the `subspace_rank` directions that the readout reads least.

    U is made once per step from that step's weights, so it is the same in every layout and after a resume. With all
    d_h directions it is the norm penalty.
    """

    name, first_loop = "subspace_penalty", 0

    def __init__(self, share: Share) -> None:
        self.share = share

    def add(self, loop: int, state: Tensor) -> Tensor | None:
        h = fp32_at_least(state)
        inside = h @ self.share.model.blind_directions(self.share.step, self.share.cfg.subspace_rank).to(h.dtype)
        return self.share.per_position(
            inside.square().sum(-1) / h.shape[-1], self.share.weights(loop)[: len(state)]
        )  # fmt: skip


class LoopReadouts:
    """mean_i CE(W_i Norm_i(h_{k-i})), i = 1 .. n: head i reads the state i loops before the last, past C and coda.

    A row (a token) with k gradient loops has min(n, k - 1) of them. Head i runs once, i loops before the end, when the
    states that it reads have all been there; those of tokens with fewer loops than their row are kept until then.
    """

    name = "loop_heads"

    def __init__(self, share: Share) -> None:
        self.share, self.heads = share, share.model.auxiliary.loop_heads
        self.first_loop = 0 if share.per_token else max(0, share.num_loops - 1 - len(self.heads))
        self.kept: list[Tensor | None] = [None] * len(self.heads)

    def add(self, loop: int, state: Tensor) -> Tensor | None:
        share, back = self.share, self.share.num_loops - 1 - loop
        if share.per_token:
            self._keep(loop, state)
        if not 1 <= back <= len(self.heads):
            return None
        read = self.kept[back - 1]
        own, labels = share.own[: len(state)], share.batch.labels[: len(state)]
        weights = (own > back) / (own - 1).clamp(min=1, max=len(self.heads))
        arguments = (labels.flatten(), weights.expand(labels.shape).flatten(), share.model.head_settings(share.cfg))
        sums = self.heads[back - 1](state if read is None else read, *arguments, share.model.ops)
        return sums.cross_entropy / share.totals.tokens

    def _keep(self, loop: int, state: Tensor) -> None:
        """Takes the states of those tokens that have as many loops left as a head reads back."""
        left = (self.share.local_own - 1 - self.share.index(loop))[: len(state), :, None]
        for i, kept in enumerate(self.kept):
            before = state if kept is None else torch.cat((kept, state[len(kept) :]))
            self.kept[i] = torch.where(left == i + 1, state, before)


class ExitWeights:
    """p_t = lambda_t prod_{j<t} (1 - lambda_j), the last loop taking what is left: sum_t p_t CE_t - beta H(p).

    lambda = sigmoid(w . h + b) on the state. Not an added term but the weights of the readouts, with the entropy H. The
    loops t are those of `loop_weights`: a token's last is at the end.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.survival: Tensor | None = None

    def add(self, loop: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """(p of this loop, fp32 [b, S]; its share of the entropy). Needs whole rows: no sequence parallelism."""
        share, count = self.share, len(state)
        exits = share.model.auxiliary.exit_gate(state)
        survival = torch.ones_like(exits)
        if self.survival is not None:
            survival = torch.cat((self.survival, survival[len(self.survival) :]))
        index = share.index(loop)[:count]
        earlier = (index >= 0) & (index < share.own[:count] - 1)
        if loop == share.num_loops - 1:
            p = survival
        else:
            p = torch.where(earlier, survival * exits, 0.0)
            self.survival = torch.where(earlier, survival * (1 - exits), survival)
        entropy = -(p * p.clamp(min=1e-8).log()).sum() / share.batch.tokens.shape[1] / share.totals.rows
        return p, entropy


_TERMS = (StatePrediction, Contrastive, SubspacePenalty, LoopReadouts)


def make_terms(share: Share) -> list[Term]:
    """The auxiliary losses that the configuration gives a weight."""
    return [term(share) for term in _TERMS if getattr(share.cfg, term.name) > 0]


class BlindDirections:
    """The least-read directions of the current weights, made once for each step."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._basis: Tensor | None = None

    def of(self, model: LoopedLM, step: int, rank: int) -> Tensor:
        """fp64 [d_h, rank], detached. Collective over tensor-parallel ranks the first time in a step."""
        if self._basis is None or (step, rank) != (self._step, self._basis.shape[1]):
            self._step, self._basis = step, readout_directions(model).bottom(rank)
        return self._basis
