"""Published constants and losses, each with its source. Losses are in nats per token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pretrain.config.load import load_config
from tools.scaling.laws import ISO_DEPTH, PARAMETRIC, Law
from tools.scaling.readings import READINGS, Size

PARCAE = "arXiv 2604.12946 (Parcae)"


@dataclass(frozen=True)
class Published:
    """A law with the constants of a paper."""

    law: Law
    source: str
    """Paper and table."""
    constants: dict[str, float]
    """A constant that the paper does not give is absent, and the law then predicts nothing."""
    held_out: float | None = None
    """Relative error of a loss on runs that the paper's fit did not see."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Inputs that the paper's fit covers, N by the reading "all"."""


PUBLISHED = {
    "parcae_140m": Published(
        PARAMETRIC, f"{PARCAE}, eq. 7, table 11; 36 runs, 1e18 to 64e18 FLOPs, mu 2 to 12",
        {"E": 2.662, "X": 522_733.307, "x": 0.771, "Y": 25_420.102, "y": 0.525}, held_out=0.013,
        ranges={"params": (1.58e8, 3.01e8), "tokens": (8.3e8, 1.26e11), "mean_loops": (2, 12)},
    ),
    "parcae_370m": Published(
        PARAMETRIC, f"{PARCAE}, eq. 7, table 11; 18 runs, 32e18 to 128e18 FLOPs, mu 2 to 12",
        {"E": 2.439, "X": 832_134.346, "x": 0.775, "Y": 6_386.865, "y": 0.448}, held_out=0.008,
        ranges={"params": (4.38e8, 9.42e8), "tokens": (8.5e9, 9.2e10), "mean_loops": (2, 12)},
    ),
    "iso_depth": Published(
        ISO_DEPTH, "arXiv 2604.21106, joint fit of 116 runs, phi 0.41 to 0.53; A and B are not in the text",
        {"E": 1.57, "alpha": 0.199, "beta": 0.369, "phi": 0.459},
    ),
    "unlooped": Published(
        PARAMETRIC, "arXiv 2604.21106, fit of the runs with one loop; the paper calls A and B loosely identified",
        {"E": 1.56, "X": 58.0, "x": 0.251, "Y": 150.0, "y": 0.267}, ranges={"mean_loops": (1, 1)},
    ),
}  # fmt: skip
# What the papers leave out: Z and z of Parcae's unified law, L_inf, Z and z of its test-time curves, and which N the
# fits of 2604.21106 to the runs with 2, 4 and 8 loops alone mean.


@dataclass(frozen=True)
class Row:
    """A trained model of Parcae's table 5."""

    config: str
    """The file of configs/ that is this model."""
    perplexity: float
    constants: str
    """Which of `PUBLISHED` predicts it: its own size's, or the nearest's."""

    @property
    def loss(self) -> float:
        """Validation loss."""
        return math.log(self.perplexity)


MAIN_ROWS = (
    Row("gpt_140m", 21.48, "parcae_140m"), Row("parcae_140m", 19.06, "parcae_140m"),
    Row("gpt_370m", 15.79, "parcae_370m"), Row("parcae_370m", 14.49, "parcae_370m"),
    Row("gpt_770m", 13.08, "parcae_370m"), Row("parcae_770m", 12.49, "parcae_370m"),
    Row("gpt_1b3", 11.95, "parcae_370m"), Row("parcae_1b3", 11.42, "parcae_370m"),
)  # fmt: skip
"""Parcae's table 5: Transformer (one loop) and Parcae (8 loops) at four sizes, at the tokens of table 21."""


def predicted_errors(row: Row, configs: str) -> dict[str, float]:
    """Relative error of the predicted loss of `row` under each reading of N; `configs` is the folder of the file."""
    cfg = load_config(f"{configs}/{row.config}.yaml")
    size, published = Size.of(cfg.model), PUBLISHED[row.constants]
    errors = {}
    for reading in READINGS:
        params = size.unrolled(reading, cfg.model.recurrence.mean_loops)
        tokens = cfg.total_steps * cfg.tokens_per_step
        predicted = published.law.predict(published.constants, {"params": params, "tokens": tokens})
        errors[reading] = float(predicted) / row.loss - 1
    return errors


def table(configs: str) -> str:
    """Markdown: errors of the published constants on the eight main rows, by reading of N."""
    lines = [
        "| model | constants | measured | " + " | ".join(READINGS) + " |", "|---" * (3 + len(READINGS)) + "|",
    ]  # fmt: skip
    for row in MAIN_ROWS:
        own = row.config.split("_")[1] in row.constants
        cells = [f"{error:+.2%}" for error in predicted_errors(row, configs).values()]
        constants = row.constants if own else f"{row.constants}, extrapolated"
        lines.append(f"| {row.config} | {constants} | {row.loss:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines)
