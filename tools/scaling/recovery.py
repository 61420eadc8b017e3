"""Shows that the fitter finds laws that are known: losses made from constants, with noise, many times.

    python -m tools.scaling.recovery [--repeats 100] [--law NAME ...]

The grid is Parcae's (arXiv 2604.12946, appendix O): 36 runs at 140M and 18 at 370M, budgets times mean loops, 54 losses
with relative noise of 0.3%. Prints for each constant in how many repeats its 95% interval held the truth and in how
many it was named as not identified, and the held-out error over the noise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from pretrain.accounting import model_flops
from pretrain.arguments import integer
from pretrain.config.load import load_config
from pretrain.planning import expected_work
from tools.scaling.fitting import Floats, fit
from tools.scaling.isoflop import Curve, find_optimum, fit_exponents
from tools.scaling.laws import (
    EXPONENTIAL,
    FLOOR_POWER,
    ISO_DEPTH,
    PARAMETRIC,
    POWER,
    SHIFTED_POWER,
    UNIFIED,
    UNIFIED_LEARNED,
    UNIFIED_UNSCALED,
    Law,
)
from tools.scaling.published import PUBLISHED
from tools.scaling.readings import Size

ROOT = Path(__file__).resolve().parents[2]
NOISE = 0.003
BUDGETS = {"parcae_140m": (1e18, 2e18, 4e18, 8e18, 16e18, 64e18), "parcae_370m": (32e18, 64e18, 128e18)}
MEAN_LOOPS = (2, 4, 6, 8, 10, 12)
UNIFIED_LOOPS = (1, 2, 4, 8, 16)
STARTS = 4

# Parcae's training law at 140M; Z, z of the unified law are not published, gamma is (table 14). The joint fit of
# 2604.21106, with A and B of its runs with four loops.
_TRAINING = PUBLISHED["parcae_140m"].constants
PLANTED: dict[str, tuple[Law, dict[str, float]]] = {
    "parametric": (PARAMETRIC, _TRAINING),
    "unified": (UNIFIED, _TRAINING | {"Z": 1.5, "z": 3.0}),
    "unified_learned": (UNIFIED_LEARNED, _TRAINING | {"Z": 1.5, "z": 3.0, "gamma": 1.19}),
    "unified_unscaled": (UNIFIED_UNSCALED, _TRAINING | {"Z": 1.5, "z": 0.5}),
    "iso_depth": (ISO_DEPTH, PUBLISHED["iso_depth"].constants | {"A": 23.0, "B": 1_300.0}),
    "exponential": (EXPONENTIAL, {"L_inf": 2.9, "Z": 1.5, "z": 0.5}),
    "shifted_power": (SHIFTED_POWER, {"L_inf": 2.9, "Z": 1.5, "z": 1.5}),
    "floor_power": (FLOOR_POWER, {"L_inf": 2.9, "Z": 1.0, "z": 1.5}),
    "power": (POWER, {"Z": 3.5, "z": 0.05}),
}
ISO_FLOP = {"a": 0.40, "curvature": 0.05}


@cache
def grid() -> dict[str, Floats]:
    """Inputs of the 54 runs, and their budgets."""
    columns: dict[str, list[float]] = {}
    for name, budgets in BUDGETS.items():
        for mean_loops in MEAN_LOOPS:
            loops = [f"model.recurrence.mean_loops={mean_loops}", "model.recurrence.backprop_loops=null"]
            cfg = load_config(ROOT / "configs" / f"{name}.yaml", loops)
            per_token = model_flops(cfg.model, expected_work(cfg)) / cfg.tokens_per_step
            size = Size.of(cfg.model)
            for flops in budgets:
                row = {
                    "flops": flops, "tokens": flops / per_token, "mean_loops": mean_loops,
                    "params": size.unrolled("all", mean_loops), "once_params": size.params_once,
                    "recurrent_params": size.params_recurrent,
                }  # fmt: skip
                for key, value in row.items():
                    columns.setdefault(key, []).append(value)
    return {key: np.array(values, dtype=np.float64) for key, values in columns.items()}


@dataclass
class Score:
    """What came out of some repeats, by constant."""

    covered: dict[str, int] = field(default_factory=dict)
    """Repeats whose interval held the truth."""
    unidentified: dict[str, int] = field(default_factory=dict)
    """Repeats that named the constant as not identified."""
    held_out: list[float] = field(default_factory=list)
    """Held-out error over the noise."""

    def add(self, name: str, covered: bool, identified: bool = True) -> None:
        """Counts one constant of one repeat."""
        self.covered[name] = self.covered.get(name, 0) + covered
        self.unidentified[name] = self.unidentified.get(name, 0) + (not identified)


def inputs_of(law: Law) -> tuple[dict[str, Floats], list[str] | None]:
    """(inputs, run of each point) of the planted data of a law."""
    if law.inputs == ("num_loops",):
        return {"num_loops": np.arange(1.0, 25.0)}, None
    runs = grid()
    if "num_loops" not in law.inputs:
        return runs, None
    repeated = {key: np.repeat(values, len(UNIFIED_LOOPS)) for key, values in runs.items()}
    repeated["num_loops"] = np.tile(np.array(UNIFIED_LOOPS, dtype=float), len(runs["flops"]))
    return repeated, [str(run) for run in range(len(runs["flops"])) for _ in UNIFIED_LOOPS]


def recover(name: str, repeats: int, bootstraps: int, starts: int = STARTS) -> Score:
    """Plants a law of `PLANTED` `repeats` times and fits it."""
    law, truth = PLANTED[name]
    inputs, groups = inputs_of(law)
    exact = law.predict(truth, inputs)
    score = Score()
    for repeat in range(repeats):
        noise = np.random.default_rng((repeat, 7)).standard_normal(len(exact))
        found = fit(law, inputs, exact * np.exp(NOISE * noise), groups=groups, starts=starts, bootstraps=bootstraps,
                    seed=repeat)  # fmt: skip
        for constant, estimate in found.constants.items():
            score.add(constant, estimate.low <= truth[constant] <= estimate.high, estimate.identified)
        assert found.held_out is not None
        score.held_out.append(found.held_out / NOISE)
    return score


def recover_exponents(repeats: int, bootstraps: int) -> Score:
    """Plants iso-FLOP parabolas whose optima grow as C^a and fits a, and b, which a implies."""
    runs, a = grid(), ISO_FLOP["a"]
    budgets, loops = np.log(runs["flops"] / 16e18), np.log(runs["mean_loops"])
    exact = 2.9 - 0.05 * budgets + ISO_FLOP["curvature"] * (loops - np.log(6.0) - a * budgets) ** 2
    truth = fit_exponents([find_optimum(curve) for curve in _curves(runs, exact)], bootstraps=2)
    score = Score()
    for repeat in range(repeats):
        noise = np.random.default_rng((repeat, 8)).standard_normal(len(exact))
        optima = [find_optimum(curve) for curve in _curves(runs, exact * np.exp(NOISE * noise))]
        found = fit_exponents(optima, bootstraps, seed=repeat)
        score.add("a", found.loops_interval[0] <= a <= found.loops_interval[1])
        score.add("b", found.tokens_interval[0] <= truth.tokens <= found.tokens_interval[1])
    return score


def _curves(runs: dict[str, Floats], loss: Floats) -> list[Curve]:
    curves = []
    for size in np.unique(runs["recurrent_params"]):
        for flops in np.unique(runs["flops"][runs["recurrent_params"] == size]):
            own = (runs["recurrent_params"] == size) & (runs["flops"] == flops)
            curves.append(Curve(str(int(size)), float(flops), runs["mean_loops"][own], runs["tokens"][own], loss[own]))
    return curves


def main(argv: Sequence[str]) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="recovery", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=integer(1, 10**6), default=100)
    parser.add_argument("--bootstraps", type=integer(0, 10**6), default=60)
    names = [*PLANTED, "iso_flop"]
    parser.add_argument("--law", nargs="+", choices=names, default=names)
    args = parser.parse_args(argv)
    for name in args.law:
        score = (
            recover_exponents(args.repeats, args.bootstraps) if name == "iso_flop"
            else recover(name, args.repeats, args.bootstraps)
        )  # fmt: skip
        for constant, covered in score.covered.items():
            named = score.unidentified[constant]
            print(f"{name:<16} {constant:<6} covered {covered:3d} of {args.repeats}, not identified {named:3d}")
        if score.held_out:
            print(f"{name:<16} held-out error / noise {np.mean(score.held_out):.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
