"""Quality against loops for each exit rule, over thresholds: a table and a figure.

    python -m tools.exit_curves runs/tiny --out docs/img/exit_rules.png

Loss on validation rows of the run's first data set (or --data) with each token's loops ended by the rule, beside runs
of 1, 2, ... loops for all tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from pretrain.arguments import integer, pathname
from pretrain.errors import ConfigError, PretrainError
from pretrain.hf.modeling_looped import LoopedForCausalLM
from tools.baselines import split_rows
from tools.generate import for_transformers
from tools.loading import data_folder, read_saved

THRESHOLDS = {
    "kl": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "state": (0.6, 0.4, 0.25, 0.15, 0.1, 0.06),
    "margin": (0.05, 0.1, 0.2, 0.4, 0.6, 0.8),
}
"""From early exits to late ones."""
ROWS_PER_BATCH = 16


@torch.no_grad()
def loss_and_loops(
    model: LoopedForCausalLM, rows: Tensor, num_loops: int, rule: str = "none", threshold: float | None = None
) -> tuple[float, float]:
    """(nats per token, mean loops per token) of rows [N, S + 1]."""
    loss = loops = 0.0
    for batch in rows.split(ROWS_PER_BATCH):
        output = model(batch[:, :-1], num_loops=num_loops, exit_rule=rule, exit_threshold=threshold)
        loss += float(F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
        loops += float(num_loops * batch[:, 1:].numel() if output.exit_loops is None else output.exit_loops.sum())
    count = rows[:, 1:].numel()
    return loss / count, loops / count


def curves(model: LoopedForCausalLM, rows: Tensor, num_loops: int) -> dict[str, list[tuple[float, float, float]]]:
    """(threshold, mean loops, loss) of each rule, and of fixed numbers of loops under `fixed`."""

    def point(x: float, loops: int, rule: str = "none", threshold: float | None = None) -> tuple[float, float, float]:
        loss, mean_loops = loss_and_loops(model, rows, loops, rule, threshold)
        return x, mean_loops, loss

    result = {"fixed": [point(t, t) for t in range(1, num_loops + 1)]}
    for rule, thresholds in THRESHOLDS.items():
        result[rule] = [point(x, num_loops, rule, x) for x in thresholds]
    return result


def plot(points: dict[str, list[tuple[float, float, float]]], path: Path) -> None:
    """Draws loss against mean loops."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="mean loops per token", ylabel="validation loss, nats per token")
    for name, values in points.items():
        _, loops, losses = zip(*values, strict=True)
        color, style = ("black", "--") if name == "fixed" else (None, "-")
        axes.plot(loops, losses, marker="o", markersize=4, label=name, color=color, linestyle=style)
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str]) -> int:
    """Measures, prints, draws; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.exit_curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "path", type=pathname, metavar="MODEL", help="folder of a run, a checkpoint or an exported model",
    )  # fmt: skip
    parser.add_argument("--out", type=pathname, required=True, help="PNG file to write")
    parser.add_argument("--data", type=pathname, help="data set (default: the run's first)")
    parser.add_argument("--rows", type=integer(1), default=64, help="of the validation split (%(default)s)")
    loops_help = "where no exit ends them (default: the mean in training)"
    parser.add_argument("--num-loops", type=integer(1, 4_096), help=loops_help)
    args = parser.parse_args(argv)
    try:
        if not args.out.absolute().parent.is_dir():
            raise ConfigError(f"--out {args.out}: its folder does not exist")
        saved = read_saved(args.path)
        rows = torch.from_numpy(split_rows(data_folder(saved, args.data), "validation")[: args.rows])
        model = for_transformers(saved, dtype=torch.float32, device="cpu")
        points = curves(model, rows, args.num_loops or model.config.num_loops)
    except PretrainError as error:
        print(f"exit_curves: error: {error}", file=sys.stderr)
        return error.exit_code
    print("| rule | threshold | mean loops | loss |\n|---|---|---|---|")
    for name, values in points.items():
        for threshold, loops, loss in values:
            print(f"| {name} | {threshold:g} | {loops:.2f} | {loss:.4f} |")
    plot(points, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
