"""What N can mean: readings of the parameter count of a model whose loops are unrolled.

The papers do not say whether look-up tables count (docs/scaling_laws.md). With mu loops every reading is

    N = N_once + mu N_rec

N_rec are the core's layers without value tables, N_once all else that the reading counts. The injection, which runs in
every loop too, counts once here: so the published constants fit the published losses best (published.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pretrain.accounting import count_parameters
from pretrain.config.model import ModelConfig


class Size(NamedTuple):
    """Parameters of a model, as stored, by what the readings tell apart."""

    params_once: int
    """All but the core's layers; their value tables are in here."""
    params_recurrent: int
    """The core's layers without value tables."""
    params_embedding: int
    """Token and position tables, of which a tied head is one; in `params_once`."""
    params_value_tables: int
    """In `params_once`."""
    params_head: int
    """A head with a matrix of its own, else 0; in `params_once`."""

    @classmethod
    def of(cls, cfg: ModelConfig) -> Size:
        """Of a model."""
        parts = count_parameters(cfg).parts
        once = sum(parts.values()) - parts["core"]
        return cls(once, parts["core"], parts["embedding"], parts["value_tables"], parts["head"])

    @property
    def total(self) -> int:
        """Every stored parameter once."""
        return self.params_once + self.params_recurrent

    def once(self, reading: str) -> int:
        """N_once by one of `READINGS`."""
        return READINGS[reading](self)

    def unrolled(self, reading: str, mean_loops: float) -> float:
        """N by one of `READINGS`."""
        return self.once(reading) + mean_loops * self.params_recurrent


def _matrices(size: Size) -> int:
    untied_table = size.params_embedding if size.params_head else 0
    return size.params_once - size.params_value_tables - untied_table


READINGS: dict[str, Callable[[Size], int]] = {
    "all": lambda size: size.params_once,
    "without_embedding": lambda size: size.params_once - size.params_embedding,
    "matrices": _matrices,
    "layers": lambda size: (
        size.params_once - size.params_value_tables - size.params_embedding - size.params_head
    ),
}  # fmt: skip
"""all: every parameter. without_embedding: all but the token table, a tied head going with it. matrices: what is
multiplied, layers and head, without look-up tables. layers: that without the head."""
DEFAULT_READING = "all"
