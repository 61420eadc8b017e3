"""Looping as a dimension of scale: plan a study at equal FLOPs, collect its runs, fit laws, predict, plot.

    python -m tools.scaling_law plan configs/parcae_140m.yaml --flops 1e18 2e18 4e18 --mean-loops 2 4 6 8 --out study
    python launchers/slurm.py --config configs/parcae_140m.yaml --nodes 1 --gpus-per-node 8 \\
        --array study/parcae_140m_fixed_parameters.yaml
    python -m tools.scaling_law collect runs/parcae_140m-* --plan study/plan.json --out study/runs
    python -m tools.scaling_law fit study/runs.parquet --out study
    python -m tools.scaling_law predict --from study --law unified --config configs/parcae_140m.yaml --mean-loops 8 \\
        --tokens 1e10 --num-loops 16
    python -m tools.scaling_law plot study/runs.parquet --fits study --out study

docs/scaling_laws.md says what the laws are and where they disagree. What cannot be done ends with exit code 2.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.accounting import device_peak_flops
from pretrain.arguments import integer, number, pathname
from pretrain.config.bounds import require
from pretrain.config.load import load_config
from pretrain.errors import ConfigError, PretrainError
from tools.report import markdown
from tools.scaling.collect import collect, read_table, write_table
from tools.scaling.fits import CHOICES, Settings, fit_table
from tools.scaling.fitting import BOOTSTRAPS, STARTS
from tools.scaling.plan import CONSTRAINTS, PLAN_NAME, Study, plan_table, read_plans, write_plan
from tools.scaling.predict import (
    Constants,
    Latency,
    best_by_curves,
    best_for_budget,
    constants_from,
    curve_constants,
    inputs_of,
    loops_for_loss,
    loss_at,
    predict_loss,
    useful_loops,
)
from tools.scaling.problem import DRAWS
from tools.scaling.published import PUBLISHED
from tools.scaling.published import table as published_table
from tools.scaling.readings import DEFAULT_READING, READINGS
from tools.scaling.store import FITS_NAME, read_fits, write_fits
from tools.scaling.summary import fit_tables

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scaling_law", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, run, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add(command)
        command.set_defaults(command=run)
    args, rest = parser.parse_known_args(argv)
    if rest and not ("items" in args and all("=" in text for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if rest:  # overrides after the options of `plan`
            args.items += rest
        args.command(args)
    except PretrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:  # of --out
        sys.stderr.write(f"error: {error}: expected a place where files can be written\n")
        return ConfigError.exit_code
    return 0


# -------------------------------------------------------------------------------------------------------------- plan


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    peak = device_peak_flops(DEFAULT_DEVICE)
    assert peak is not None
    add = parser.add_argument
    add("items", nargs="+", metavar="CONFIG | section.key=value", help="one file per size; overrides hold for all runs")
    add("--flops", type=number(0, 1e40, above=True), nargs="+", required=True, help="budgets, model FLOPs of a run")
    add("--mean-loops", type=number(1, 1_000), nargs="+", required=True)
    add("--constraint", choices=CONSTRAINTS, default=CONSTRAINTS[0], help="default: %(default)s")
    add("--layers", type=integer(1, 10**6), help="effective layers with fixed_layers; default: the configuration's")
    add("--seeds", type=integer(0, 2**64 - 1), nargs="+", default=[0], help="runs per point; default: %(default)s")
    add("--min-steps", type=integer(1, 10**9), default=200, help="refuse shorter runs; default: %(default)s")
    add(
        "--peak-tflops", type=number(0, 10**9, above=True), default=peak / 1e12,
        help=f"of a GPU; default: %(default)g, {DEFAULT_DEVICE}",
    )  # fmt: skip
    add("--mfu", type=number(), default=0.4, help="default: %(default)g")
    add("--out", type=pathname, required=True, metavar="DIR", help="for sweep files and plan.json")


def _plan(args: argparse.Namespace) -> None:
    configs = [item for item in args.items if "=" not in item]
    overrides = [item for item in args.items if "=" in item]
    require(bool(configs), "CONFIG", args.items, "at least one YAML file")
    require(0 < args.mfu <= 1, "--mfu", args.mfu, "a share in (0, 1], such as 0.4")
    require(0 < args.peak_tflops < math.inf, "--peak-tflops", args.peak_tflops, "TFLOP/s of one GPU, > 0")
    study = Study(configs, overrides, args.flops, args.mean_loops, args.constraint, args.layers, args.seeds,
                  args.min_steps)  # fmt: skip
    runs = study.runs()
    sweeps = write_plan(runs, overrides, args.out)
    flops_per_sec = args.peak_tflops * 1e12 * args.mfu
    total = sum(run.flops for run in runs)
    print(f"constraint: {args.constraint}\n\n{markdown(plan_table(runs, flops_per_sec))}\n")
    gpu_hours = f"{total / flops_per_sec / 3600:.3g} GPU hours at {args.mfu:.0%} of {args.peak_tflops:g} TFLOP/s"
    print(f"{len(runs)} runs, {total:.4g} FLOPs, {sum(run.tokens for run in runs):,} tokens, {gpu_hours}\n")
    for config, path in sweeps:
        rest = shlex.join(["--config", config, "--array", str(path), *overrides])
        print(f"here:    python launchers/slurm.py --cluster local --tasks-per-node 1 {rest}")
        print(f"cluster: python launchers/slurm.py --nodes 1 --gpus-per-node 8 {rest}")


# ----------------------------------------------------------------------------------------------------------- collect


def _collect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=pathname, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--plan", type=pathname, nargs="+", help=f"{PLAN_NAME}, or several; without it runs have no budget",
    )  # fmt: skip
    parser.add_argument("--family", help="leave out the runs of other families")
    parser.add_argument("--out", type=pathname, required=True, metavar="PATH", help="PATH.parquet and PATH.csv")


def _collect(args: argparse.Namespace) -> None:
    rows, excluded = collect(args.runs, None if args.plan is None else read_plans(args.plan), args.family)
    paths = write_table(rows, args.out)
    for item in excluded:
        print(f"left out: {item.run}: {item.why}")
    runs = len({row.folder for row in rows})
    print(f"{runs} runs, {len(rows)} losses, {len(excluded)} left out: {' and '.join(map(str, paths))}")


# --------------------------------------------------------------------------------------------------------------- fit


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", type=pathname, help="of `collect`")
    add("--laws", nargs="+", choices=CHOICES, default=list(CHOICES), help="default: all that the table allows")
    add("--readings", nargs="+", choices=list(READINGS), default=list(READINGS), help="of N; default: all")
    add(
        "--delta", type=number(0, above=True),
        help="of the Huber loss on ln L; default: 1.345 deviations of residuals, at least 1e-3",
    )  # fmt: skip
    add(
        "--starts", type=integer(1, 10**6), default=STARTS,
        help=f"of L-BFGS, of {DRAWS} times as many points; default: %(default)s",
    )  # fmt: skip
    add("--bootstraps", type=integer(0, 10**6), default=BOOTSTRAPS, help="refits for intervals; default: %(default)s")
    add("--seed", type=integer(0), default=0)
    add("--out", type=pathname, required=True, metavar="DIR", help=f"for {FITS_NAME}")


def _fit(args: argparse.Namespace) -> None:
    require(args.delta is None or 0 < args.delta < math.inf, "--delta", args.delta, "> 0")
    require(args.seed >= 0, "--seed", args.seed, "an integer >= 0")
    require(args.starts >= 1, "--starts", args.starts, "an integer >= 1")
    require(args.bootstraps >= 20, "--bootstraps", args.bootstraps, "at least 20, for an interval")
    settings = Settings(tuple(args.readings), args.delta, args.starts, args.bootstraps, args.seed)
    fits = fit_table(read_table(args.table), args.laws, settings)
    write_fits(fits, args.out / FITS_NAME)
    for table in fit_tables(fits):
        print(f"{table.caption}\n\n{markdown(table)}\n")
    for text in fits.not_fitted:
        print(f"not fitted: {text}")


# ----------------------------------------------------------------------------------------------------------- predict


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--published-rows", action="store_true", help="published constants on the eight models of Parcae's table 5")
    add("--from", dest="source", metavar="FITS | NAME", help=f"{FITS_NAME}, or one of {', '.join(PUBLISHED)}")
    add("--law", help="of the fits")
    add("--size", help="of the fits")
    add("--reading", choices=list(READINGS), help=f"of N; default: {DEFAULT_READING}")
    add("--run", help="a run with a test-time curve, in place of a law")
    add("--config", help="the model")
    add("--mean-loops", type=number(1, 1_000), help="mu; default: the configuration's")
    add("--tokens", type=number(0, 1e30, above=True), help="D; default: the configuration's")
    add("--num-loops", type=number(), help="T; default: mu")
    add("--flops", type=number(0, 1e40, above=True), help="best mean loops and tokens for this budget")
    add("--target-loss", type=number(0, above=True), help="fewest loops at inference that reach it")
    add("--latency-ms", type=number(0, above=True), help="loops at inference that fit into it")
    add("--ms-per-loop", type=number(0, above=True), help="measured")
    add("--ms-once", type=number(0), help="measured, of all but the loops; default: 0")


_GOALS = {
    "published_rows": (), "flops": (), "target_loss": ("mean_loops", "tokens"),
    "latency_ms": ("mean_loops", "tokens", "ms_per_loop", "ms_once"), "num_loops": ("mean_loops", "tokens"),
}  # fmt: skip
"""What is asked for, first match first, and the options that the answer depends on; without any, a loss."""


def _refuse_unused(args: argparse.Namespace) -> None:
    """Errors: ConfigError naming the options that the answer would not depend on."""
    given = [name for name, value in vars(args).items() if value is not None and value is not False]
    goal = next((name for name in _GOALS if name in given), "num_loops")
    used = {"command", goal, *_GOALS[goal]}
    if args.run is not None:
        used = used - {"mean_loops", "tokens", "num_loops"} | {"source", "run"}
    elif goal != "published_rows":
        used |= {"source", "law", "size", "reading", "config"}
    unused = ["--" + name.replace("_", "-") for name in given if name not in used]
    if unused:
        ask = " --run" * (args.run is not None) + f" --{goal.replace('_', '-')}" * (goal in given)
        raise ConfigError(f"predict{ask}: does not depend on {', '.join(unused)}; leave that out")


def _predict(args: argparse.Namespace) -> None:
    _refuse_unused(args)
    if args.published_rows:
        print(published_table(str(CONFIGS)))
        return
    require(args.source is not None, "--from", None, f"a {FITS_NAME}, or one of {', '.join(PUBLISHED)}")
    if args.run is not None:
        _predict_loops(args, curve_constants(read_fits(Path(args.source)), args.run), {})
        return
    reading = args.reading or DEFAULT_READING
    constants = constants_from(args.source, args.law, args.size, reading)
    require(args.config is not None, "--config", None, "the YAML file of the model, or --run")
    cfg = load_config(args.config)
    if cfg.model.family == "gpt":
        for name in ("mean_loops", "num_loops", "flops", "target_loss", "latency_ms"):
            value = getattr(args, name)
            require(value is None or (value == 1 and name.endswith("loops")), "--" + name.replace("_", "-"), value,
                    "none, since model.family=gpt runs each layer once: no loops can be chosen")  # fmt: skip
    print(f"{constants.name}: {constants.law.formula}")
    if args.flops is not None:
        best = best_for_budget(constants, cfg, args.flops)
        print(f"best mean loops {best.mean_loops}\nbest tokens {best.tokens}\nloss {best.loss}")
        if args.source not in PUBLISHED:
            for name, *optimum in best_by_curves(read_fits(Path(args.source)), args.flops):
                for what, prediction in zip(("mean loops", "tokens"), optimum, strict=True):
                    print(f"iso-FLOP optima, {name}: {what} {prediction}")
        return
    mean_loops = cfg.model.recurrence.mean_loops if args.mean_loops is None else args.mean_loops
    tokens = cfg.total_steps * cfg.tokens_per_step if args.tokens is None else args.tokens
    require(1 <= mean_loops < math.inf, "--mean-loops", mean_loops, "a number >= 1")
    require(0 < tokens < math.inf, "--tokens", tokens, "> 0")
    if args.target_loss is not None or args.latency_ms is not None:
        _predict_loops(args, constants, inputs_of(cfg, reading, mean_loops, tokens, mean_loops))
        return
    print(f"loss {predict_loss(constants, cfg, mean_loops, tokens, args.num_loops)}")


def _predict_loops(args: argparse.Namespace, constants: Constants, inputs: dict[str, float]) -> None:
    """Loops at inference for a loss or a latency."""
    if args.target_loss is not None:
        print(f"loops for a loss of {args.target_loss:g}: {loops_for_loss(constants, inputs, args.target_loss)}")
    elif args.latency_ms is not None:
        loops = Latency(args.ms_once or 0.0, args.ms_per_loop or 0.0).loops_within(args.latency_ms)
        used = min(loops, useful_loops(constants, inputs))
        rest = f"; {used} are enough, more gain less than 0.001" if used < loops else ""
        print(f"loops within {args.latency_ms:g} ms: {loops}{rest}")
        print(f"loss at {used} loops {loss_at(constants, {**inputs, 'num_loops': float(used)})}")
    else:
        raise ConfigError("predict: expected --target-loss or --latency-ms with --run")


# -------------------------------------------------------------------------------------------------------------- plot


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=pathname, help="of `collect`")
    parser.add_argument("--fits", type=pathname, required=True, help=f"{FITS_NAME} of `fit`, or its folder")
    parser.add_argument("--out", type=pathname, required=True, metavar="DIR", help="for PNGs and scaling.html")


def _plot(args: argparse.Namespace) -> None:
    from tools.scaling.plot import plot

    print(plot(read_table(args.table), read_fits(args.fits), args.out))


_COMMANDS: dict[
    str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None], str]
] = {
    "plan": (_plan_arguments, _plan, "runs at equal FLOPs, as a sweep file"),
    "collect": (_collect_arguments, _collect, "run folders to one table"),
    "fit": (_fit_arguments, _fit, "laws with intervals"),
    "predict": (_predict_arguments, _predict, "losses, best loops and tokens, loops at inference"),
    "plot": (_plot_arguments, _plot, "figures and one page"),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
