"""What an auxiliary loss costs: time of a training step against the plain loss, all of them in one run.

    python -m tools.loss_overhead [--rows 8] [--width 256] [--layers 4] [--vocab-size 8192] [--length 128] [--rounds 7]

A step is forward, backward and AdamW of a blind-spot model with K = 4 loops, cross entropy at each of them. The losses
take turns (A B C A B C ...), so that load from outside meets all of them alike; a figure is the median over rounds of
time / time of the plain loss in the same round, with its quartiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pretrain.accounting import StepWork, auxiliary_flops, count_parameters, model_flops
from pretrain.arguments import integer
from pretrain.config.families import make_model_config
from pretrain.config.loss import LossConfig
from pretrain.config.model import AuxiliaryConfig, ModelConfig
from pretrain.config.schema import Config
from pretrain.model.counter import StateKey
from pretrain.model.loss import Totals
from pretrain.sampling import Depths
from tools.one_process import make_micro_batch, make_model
from tools.report import Table, markdown

LOOPS = 4
PLAIN = "plain"
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    PLAIN: ({}, {}),
    "norm penalty": ({"norm_penalty": 0.01}, {}),
    "scale anchor": ({"scale_anchor": 0.01}, {}),
    "state prediction": ({"state_prediction": 0.1}, {"state_predictor": True}),
    "contrastive": ({"contrastive": 0.1}, {}),
    "subspace penalty": ({"subspace_penalty": 0.1}, {}),
    "loop heads": ({"loop_heads": 0.5}, {"loop_heads": LOOPS - 1}),
    "exit weighted": ({"objective": "exit_weighted", "exit_entropy": 0.1}, {"exit_gate": True}),
}


def make_step(model_cfg: ModelConfig, loss: LossConfig, rows: int, device: torch.device) -> Callable[[], None]:
    """One optimizer step on fixed random rows; the call returns when it is done."""
    model = make_model(model_cfg, 0, device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model_cfg.vocab_size, (rows, model_cfg.context_length + 1), generator=generator)
    depths = Depths(np.zeros(rows, np.int64), np.full(rows, LOOPS))
    batch, loops = make_micro_batch(tokens.to(device), depths)
    totals = Totals(float(rows * model_cfg.context_length), float(rows))
    steps = iter(range(1_000_000))

    def step() -> None:
        output = model.training_loss(batch, loops, StateKey(0, next(steps), batch.rows), loss, totals)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        float(output.loss.detach())  # waits for the device

    return step


def measure(settings: argparse.Namespace) -> Table:
    """Ratios of step times, added parameters and added FLOPs of each loss."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps, costs = {}, {}
    for name, (weights, heads) in LOSSES.items():
        loss = LossConfig(**{"objective": "per_loop"} | weights)
        model_cfg = make_model_config(
            "blindspot", vocab_size=settings.vocab_size, context_length=settings.length, width=settings.width,
            num_heads=max(1, settings.width // 64), ffn_width=4 * settings.width, core_layers=settings.layers,
            auxiliary=AuxiliaryConfig(**heads),
        )  # fmt: skip
        steps[name] = make_step(model_cfg, loss, settings.rows, device)
        cfg = Config(model=model_cfg, loss=loss)
        work = StepWork.of([0], [LOOPS], loss.objective, auxiliary_flops(cfg, [LOOPS]))
        costs[name] = (count_parameters(model_cfg).stored, model_flops(model_cfg, work))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(settings.rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, spent in seconds.items():
        ratios = np.array(spent) / np.array(seconds[PLAIN])
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        parameters, flops = costs[name]
        rows.append(
            [name, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{flops / costs[PLAIN][1]:.3f}",
             parameters - costs[PLAIN][0]]
        )  # fmt: skip
    caption = (
        f"{settings.rows} rows of {settings.length} tokens, width {settings.width}, {settings.layers} layers, "
        f"{LOOPS} loops, vocabulary {settings.vocab_size:,}, {settings.rounds} rounds on {device}"
    )
    columns = ["loss", "step time / plain", "quartiles", "model FLOPs / plain", "parameters added"]
    return Table(columns, rows, caption)


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools.loss_overhead"
    )
    for name, default in (
        ("rows", 8), ("width", 256), ("layers", 4), ("vocab-size", 8_192), ("length", 128), ("rounds", 7),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=integer(1, 2**24), default=default, help="(%(default)s)")
    settings = parser.parse_args(arguments)
    table = measure(settings)
    print(f"{table.caption}\n\n{markdown(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
