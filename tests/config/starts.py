"""Real starts at the ends of what is accepted: a dry run must not say yes where the run says no.

    python -m tests.config.starts --seeds 11 12 13 --random 20

Every value that a dry run accepts, at both ends of its bounds and in between, is given to a tiny run of two steps. It
ends with 0, and the configuration that it saved holds the value; or training itself fails (6), as where lr is 1e30.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml

from pretrain.accounting import hardware_flops
from pretrain.config.bounds import Range
from pretrain.config.check import all_keys, bounds_of, is_nullable, type_of, without_null
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.memory import peak_memory
from pretrain.planning import Plan
from tests.conftest import write_small
from tests.train.forked import train

MOST_FLOPS, MOST_BYTES = 2e10, 2**30
"""Of a step, and of its memory: what a test can afford."""
HANDS_OFF = ("data.path", "run.dir", "run.name", "run.resume_step")
TOGETHER = {
    "checkpoint.keep_every_steps": ("checkpoint.every_steps=1",),
    "model.recurrence.curriculum_steps": ("model.recurrence.curriculum=linear",),
    "model.recurrence.lognormal_sigma": (
        "model.recurrence.distribution=lognormal_poisson", "model.recurrence.max_loops=9",
    ),
    "model.auxiliary.loop_heads": ("loss.loop_heads=0.1", "model.recurrence.backprop_loops=4"),
    "loss.loop_heads": ("model.auxiliary.loop_heads=1", "model.recurrence.backprop_loops=2"),
    "loss.state_prediction": ("model.auxiliary.state_predictor=true", "model.recurrence.backprop_loops=2"),
    "loss.exit_entropy": (
        "loss.objective=exit_weighted", "model.auxiliary.exit_gate=true", "model.recurrence.backprop_loops=2",
    ),
    "loss.contrastive": ("model.recurrence.backprop_loops=2",),
    "loss.contrastive_temperature": ("loss.contrastive=0.1", "model.recurrence.backprop_loops=2"),
    "loss.contrastive_tokens": ("loss.contrastive=0.1", "model.recurrence.backprop_loops=2"),
    "loss.subspace_rank": ("loss.subspace_penalty=0.1",),
    "guards.rewind_steps": ("guards.on_spike=rewind", "checkpoint.every_steps=1"),
    "train.max_tokens": ("train.max_steps=null",),
    "schedule.warmup_steps": ("schedule.name=cosine",),
    "logging.profile_steps": (),
}  # fmt: skip
"""What a key needs beside it to be accepted, or to have an effect."""


def ends(seed: int, num_random: int) -> Iterator[tuple[str, str]]:
    """Yields (key, written) for both ends of every bound, every name and truth value, null, and random values."""
    draw = random.Random(seed)
    keys = [key for key in all_keys() if key not in HANDS_OFF and "[]" not in key]
    for key in [*keys, *draw.choices(keys, k=num_random)]:
        hint = type_of(key, "")
        core, bounds = without_null(hint), bounds_of(hint)
        items = typing.get_args(core)
        if typing.get_origin(core) is typing.Literal:
            yield from ((key, name) for name in items)
        elif core is bool:
            yield from ((key, "true"), (key, "false"))
        elif isinstance(bounds, Range):
            whole = core is int
            near = 1 if whole else 1e-9
            most = bounds.most - near if bounds.below else bounds.most
            least = bounds.least + near if bounds.above else bounds.least
            between = draw.choice((draw.uniform(0, 1), draw.uniform(0, 100), 10 ** draw.uniform(-6, 6)))
            yield from ((key, f"{int(value)}" if whole else repr(float(value))) for value in (least, most, between))
        elif items and isinstance(inner := bounds_of(items[0]), Range):
            count = 2 if key in ("optimizer.betas", "logging.profile_steps") else 1
            for value in (inner.least, inner.most - 1e-9 if inner.below else inner.most):
                yield key, str([value] * count)
        if is_nullable(hint):
            yield key, "null"


def check(config: Path, overrides: list[str]) -> Config | None:
    """The configuration that a dry run accepts, if a step of it is small; None where it is refused or large."""
    try:
        cfg = load_config(config, overrides)
        validate(cfg, 1)
    except ConfigError:
        return None
    plan = Plan(cfg, 1)
    loops = max([0, *cfg.validation.num_loops, *cfg.evaluation.num_loops, cfg.probe.num_loops or 0])
    small = hardware_flops(cfg, plan.work) < MOST_FLOPS and sum(peak_memory(plan, 0).values()) < MOST_BYTES
    return cfg if small and loops < 200 else None


def judge(config: Path, folder: Path, key: str, written: str) -> tuple[str, str]:
    """(verdict, words): refused, accepted, or a lie with the run's own words."""
    settings = [*TOGETHER.get(key, ()), f"{key}={written}"]
    cfg = check(config, [*settings, f"run.dir={folder.parent}", f"run.name={folder.name}"])
    if cfg is None:
        return "refused", ""
    dry = train(config, folder, *settings, "--dry-run")
    if dry.codes == [2]:
        return "refused", ""
    if dry.codes != [0]:
        return "lie", f"the dry run ends with {dry.codes}: {dry.outputs[0][-1_500:]}"
    stop = [] if key in ("train.stop_step", "train.max_steps", "train.max_tokens") else ["train.stop_step=2"]
    if cfg.last_step < 2 or (not stop and cfg.last_step > 8):
        stop = [] if cfg.last_step < 2 else ["train.stop_step=2"]
    run = train(config, folder, *settings, *stop, timeout_sec=120.0)
    too_slow = run.codes == [5] and key in ("guards.step_sec", "guards.first_step_sec")
    if run.codes[0] not in (0, 85, 6) and not too_slow:
        return "lie", f"the run ends with {run.codes}: {run.outputs[0][-1_500:]}"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    for name in key.split("."):
        saved = saved[name]
    ours: object = cfg
    for name in key.split("."):
        ours = getattr(ours, name)
    if key != "train.stop_step" and saved != (list(ours) if isinstance(ours, tuple) else ours):
        return "lie", f"the run saved {saved!r} for {ours!r}"
    return "accepted", ""


def main(argv: list[str]) -> int:
    """Judges the values of each seed and prints what is wrong; returns 1 where anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many more values of random keys")
    parser.add_argument("--only", default="", metavar="PREFIX", help="keys that begin so")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth, from I on")
    args = parser.parse_args(argv)
    failed = False
    for seed in args.seeds:
        counts: dict[str, int] = {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = write_small(folder)
            values = [pair for pair in dict.fromkeys(ends(seed, args.random)) if pair[0].startswith(args.only)]
            for i, (key, written) in enumerate(values[args.part[0] :: args.part[1]]):
                verdict, words = judge(config, folder / "runs" / f"r{i}", key, written)
                counts[verdict] = counts.get(verdict, 0) + 1
                if verdict == "lie":
                    failed = True
                    print(f"lie: {key}={written}\n    {words}", flush=True)
        print(f"seed {seed}: {counts}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
