"""Which keys may differ between a saved run and the configuration that resumes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pretrain.config.load import diff_configs
from pretrain.config.schema import Config
from pretrain.errors import ConfigError

Rule = Literal["free", "override", "never"]

# The longest prefix of a key decides. docs/configuration.md shows this table; a test keeps the two equal.
RESUME_KEYS: dict[str, tuple[Rule, str]] = {
    "run": ("free", "a run may be moved or renamed together with its folder"),
    "model": ("never", "the weights in the checkpoint have this architecture and were trained at these depths"),
    "data": ("never", "another order of rows would repeat some and miss others"),
    "data.path": ("override", "the same data set in another place; other rows if it is not the same"),
    "data.sources": ("override", "the same data sets in another place; other rows if they are not the same"),
    "data.num_workers": ("free", "the order of rows does not depend on it"),
    "data.prefetch_factor": ("free", "the order of rows does not depend on it"),
    "data.cache_limit_bytes": ("free", "the order of rows does not depend on it"),
    "data.predownload_rows": ("free", "the order of rows does not depend on it"),
    "loss": ("override", "another objective from this step on"),
    "loss.chunk_tokens": ("free", "memory only; the result differs by rounding"),
    "optimizer": ("override", "other hyperparameters from this step on; the moments are kept"),
    "optimizer.name": ("never", "the moments in the checkpoint belong to the other optimizer"),
    "schedule": ("override", "another learning rate from this step on"),
    "train.max_steps": ("free", "a longer run; the schedule is that of the new end, also where it decays"),
    "train.max_tokens": ("free", "a longer run; the schedule is that of the new end, also where it decays"),
    "train.stop_step": ("free", "the schedule does not move"),
    "train.global_batch_size": ("never", "step, data position and depth sampling count in global batches"),
    "train.micro_batch_size": ("free", "the loss does not depend on it; the result differs by rounding"),
    "train.precision": ("override", "other rounding from this step on; the weights are fp32 in both"),
    "train.seed": ("never", "depths, initial states and row order follow from it"),
    "train.deterministic": ("free", "kernels only; the result differs by rounding"),
    "train.compile": ("free", "kernels only; the result differs by rounding"),
    "train.activation_checkpointing": ("free", "memory against time"),
    "train.checkpoint_every_loops": ("free", "memory against time"),
    "train.skip_steps": ("free", "steps that are still to come"),
    "train.max_hours": ("free", "when this process stops"),
    "train.max_skipped_in_a_row": ("free", "when this process stops"),
    "guards": ("free", "what is done about later steps"),
    "parallel": ("free", "checkpoints do not depend on the layout; the result differs by rounding"),
    "zero": ("free", "checkpoints do not depend on the layout; the result differs by rounding"),
    "validation": ("free", "measured, not trained on"),
    "evaluation": ("free", "measured, not trained on"),
    "probe": ("free", "measured, not trained on"),
    "checkpoint": ("free", "when and where to save"),
    "checkpoint.initial_weights": ("never", "the run has started from other weights"),
    "logging": ("free", "shown, not trained on"),
}


@dataclass(frozen=True)
class Change:
    """One key that differs between the saved run and this one."""

    key: str
    old: Any
    new: Any
    rule: Rule
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def resume_rule(key: str) -> tuple[Rule, str]:
    """Returns (rule, reason) of a key, from the longest prefix that RESUME_KEYS holds."""
    parts = key.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(RESUME_KEYS[prefix] for prefix in prefixes if prefix in RESUME_KEYS)


def check_resume(saved: Config, now: Config) -> list[Change]:
    """Returns what differs between the saved configuration and this one, all of it allowed, for the log.

    Raises ConfigError that lists every change that is not: those that need `run.override=true` while it is false,
    and those that no resumed run may have.
    """
    changes = [Change(key, old, new, *resume_rule(key)) for key, old, new in diff_configs(saved, now)]
    allowed = {"free", "override"} if now.run.override else {"free"}
    if refused := [change for change in changes if change.rule not in allowed]:
        lines = [f"the configuration differs from the one saved with run {now.run.name!r} (saved -> now):"]
        for change in refused:
            remedy = {"override": "run.override=true allows it", "never": "start another run for it"}[change.rule]
            lines.append(f"  {change}: {change.reason}; {remedy}")
        raise ConfigError("\n".join(lines))
    return changes
