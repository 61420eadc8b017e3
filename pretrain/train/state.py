"""The position of a run: everything but tensors that a resumed run continues from."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from pretrain.errors import CheckpointError
from pretrain.foreign import parse_json

_KINDS = {int: "an integer >= 0", dict: "an object", list: "a list"}


@dataclass(kw_only=True)
class TrainState:
    """Counters and positions, the same on every rank; plain JSON.

    There is no generator among them: every random number of a run follows from its seed, the step, a purpose and a
    position, and the seed is part of the sampler's and the data's state.
    """

    step: int = 0
    """Optimizer steps done, the skipped ones included."""
    tokens: int = 0
    """Positions read in these steps."""
    skipped_steps: int = 0
    """Steps whose update is not in the weights: a loss or gradient was not finite, or the loss was a spike, or a rewind
    undid it."""
    skipped_in_a_row: int = 0
    """The last of them without a good step, a batch of train.skip_steps or a rewind in between."""
    adamw_steps: int = 0
    """Updates that AdamW's moments have seen."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """DepthSampler.state_dict()."""
    data: dict[str, Any] = field(default_factory=dict)
    """The loader's position."""
    recent_losses: list[float] = field(default_factory=list)
    """Of the last steps that updated the weights; guards.spike_window_steps at most."""
    rewinds: list[list[int]] = field(default_factory=list)
    """[from, to] of each rewind: weights and optimizer of step `from` stood in for those of step `to`."""

    def advance(self, tokens: int, *, skipped: bool) -> None:
        """Counts one step over `tokens` positions."""
        self.step += 1
        self.tokens += tokens
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def go_on_from(self, saved: TrainState) -> None:
        """Counts a rewind: the weights are those of `saved` now, while step and position in the data stay."""
        self.rewinds = [*self.rewinds, [saved.step, self.step]]
        self.skipped_steps = saved.skipped_steps + self.step - saved.step
        self.skipped_in_a_row = 0
        self.adamw_steps = saved.adamw_steps
        self.recent_losses = saved.recent_losses

    def to_json(self) -> str:
        """The text of state.json."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> TrainState:
        """The state in `text`, which `where` names in errors.

        Errors: CheckpointError for a field that is unknown, missing or of another type.
        """
        data = parse_json(text.encode(), where, CheckpointError, "the file is damaged")
        if not isinstance(data, dict):
            raise CheckpointError(f"{where}: holds {type(data).__name__}, expected an object")
        own = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        for name in sorted(own.keys() ^ data.keys()):
            problem = "missing" if name in own else "unknown"
            raise CheckpointError(
                f"{where}: field {name} is {problem}, expected exactly {', '.join(own)}: the checkpoint was written by "
                "another version; use that version to go on"
            )
        for name, kind in own.items():
            value = data[name]
            if type(value) is not kind or (kind is int and value < 0):
                raise CheckpointError(
                    f"{where}: {name} is {value!r}, expected {_KINDS[kind]}"
                )
        return cls(**data)
