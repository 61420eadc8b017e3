"""When the loops of a token end before `num_loops`.

    none     never
    kl       KL(p_t || p_{t-1}) < threshold, p_t the prediction that t loops give; from loop 2 on
    state    |h_t - h_{t-1}| < threshold |h_t|; from loop 2 on
    margin   the two largest probabilities of p_t are further apart than the threshold

Each token decides for itself, whatever else is in the batch. It keeps its state from then on, and in later loops its
keys and values are those of its last loop (cache_looped.py). A forward ends when its last token has exited. `kl` and
`margin` pass coda and head once per loop, where a token sees earlier ones as t loops (or their last one) leave them.
Thresholds are numbers >= 0. Those that are never met (0 for kl and state, 1 for margin, or "never") give exactly the
full loops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .configuration_looped import LoopedConfig, check_exit


class ExitTest:
    """The exit rule of one forward; `exits` is called after each loop but the last."""

    def __init__(self, rule: str, threshold: float) -> None:
        self.rule, self.threshold = rule, threshold
        self.needs_logits = rule != "state"
        self._previous: Tensor | None = None

    @staticmethod
    def of(rule: str | None, threshold: float | str | None, config: LoopedConfig) -> ExitTest | None:
        """The test that a call asks for, or its configuration; None where no token exits early."""
        if rule is None:
            rule, threshold = config.exit_rule, config.exit_threshold if threshold is None else threshold
        check_exit(rule, threshold)
        if rule == "none" or threshold == "never":
            return None
        if threshold is None:
            raise ValueError(f"exit_threshold=None: expected a number or 'never', since exit_rule={rule!r}")
        return ExitTest(rule, float(threshold))

    def exits(self, state: Tensor, logits: Tensor | None) -> Tensor:
        """bool [B, S]: which tokens have met the rule, by their state [B, S, d_h] and logits [B, S, V] after a loop."""
        if self.rule == "margin":
            assert logits is not None
            largest = logits.softmax(-1).topk(2, dim=-1).values
            return largest[..., 0] - largest[..., 1] > self.threshold
        current = state.float() if logits is None else logits.log_softmax(-1)
        previous, self._previous = self._previous, current
        if previous is None:
            return torch.zeros(state.shape[:2], dtype=torch.bool, device=state.device)
        if self.rule == "kl":
            # Rounding may leave a divergence of 0 below it, and a threshold of 0 must never be met.
            return (current.exp() * (current - previous)).sum(-1).clamp(min=0) < self.threshold
        return (current - previous).norm(dim=-1) < self.threshold * current.norm(dim=-1)
