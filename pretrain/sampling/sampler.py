"""Depth sampling: the loop counts of a whole global batch, from (run seed, step) alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pretrain.config.bounds import require
from pretrain.config.model import RecurrenceConfig
from pretrain.errors import CheckpointError
from pretrain.sampling.distributions import (
    Curriculum,
    Distribution,
    expected_loops,
    loop_thresholds,
    loops_at,
    ramped_mean,
)
from pretrain.sampling.placement import balanced_strata, num_deals, uniforms

Granularity = Literal["sequence", "batch", "token"]
SampledLoops = Literal["all", "no_grad"]

GRAD_LOOP_COST = 3
"""Cost of a loop with gradient (forward 1, backward 2), where one without costs 1."""

# Second half of the generator's key. Changing a number changes every run's draws.
_SEQUENCE_STREAM, _BATCH_STREAM, _TOKEN_STREAM = 1, 2, 3

# Fields that older checkpoints do not have, with the value that their runs had.
_ADDED_FIELDS: dict[str, Any] = {"sampled_loops": "all"}


@dataclass(frozen=True, eq=False)
class Depths:
    """Loop counts of rows [rows] or tokens [rows, tokens]: n without gradient, then k with."""

    no_grad_loops: NDArray[np.int64]
    grad_loops: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.no_grad_loops.shape != self.grad_loops.shape:
            raise ValueError(
                f"no_grad_loops has shape {self.no_grad_loops.shape}, grad_loops "
                f"{self.grad_loops.shape}: expected the same shape"
            )
        if (self.no_grad_loops < 0).any() or (self.grad_loops < 0).any():
            raise ValueError("loop counts must not be negative")

    @classmethod
    def truncated(cls, num_loops: ArrayLike, backprop_loops: int) -> Depths:
        """n = max(T - mu_b, 0) and k = min(T, mu_b) (Parcae, arXiv 2604.12946, algorithm 4)."""
        total = np.asarray(num_loops, dtype=np.int64)
        grad = np.minimum(total, backprop_loops)
        return cls(total - grad, grad)

    def __len__(self) -> int:
        return len(self.grad_loops)

    @property
    def num_loops(self) -> NDArray[np.int64]:
        """T = n + k of each row or token."""
        return self.no_grad_loops + self.grad_loops

    @property
    def core_cost(self) -> NDArray[np.int64]:
        """n + 3 k of each row, in core forward passes."""
        return self.no_grad_loops + GRAD_LOOP_COST * self.grad_loops

    def rows(self, index: ArrayLike) -> Depths:
        """The rows at `index`, in its order: positions of a whole draw, local rows of a part."""
        chosen = np.asarray(index, dtype=np.int64)
        return Depths(self.no_grad_loops[chosen], self.grad_loops[chosen])

    def of_deepest_token(self) -> Depths:
        """[rows] from [rows, tokens]: n and k of each row's deepest token, which the row runs."""
        return Depths(self.no_grad_loops.max(axis=1), self.grad_loops.max(axis=1))


