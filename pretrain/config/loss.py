"""The loss section: what is minimised, and how its weights change over the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pretrain.config.bounds import (
    Channels,
    Count,
    CountOrZero,
    Loops,
    Positive,
    Range,
    ShareBelowOne,
    Tokens,
    Weight,
    require,
)

LOSS_TERMS = (
    "z_loss", "norm_penalty", "scale_anchor", "state_prediction", "contrastive", "subspace_penalty", "loop_heads",
    "exit_entropy",
)  # fmt: skip
"""Weights in `loss` that a schedule may change."""


@dataclass(kw_only=True)
class WeightSchedule:
    """One weight over the steps: its factor goes linearly from one value to another."""

    term: str = "???"
    """A weight of `loss` that is not 0, such as norm_penalty."""
    from_step: CountOrZero = 0
    """The factor is `from_factor` up to here."""
    to_step: Count = 1
    """And `to_factor` from here on."""
    from_factor: Weight = 0.0
    """Of the weight, at the start."""
    to_factor: Weight = 1.0
    """Of the weight, at the end."""

    def __post_init__(self) -> None:
        require(self.term in LOSS_TERMS, "loss.schedules.term", self.term, f"one of {', '.join(LOSS_TERMS)}")
        require(
            self.from_step < self.to_step, "loss.schedules.to_step", self.to_step,
            f"a step after from_step={self.from_step}",
        )  # fmt: skip

    def factor(self, step: int) -> float:
        """At step `step` (0-based: the optimizer steps done before)."""
        share = min(max((step - self.from_step) / (self.to_step - self.from_step), 0.0), 1.0)
        return self.from_factor + share * (self.to_factor - self.from_factor)


@dataclass(kw_only=True)
class LossConfig:
    """What is minimised. Weights of 0 switch a term off. Equations: docs/readout_blind_spot.md."""

    objective: Literal["terminal", "per_loop", "last_third", "exit_weighted"] = "terminal"
    """Cross entropy of the last loop; mean over the gradient loops of a row (with granularity=token, of a token); over
    the last third of them (FLT's FEW); over all of them with the probabilities of the exit gate
    (model.auxiliary.exit_gate)."""
    norm_penalty: Weight = 0.0
    """lambda of lambda * mean_t mean(h_t^2) over a row's gradient loops (blind-spot paper: 0.01)."""
    scale_anchor: Weight = 0.0
    """Weight of mean_t mean((rms(h_t) - scale_target)^2)."""
    scale_target: Positive = 1.0
    """RMS that scale_anchor pulls the state towards."""
    z_loss: Weight = 0.0
    """Weight of mean(logsumexp(logits)^2)."""
    state_prediction: Weight = 0.0
    """Weight of the relative error of h_{t+k} predicted from h_t (model.auxiliary.state_predictor)."""
    state_prediction_loops: Loops = 1
    """k of state_prediction."""
    contrastive: Weight = 0.0
    """Weight of InfoNCE between a token's states in successive loops and those of other tokens of its row."""
    contrastive_temperature: Annotated[float, Range(1e-6, 1e6)] = 0.1
    """tau of contrastive."""
    contrastive_tokens: Tokens = 256
    """Evenly spaced positions of a row that contrastive compares; all of them in a shorter row."""
    subspace_penalty: Weight = 0.0
    """Weight of mean_t mean(||U^T h_t||^2 / d), U the directions that the readout reads least."""
    subspace_rank: Channels = 8
    """Number of directions of subspace_penalty."""
    loop_heads: Weight = 0.0
    """Weight of the cross entropy of earlier loops by heads of their own (model.auxiliary.loop_heads)."""
    exit_entropy: Weight = 0.0
    """beta: the entropy of the exit probabilities is rewarded with it (objective=exit_weighted; the paper's is 0.1)."""
    schedules: list[WeightSchedule] = field(default_factory=list)
    """Weights that change with the step; the others keep theirs."""
    label_smoothing: ShareBelowOne = 0.0
    """Share of the target probability that is spread over the vocabulary."""
    chunk_tokens: Tokens = 2_048
    """Tokens whose logits exist at a time."""

    def weights_at(self, step: int) -> dict[str, float]:
        """Weight of every term that is switched on, at step `step` (0-based); 0 where a schedule says so."""
        weights = {term: value for term in LOSS_TERMS if (value := getattr(self, term)) > 0}
        for schedule in self.schedules:
            weights[schedule.term] *= schedule.factor(step)
        return weights
