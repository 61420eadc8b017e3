"""Submits a run, or a sweep of runs, to SLURM: one task per GPU, requeued when it is preempted, out of time or broken.

    python launchers/slurm.py --config configs/parcae_1b3.yaml --nodes 4 --gpus-per-node 8 --partition gpu \\
        --time 24:00:00 --requeue 20 data.path=DATA run.name=first

Configuration, data and resources are checked before anything is submitted. docs/slurm.md has the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):
    # A file's own folder comes first in sys.path; there `launchers/` must not stand, but the folder that holds it.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

from launchers.cluster import (
    Allocation,
    TrainExecutor,
    check_with_scheduler,
    leave_surrounding_job,
    submit,
    time_limit_sec,
)
from launchers.job import TrainJob
from launchers.local import LocalRun
from launchers.queue import note_jobs, require_not_queued
from launchers.sweep import read_sweep
from pretrain.arguments import integer, pathname
from pretrain.config.load import load_config, save_resolved
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError, PretrainError
from pretrain.foreign import is_one_line
from pretrain.messages import keep_console
from pretrain.preflight import preflight
from pretrain.train.run_folder import run_folder

# What the launcher sets itself; sbatch's names.
OWN_OPTIONS = (
    "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "partition", "time", "account", "array",
    "output", "error", "open-mode", "signal", "requeue", "no-requeue", "job-name",
)  # fmt: skip
SLURM_ONLY = ("partition", "time", "account", "array_parallelism", "cpus_per_task", "sbatch", "dry_run")


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code: 0 submitted, 2 refused; with --cluster local the run's own."""
    args, overrides = parse_arguments(argv)
    try:
        check_arguments(args)
        runs = plan_runs(args, overrides)
        return run_here(args, runs, overrides) if args.cluster == "local" else submit_runs(args, runs)
    except PretrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's options, and the rest: overrides of the configuration, checked when they are applied."""
    parser = argparse.ArgumentParser(
        prog="launchers/slurm.py",
        usage="%(prog)s --config PATH --nodes N --gpus-per-node G [option ...] [section.key=value ...]",
        description="Submits a run, or a sweep of runs, to SLURM (docs/slurm.md).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="PATH", help="YAML file, such as configs/parcae_140m.yaml")
    add("--nodes", type=integer(most=100_000), default=1, metavar="N")
    tasks = parser.add_mutually_exclusive_group(required=True)
    tasks.add_argument("--gpus-per-node", type=integer(most=1_024), metavar="G", help="one task per GPU")
    tasks.add_argument("--tasks-per-node", type=integer(most=1_024), metavar="T", help="without GPUs")
    add("--cpus-per-task", type=integer(most=100_000), metavar="C", help="default: 1 + data.num_workers")
    add("--partition", metavar="P", help="default: the cluster's")
    add("--time", metavar="T", help="limit of one start: 90, 24:00:00, 2-12; default: the partition's")
    add("--account", metavar="A")
    add(
        "--requeue", type=integer(most=10**6), default=0, metavar="N",
        help="starts after the first one, at most; default 0",
    )  # fmt: skip
    add(
        "--stop-sec", type=integer(most=10**6), default=120, metavar="S",
        help="stop so long before the limit; default 120",
    )  # fmt: skip
    add("--array", type=pathname, metavar="SWEEP.yaml", help="a sweep as a job array: a list of overrides, or a grid")
    add("--array-parallelism", type=integer(most=10**6), metavar="M", help="runs of a sweep at a time, at most")
    add("--master-port", type=integer(), metavar="PORT", help="default: from job id and restart count")
    add("--sbatch", action="append", default=[], metavar="KEY[=VALUE]", help="any other option of sbatch; repeatable")
    add("--cluster", choices=("slurm", "local"), default="slurm", help="local: this machine, in the foreground")
    add("--dry-run", action="store_true", help="check everything and print the batch script")
    return parser.parse_known_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError naming the option that cannot be meant."""
    for name in ("nodes", "gpus_per_node", "tasks_per_node", "cpus_per_task", "array_parallelism", "stop_sec"):
        value = getattr(args, name)
        _require(value is None or value >= 1, name, value, "an integer >= 1")
    _require(args.requeue >= 0, "requeue", args.requeue, "an integer >= 0")
    port = args.master_port
    _require(port is None or 1024 <= port < 65_536, "master_port", port, "a port from 1024 to 65535")
    _require(args.array is not None or args.array_parallelism is None, "array_parallelism", args.array_parallelism,
             "to be used with --array")  # fmt: skip
    for name in ("partition", "time", "account"):
        value = getattr(args, name)
        _require(value is None or re.fullmatch(r"[!-~]+", value), name, value, "one word")
    sbatch_options(args.sbatch)
    if args.cluster == "local":
        _require(args.nodes == 1, "nodes", args.nodes, "1 with --cluster local")
        for name in SLURM_ONLY:
            _require(not getattr(args, name), name, getattr(args, name), "no such option with --cluster local")
    elif args.time is not None:
        longer = time_limit_sec(args.time) > args.stop_sec
        _require(longer, "time", args.time, f"more than the {args.stop_sec} seconds of --stop-sec")


def plan_runs(args: argparse.Namespace, overrides: list[str]) -> list[Config]:
    """The checked configuration of each run; those of a sweep get run.name-INDEX unless the sweep names them.

    Errors: ConfigError naming the run of the sweep and the key.
    """
    world_size = args.nodes * (args.gpus_per_node or args.tasks_per_node)
    own = sweep_overrides(args, overrides)
    names = [args.config] if args.array is None else [f"--array {args.array}, run {i}" for i in range(len(own))]
    runs: list[Config] = []
    for name, texts in zip(names, own, strict=True):
        with _named(name):
            runs.append(load_config(args.config, texts))
    _require_folders_of_their_own(args, runs)
    for name, cfg in zip(names, runs, strict=True):
        with _named(name):
            validate(cfg, world_size)
            preflight(cfg)
    return runs


def _require_folders_of_their_own(args: argparse.Namespace, runs: list[Config]) -> None:
    owners: dict[str, str] = {}
    for i, cfg in enumerate(runs):
        again = cfg.run.name in owners.values()
        _require(not again, "array", args.array, f"run {i} to have a run.name of its own, it is {cfg.run.name!r} again")
        owner = owners.setdefault(os.path.realpath(run_folder(cfg)), cfg.run.name)
        _require(owner == cfg.run.name, "array", args.array, f"run {i} to have a folder of its own, "
                 f"{run_folder(cfg)} leads to that of {owner!r}")  # fmt: skip


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Says in every ConfigError which run it is about."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(name) else f"{name}: {text}") from error


def sweep_overrides(args: argparse.Namespace, overrides: list[str]) -> list[list[str]]:
    """The overrides of each run, the later wins: of the command line, a name, of the sweep."""
    if args.array is None:
        return [overrides]
    base, sweep = load_config(args.config, overrides).run.name, read_sweep(args.array)
    digits = len(str(len(sweep) - 1))
    return [[*overrides, f"run.name={base}-{i:0{digits}d}", *own] for i, own in enumerate(sweep)]


def run_here(args: argparse.Namespace, runs: list[Config], overrides: list[str]) -> int:
    """Runs in the foreground on this machine, a sweep's runs one after the other; returns the first code that is not 0.

    A sweep skips runs that are finished and goes on after one that failed, but not after a request to stop.
    """
    if args.gpus_per_node:
        import torch

        found = torch.cuda.device_count()
        _require(
            args.gpus_per_node <= found, "gpus_per_node", args.gpus_per_node, f"at most the {found} of this machine"
        )
    tasks, codes = args.gpus_per_node or args.tasks_per_node, [0]
    for own, cfg in zip(sweep_overrides(args, overrides), runs, strict=True):
        if args.array is not None and is_finished(cfg):
            _say(f"finished {run_folder(cfg)}")
            continue
        _say(f"run      {tasks} processes of {os.getpid()}, log {run_folder(cfg)}/log.txt")
        _say(f"cancel   kill {os.getpid()}   (the run saves first; a second one ends it at once)")
        arguments = ["--config", args.config, *own]
        run = LocalRun(arguments, tasks, max_requeues=args.requeue, port=args.master_port, say=_say)
        codes.append(run.run())
        if run.asked_to_stop:
            break
    return next((code for code in codes if code), 0)


def is_finished(cfg: Config) -> bool:
    """Whether the run's folder holds a complete checkpoint of its last step."""
    from pretrain.train.checkpoint.folders import checkpoints_folder, looks_complete, step_folder  # imports torch

    return looks_complete(step_folder(checkpoints_folder(run_folder(cfg)), cfg.last_step))


def submit_runs(args: argparse.Namespace, runs: list[Config]) -> int:
    """Submits the runs, or with --dry-run prints the script. What SLURM refuses is refused before a file is written."""
    folder = submission_folder(args, runs)
    executor = TrainExecutor(folder, _allocation(args, runs))
    script = executor.script(len(runs))
    if args.dry_run:
        _say(script)
    leave_surrounding_job()
    forecast = check_with_scheduler(script)
    if forecast is not None:
        require_not_queued([run_folder(cfg) for cfg in runs], str(sbatch_options(args.sbatch).get("dependency", "")))
    if args.dry_run:
        _say("# not checked by SLURM: no sbatch here" if forecast is None else f"# SLURM accepts it: {forecast}")
        return 0
    if forecast is None:
        raise ConfigError(
            "no sbatch on this machine: submit from a login node of the cluster, look at the script with --dry-run, or "
            "run on this machine with --cluster local"
        )
    stamp, jobs = secrets.token_hex(4), []
    for i, cfg in enumerate(runs):
        # The job trains on what was checked, whatever becomes of the file until it starts or is requeued.
        path = folder / f"config-{stamp}-{i}.yaml"
        save_resolved(cfg, path)
        jobs.append(
            TrainJob(("--config", str(path)), str(folder), args.requeue, bool(args.gpus_per_node), args.master_port)
        )
    ids = submit(executor, jobs)
    note_jobs([run_folder(cfg) for cfg in runs], ids)
    _report(args, folder, runs, ids, forecast)
    return 0


def submission_folder(args: argparse.Namespace, runs: list[Config]) -> Path:
    """Where logs, script and configurations go: `slurm` in the run's folder, or SWEEP_slurm beside a sweep's runs."""
    folder = run_folder(runs[0]) / "slurm"
    if args.array is not None:
        folder = Path(runs[0].run.dir) / f"{args.array.stem}_slurm"
    # sbatch and submitit replace %j and the like.
    _require("%" not in str(folder.absolute()), "config", args.config, f"a run folder without %, it is {folder}")
    return folder.absolute()


def sbatch_options(options: Sequence[str]) -> dict[str, str | bool]:
    """--sbatch KEY=VALUE ... as submitit takes them. Errors: ConfigError where the launcher sets KEY itself."""
    parsed: dict[str, str | bool] = {}
    for option in options:
        key, equals, value = option.partition("=")
        _require(re.fullmatch(r"[a-z][a-z0-9-]*", key), "sbatch", option, "KEY or KEY=VALUE, such as constraint=h100")
        _require(is_one_line(value) and bool(value) == bool(equals), "sbatch", option, "a value in one line")
        _require(key not in OWN_OPTIONS, "sbatch", option, "an option that the launcher does not set itself")
        _require(key not in parsed, "sbatch", option, f"{key} once")
        parsed[key] = value if equals else True
    return parsed


def _allocation(args: argparse.Namespace, runs: list[Config]) -> Allocation:
    name = args.array.stem if args.array is not None else runs[0].run.name
    return Allocation(
        name=name,
        nodes=args.nodes,
        tasks_per_node=args.gpus_per_node or args.tasks_per_node,
        gpus_per_node=args.gpus_per_node or 0,
        cpus_per_task=args.cpus_per_task or 1 + max(cfg.data.num_workers for cfg in runs),
        partition=args.partition,
        time=args.time,
        account=args.account,
        max_requeues=args.requeue,
        stop_sec=args.stop_sec,
        array_parallelism=args.array_parallelism,
        extra=sbatch_options(args.sbatch),
    )


def _report(args: argparse.Namespace, folder: Path, runs: list[Config], ids: list[str], forecast: str) -> None:
    job_id = ids[0].partition("_")[0]
    tasks = args.gpus_per_node or args.tasks_per_node
    kind = "GPUs" if args.gpus_per_node else "tasks"
    _say(f"job {job_id}: {len(runs)} run{'s' * (len(runs) > 1)} of {args.nodes} nodes x {tasks} {kind}, {forecast}")
    for own_id, cfg in zip(ids, runs, strict=True):
        _say(f"run      {run_folder(cfg)}/log.txt, tasks {folder}/{own_id}_RANK_log.out and .err")
    _say(f"script   {folder}/{job_id}_submission.sh")
    _say(f"state    squeue --job={job_id}")
    _say(f"cancel   scancel {job_id}   (the run saves first, and is not requeued)")


def _require(condition: object, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {expected}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    keep_console()
    sys.exit(main(sys.argv[1:]))