@dataclass(frozen=True, kw_only=True)
class DepthSampler:
    """Draws the loop counts of every position of the global batch from (seed, step) alone.

    Every rank makes the whole draw and takes the positions of its rows from it, so a row's loop
    count depends neither on the number of ranks nor on the micro-batch size nor on what the row
    holds, and ranks agree without communication. The fields are those of `model.recurrence`,
    `train.seed` and `train.global_batch_size`; `distributions.loop_thresholds` describes the laws.

    No field moves: a resumed run draws the same loop counts because the step and the fields are the
    same, which `load_state_dict` checks.
    """

    distribution: Distribution
    mean_loops: float
    backprop_loops: int | None
    """mu_b. None: ceil(mu / 2), with the mu of the step."""
    granularity: Granularity
    curriculum: Curriculum
    curriculum_steps: int
    seed: int
    global_batch_size: int
    max_loops: int | None = None
    lognormal_sigma: float = 0.5
    sampled_loops: SampledLoops = "all"
    """What the law is of: all loops of a row, or those before its last mu_b."""

    def __post_init__(self) -> None:
        name = "model.recurrence."
        for key, known in (
            ("distribution", get_args(Distribution)),
            ("granularity", get_args(Granularity)),
            ("curriculum", get_args(Curriculum)),
            ("sampled_loops", get_args(SampledLoops)),
        ):
            value = getattr(self, key)
            require(value in known, name + key, value, "one of " + ", ".join(known))
        require(self.mean_loops >= 1, name + "mean_loops", self.mean_loops, "a number >= 1")
        for key in ("backprop_loops", "max_loops"):
            value = getattr(self, key)
            require(value is None or value >= 1, name + key, value, "an integer >= 1, or null")
        require(
            self.distribution != "fixed" or float(self.mean_loops).is_integer(),
            name + "mean_loops", self.mean_loops, "a whole number, since distribution=fixed",
        )  # fmt: skip
        require(
            self.distribution != "uniform" or float(2 * self.mean_loops).is_integer(),
            name + "mean_loops", self.mean_loops,
            "a multiple of 0.5, since distribution=uniform is on 1 .. 2 mean_loops - 1",
        )  # fmt: skip
        require(self.lognormal_sigma > 0, name + "lognormal_sigma", self.lognormal_sigma, "> 0")
        require(
            self.curriculum == "none" or self.curriculum_steps >= 1,
            name + "curriculum_steps", self.curriculum_steps,
            f"an integer >= 1, since curriculum={self.curriculum}",
        )  # fmt: skip
        require(0 <= self.seed < 2**64, "train.seed", self.seed, "an integer in [0, 2^64)")
        require(
            self.global_batch_size >= 1, "train.global_batch_size", self.global_batch_size,
            "an integer >= 1",
        )  # fmt: skip

    @classmethod
    def from_config(cls, recurrence: RecurrenceConfig, *, seed: int, global_batch_size: int) -> DepthSampler:
        """The sampler of a run's `model.recurrence`, `train.seed` and `train.global_batch_size`."""
        return cls(
            distribution=recurrence.distribution,
            mean_loops=recurrence.mean_loops,
            backprop_loops=recurrence.backprop_loops,
            granularity=recurrence.granularity,
            curriculum=recurrence.curriculum,
            curriculum_steps=recurrence.curriculum_steps,
            seed=seed,
            global_batch_size=global_batch_size,
            max_loops=recurrence.max_loops,
            lognormal_sigma=recurrence.lognormal_sigma,
            sampled_loops=recurrence.sampled_loops,
        )

    def mean_at(self, step: int) -> float:
        """mu at `step`, on the ramp of the curriculum."""
        return ramped_mean(self.mean_loops, self.curriculum, self.curriculum_steps, step)

    def backprop_loops_at(self, step: int) -> int:
        """mu_b at `step`: as set, else ceil(mu / 2)."""
        return self.backprop_loops or math.ceil(self.mean_at(step) / 2)

    def expected_loops(self, step: int) -> tuple[float, float]:
        """E[n] and E[k] of a row at `step`: what FLOP and time estimates use."""
        return expected_loops(self._thresholds(step), self.backprop_loops_at(step))

    def draw(self, step: int) -> Depths:
        """[N] loop counts of every position of the global batch (per sequence or per batch).

        Per sequence: u_p = (stratum of p + U) / N and T_p is the quantile at u_p. The strata are a
        balanced random permutation, so each T_p has exactly the configured law, while the total of
        the batch hardly varies and the ranks' shares, the classes p mod R, have nearly equal cost.
        Per batch: one T for all positions.
        """
        assert self.granularity != "token", "per-token loop counts come from draw_tokens"
        size = self.global_batch_size
        if self.granularity == "batch":
            u = np.repeat(uniforms(self.seed, _BATCH_STREAM, step, 1), size)
        else:
            numbers = uniforms(self.seed, _SEQUENCE_STREAM, step, size + num_deals(size))
            u = (balanced_strata(size, numbers[size:]) + numbers[:size]) / size
        return self._depths(step, u)

    def draw_tokens(self, step: int, num_tokens: int, positions: ArrayLike | None = None) -> Depths:
        """[rows, num_tokens] loop counts of tokens of the rows at `positions` (None: all N).

        The tokens are independent: a row runs to the largest count of its tokens, so balancing
        would save nothing. They depend on (seed, step, position of the row), so a rank draws only
        its own rows. Each token's count is split into n and k by itself; what a token does once its
        count is reached is the model's rule.
        """
        assert self.granularity == "token", "per-row loop counts come from draw"
        rows = np.arange(self.global_batch_size) if positions is None else np.asarray(positions)
        u = [uniforms(self.seed, _TOKEN_STREAM, step, num_tokens, int(row)) for row in rows]
        return self._depths(step, np.stack(u))

    def state_dict(self) -> dict[str, Any]:
        """Everything that, with the step, fixes the draw; JSON values only."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that `state` describes this sampler; CheckpointError names what differs."""
        own, state = self.state_dict(), _ADDED_FIELDS | dict(state)
        different = [
            f"{key}={own.get(key, '(absent)')!r} (checkpoint: {state.get(key, '(absent)')!r})"
            for key in sorted(own.keys() | state.keys())
            if key not in state or key not in own or state[key] != own[key]
        ]
        if different:
            raise CheckpointError(
                f"depth sampler: {', '.join(different)}: expected the checkpoint's values, since "
                "the resumed run would draw other loop counts; restore them, or start a new run in "
                "another run.dir"
            )

    def _thresholds(self, step: int) -> NDArray[np.float64]:
        fixed_loops = self.backprop_loops_at(step) if self.sampled_loops == "no_grad" else 0
        return loop_thresholds(
            self.distribution, self.mean_at(step), self.lognormal_sigma, self.max_loops, fixed_loops
        )

    def _depths(self, step: int, u: NDArray[np.float64]) -> Depths:
        return Depths.truncated(loops_at(self._thresholds(step), u), self.backprop_loops_at(step))
