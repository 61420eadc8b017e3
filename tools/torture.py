"""Kills a run over and over with SIGKILL, starts it a second time while it runs, and shows that nothing is lost.

    python -m tools.torture                 # 50 kills, at least 20 of them inside a save, and 20 second starts
    python -m tools.torture --kills 10 --in-save 4 zero.stage=3   # settings of the run as for pretrain/main.py

A small run of several processes is trained once without disturbance. The same run is then killed at random moments (in
start-up, a step, a validation, a save; one rank, or all of them) and started again with the same command until it ends,
as many runs as the kills need. Each start must go on from the newest complete checkpoint, and each finished run must
leave the weights, moments and metrics of the undisturbed one, bit for bit. So must a run that is started again, at
random moments, while it trains: one of the two starts must be refused with code 4 and the other's process id.

The processes run pretrain/main.py, forked from this one, which has imported it, because imports cost 12 s of CPU;
`--new-python` starts a fresh interpreter for each. Exit code 0: so many kills and second starts, no mismatch; 1
otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pretrain import processes
from pretrain.arguments import integer, number
from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError
from pretrain.main import leave, main
from pretrain.messages import set_up_console, without_wandb
from pretrain.train.metrics import METRICS_NAME, read_metrics

say = functools.partial(print, flush=True)

ROOT = Path(__file__).resolve().parents[1]
DETERMINED = ("step", "loss", "grad_norm", "lr", "tokens", "num_loops_mean", "skipped_steps", "val_loss")
"""Fields of a row of metrics.jsonl that do not depend on time."""
GRACE_SEC = 2.0
"""What the other ranks get to notice a death by themselves, before they are killed as a launcher does."""
RUN_SEC = 600.0
POLL_SEC = 0.001
VOCAB, CONTEXT = 384, 32
CONFIG = f"""
model:
  family: parcae
  vocab_size: {VOCAB}
  context_length: {CONTEXT}
  width: 32
  num_heads: 2
  ffn_width: 64
  prelude_layers: 1
  core_layers: 1
  coda_layers: 1
  recurrence: {{mean_loops: 3}}
data: {{path: DATA, num_workers: 1}}
optimizer: {{name: muon, lr: 1e-3, muon_lr: 1e-3}}
train: {{max_steps: 100, global_batch_size: 8, micro_batch_size: 2, precision: fp32, activation_checkpointing: none}}
validation: {{every_steps: 5, rows: 8}}
checkpoint: {{every_steps: 3, keep_last: 2, keep_every_steps: 12}}
logging: {{every_steps: 1, wandb: disabled}}
"""


@dataclass(frozen=True)
class Command:
    """What a user types, but for the run's name, and how its processes are started."""

    arguments: tuple[str, ...]
    runs: Path
    processes: int
    new_python: bool

    def start(self, name: str, output: str = "output") -> Start:
        """Starts the run `name`, or goes on with it; what its processes say goes to RUN.`output`."""
        return Start((*self.arguments, f"run.dir={self.runs}", f"run.name={name}"), self.runs / name, self, output)


class Start:
    """One start of a run: its processes, and what they say."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, command: Command, output: str) -> None:
        self.folder = folder
        self._log, self._output = folder / "log.txt", folder.with_suffix(f".{output}")
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        self._output.write_bytes(b"")
        size, port = str(command.processes), _free_port()
        shared = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = []
        for rank in range(command.processes):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = multiprocessing.get_context("fork").Process(
                target=_rank, args=(os.getpid(), arguments, own, self._output, command.new_python)
            )
            process.start()
            self.processes.append(process)

    @property
    def codes(self) -> list[int | None]:
        """Exit code by rank; None: it runs."""
        return [process.exitcode for process in self.processes]

    @property
    def is_whole(self) -> bool:
        """Whether every rank runs."""
        return all(code is None for code in self.codes)

    @property
    def resumed_from(self) -> int | None:
        """The step that this start has said it goes on from."""
        if not self._log.exists():
            return None
        found = re.search(rb"resuming from .*\(step (\d+)\)\n", self._log.read_bytes()[self._log_begin :])
        return int(found[1]) if found else None

    @property
    def output(self) -> str:
        """The end of what all ranks have written to stdout and stderr."""
        return self._output.read_text(errors="replace")[-4000:]

    def end(self, timeout_sec: float) -> list[int | None]:
        """Waits for the ranks, kills those that are late, and returns the exit codes."""
        deadline = time.monotonic() + timeout_sec
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        return self.codes


def _rank(
    parent: int, arguments: Sequence[str], environment: dict[str, str], output: Path, new_python: bool
) -> None:
    for stopping in processes.STOPPING:
        signal.signal(stopping, signal.SIG_DFL)
    processes.end_with_parent(parent, signal.SIGKILL)
    os.environ.update(environment)
    with output.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if new_python:
        os.execv(sys.executable, [sys.executable, str(ROOT / "pretrain" / "main.py"), *arguments])
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    leave(main(arguments))


@dataclass
class Times:
    """How long an undisturbed run takes, in seconds: random moments are drawn from these."""

    run_sec: float
    save_sec: float


@dataclass
class Torturer:
    """Kills and counts. Every broken promise becomes a line of `mismatches`."""

    command: Command
    times: Times
    rng: random.Random
    deadline: float
    """time.monotonic() after which nothing is killed any more."""
    kills: int = 0
    in_save: int = 0
    of_all: int = 0
    resumes: int = 0
    lost_steps: int = 0
    mismatches: list[str] = field(default_factory=list)

    def run(self, name: str, is_enough: Callable[[], bool], must_save: Callable[[], bool]) -> None:
        """Brings the run `name` to its end, killing it on the way until `is_enough`; `must_save`: only inside saves."""
        newest: int | None = None
        while True:
            start = self.command.start(name)
            if is_enough() or time.monotonic() > self.deadline or not self._await_moment(start, must_save()):
                codes = start.end(RUN_SEC)
                self._check_resume(start, newest, finished=True)
                if any(codes):
                    self.mismatches.append(f"{name}: exit codes {codes} without a kill\n{start.output}")
                return
            where = self._kill(start)
            start.end(GRACE_SEC)
            self._check_resume(start, newest, finished=False)
            before, newest = newest, newest_complete(start.folder)
            if before is not None and (newest is None or newest < before):
                self.mismatches.append(f"{name}: the newest complete checkpoint is {newest}, it was {before} before")
            measured = max((row["step"] for row in read_metrics(start.folder / METRICS_NAME)), default=0)
            self.lost_steps += max(0, measured - (newest or 0))
            say(f"  {name}, kill {self.kills}: {where}, {measured} steps measured, newest checkpoint {newest}")

    def _await_moment(self, start: Start, in_save: bool) -> bool:
        """Waits for a random moment, maybe of a save; False if the run has ended before."""
        if in_save or self.rng.random() < 0.5:
            saves = self.rng.randrange(1, 4)
            seen: set[str] = set()
            while len(seen) < saves:
                seen.update(partial_saves(start.folder))
                if not start.is_whole:
                    return False
                time.sleep(POLL_SEC)
            moment = time.monotonic() + self.rng.uniform(0, 1.2 * self.times.save_sec)
        else:
            moment = time.monotonic() + self.rng.uniform(0, 0.6 * self.times.run_sec)
        while time.monotonic() < moment and start.is_whole:
            time.sleep(POLL_SEC)
        return start.is_whole

    def _kill(self, start: Start) -> str:
        """Kills one rank, or all; says which and where."""
        size = len(start.processes)
        every = self.rng.random() < 0.5
        victims = list(range(size)) if every else [self.rng.randrange(size)]
        for rank in victims:
            start.processes[rank].kill()
        saving = is_saving(start.folder)
        self.kills, self.in_save, self.of_all = self.kills + 1, self.in_save + saving, self.of_all + every
        return ("all ranks" if every else f"rank {victims[0]}") + (" inside a save" if saving else "")

    def _check_resume(self, start: Start, newest: int | None, *, finished: bool) -> None:
        found = start.resumed_from
        self.resumes += found is not None
        if found != newest and (found is not None or finished):
            self.mismatches.append(f"{start.folder.name}: resumed from {found}, expected {newest}\n{start.output}")


@dataclass
class SecondStarts:
    """Starts a run again while it trains, over and over. Every broken promise becomes a line of `mismatches`."""

    command: Command
    times: Times
    rng: random.Random
    starts: int = 0
    mismatches: list[str] = field(default_factory=list)

    def run(self, name: str, is_enough: Callable[[], bool]) -> None:
        """Brings the run `name` to its end, with second starts on the way until `is_enough`."""
        owner, pause = self.command.start(name), 0.0  # the first two start together
        while owner.is_whole and not is_enough():
            moment = time.monotonic() + pause
            while time.monotonic() < moment and owner.is_whole:
                time.sleep(POLL_SEC)
            if owner.is_whole:
                owner = self._start_again(owner, name)
            pause = self.rng.uniform(0, 0.3 * self.times.run_sec)
        if any(codes := owner.end(RUN_SEC)):
            self.mismatches.append(f"{name}: exit codes {codes} with a second start\n{owner.output}")

    def _start_again(self, owner: Start, name: str) -> Start:
        """A second start beside `owner`; returns the one of the two that trains."""
        other = self.command.start(name, f"output{self.starts + 1}")
        while owner.is_whole and other.is_whole:
            time.sleep(POLL_SEC)
        refused, trains = (owner, other) if other.is_whole else (other, owner)
        codes = refused.end(10 * GRACE_SEC)
        if not any(codes):  # it had done its last step before the other asked
            return trains
        self.starts += 1
        say(f"  {name}, second start {self.starts}: the {'second' if refused is other else 'first'} is refused")
        named = f"in use by process {trains.processes[0].pid} on "
        if set(codes) != {CheckpointError.exit_code} or named not in refused.output:
            self.mismatches.append(f"{name}: exit codes {codes}, expected 4 and {named!r}\n{refused.output}")
        return trains


def partial_saves(folder: Path) -> list[str]:
    """Names of the checkpoints being written."""
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(folder / "checkpoints") if name.endswith(".partial")]
    return []


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written, named, pointed to, or an old one deleted."""
    try:
        names = os.listdir(folder / "checkpoints")
        latest = (folder / "checkpoints" / "latest").read_text().strip()
    except FileNotFoundError:
        return bool(partial_saves(folder))
    steps = [name for name in names if name.startswith("step_")]
    return any(name.startswith((".step_", ".latest")) for name in names) or (bool(steps) and latest != max(steps))


def newest_complete(folder: Path) -> int | None:
    """Step of the newest checkpoint whose every byte is as its manifest says; None where no step has a folder."""
    from pretrain.train.checkpoint.find import find_checkpoint
    from pretrain.train.checkpoint.ranks import Ranks

    try:
        found = find_checkpoint(folder, RunConfig(), Ranks())
    except CheckpointError as error:
        say(f"  {error}")
        return None
    return found.step if found else None


def differences(own: Path, straight: Path) -> Iterator[str]:
    """What of a finished run is not bit for bit that of the straight one; and what a killed start has left behind."""
    import torch

    from pretrain.train.checkpoint.find import open_checkpoint

    def determined(run: Path) -> list[str]:
        all_rows = read_metrics(run / METRICS_NAME)
        return [json.dumps({name: row[name] for name in DETERMINED if name in row}) for row in all_rows]

    rows, expected = determined(own), determined(straight)
    if len(rows) != len(expected):
        yield f"{own.name}: {len(rows)} rows in {METRICS_NAME}, expected {len(expected)}"
    for a, b in zip(rows, expected, strict=False):
        if a != b:
            yield f"{own.name}: {METRICS_NAME} has {a}, expected {b}"
    with open_checkpoint(own) as mine, open_checkpoint(straight) as reference:
        if mine.state() != reference.state() or mine.names() != reference.names():
            yield f"{own.name}: state {mine.state()}, expected {reference.state()}"
        for name in reference.names():
            for kind in reference.kinds(name):
                bits = [reader.read(name, kind).view(torch.int32) for reader in (mine, reference)]
                if not torch.equal(*bits):
                    yield f"{own.name}: {name} ({kind}) differs"
    names = [sorted(os.listdir(run / "checkpoints")) for run in (own, straight)]
    if names[0] != names[1]:
        yield f"{own.name}: checkpoints holds {names[0]}, expected {names[1]}"


def make_data(folder: Path) -> Path:
    """A data set made by the project's own commands from text of random words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randrange(2, 8))) for _ in range(400)]
    text = folder / "text.jsonl"
    with text.open("w", encoding="utf-8") as file:
        for _ in range(600):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randrange(5, 60)))}) + "\n")
    tokenizer, data = folder / "tokenizer", folder / "data"
    for script in (
        ["train_tokenizer.py", str(text), "--vocab-size", str(VOCAB), "--out", str(tokenizer)],
        ["build_shards.py", str(text), "--tokenizer", str(tokenizer), "--row-tokens", str(CONTEXT + 1), "--out",
         str(data), "--processes", "1", "--validation-fraction", "0.1"],
    ):  # fmt: skip
        output = folder / "data_prep.output"
        with output.open("wb") as file:
            command = [sys.executable, f"data_prep/{script[0]}", *script[1:]]
            code = processes.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        if code:
            sys.exit(f"data_prep/{script[0]} failed:\n{output.read_text(errors='replace')}")
    return data


def run_straight(command: Command) -> Times:
    """Trains the run `straight` to its end and measures it. Errors: SystemExit with its output where it fails."""
    begin, seen = time.monotonic(), 0.0
    saves: list[float] = []
    start = command.start("straight")
    while start.is_whole:
        saving = is_saving(start.folder)
        if saving and not seen:
            seen = time.monotonic()
        elif seen and not saving:
            saves.append(time.monotonic() - seen)
            seen = 0.0
        time.sleep(POLL_SEC)
    run_sec = time.monotonic() - begin
    if any(start.end(GRACE_SEC)) or not saves:
        sys.exit(f"the undisturbed run failed, exit codes {start.codes}\n{start.output}")
    return Times(run_sec, statistics.median(saves))


def torture(command: Command, args: argparse.Namespace) -> int:
    """Prints what was done and returns the exit code."""
    begin, rng = time.monotonic(), random.Random(args.seed)
    deadline = begin + args.minutes * 60
    times = run_straight(command)
    say(f"undisturbed: {times.run_sec:.1f} s, of which {times.save_sec * 1e3:.0f} ms for a save")
    again = start_again(command, SecondStarts(command, times, rng), args.second_starts, deadline)
    torturer = Torturer(command, times, rng, deadline, mismatches=again.mismatches)

    def is_enough() -> bool:
        return bool(torturer.mismatches) or (torturer.kills >= args.kills and torturer.in_save >= args.in_save)

    def must_save() -> bool:
        return torturer.kills + args.in_save - torturer.in_save >= args.kills

    runs = 0
    while not is_enough() and time.monotonic() < torturer.deadline:
        runs += 1
        torturer.run(f"run{runs}", is_enough, must_save)
        if not torturer.mismatches:
            torturer.mismatches += differences(command.runs / f"run{runs}", command.runs / "straight")
    for mismatch in torturer.mismatches:
        say(mismatch)
    say(
        f"{again.starts} second starts; {torturer.kills} kills, {torturer.in_save} of them inside a save, "
        f"{torturer.of_all} of all {command.processes} ranks and the others of one; {runs} runs finished, "
        f"{torturer.resumes} resumes, {torturer.lost_steps} steps measured again, "
        f"{len(torturer.mismatches)} mismatches, {time.monotonic() - begin:.0f} s"
    )
    too_few = torturer.kills < args.kills or torturer.in_save < args.in_save or again.starts < args.second_starts
    if torturer.mismatches or too_few:
        say(
            f"FAILED: expected {args.second_starts} second starts, {args.kills} kills, {args.in_save} inside a save, "
            f"no mismatch, {args.minutes:g} min"
        )
        return 1
    return 0


def start_again(command: Command, again: SecondStarts, num_starts: int, deadline: float) -> SecondStarts:
    """Trains runs with second starts until there were so many, and compares each with the straight one."""

    def is_enough() -> bool:
        return again.starts >= num_starts or bool(again.mismatches) or time.monotonic() > deadline

    runs = 0
    while not is_enough():
        runs += 1
        again.run(f"twice{runs}", is_enough)
        if not again.mismatches:
            again.mismatches += differences(command.runs / f"twice{runs}", command.runs / "straight")
    return again


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the run's settings."""
    parser = argparse.ArgumentParser(
        prog="tools.torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--kills", type=integer(1, 10**6), default=50, help="%(default)s")
    add(
        "--in-save", type=integer(0, 10**6), default=20,
        help="how many of them at least are to hit a save; %(default)s",
    )  # fmt: skip
    add("--second-starts", type=integer(0, 10**6), default=20, help="%(default)s")
    add("--minutes", type=number(0, above=True), default=20.0, help="to give up after; %(default)s")
    add("--seed", type=integer(0), default=0, help="of the moments and victims; %(default)s")
    add("--processes", type=integer(1, 64), default=2, help="%(default)s")
    add("--new-python", action="store_true", help="a fresh interpreter for each process")
    return parser.parse_known_args(argv)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(argv: Sequence[str]) -> int:
    """Makes the data set, imports what runs need, tortures, and leaves nothing behind, also after a signal."""
    args, overrides = parse_arguments(argv)
    processes.end_on_signals()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    set_up_console()
    with without_wandb():
        importlib.import_module("pretrain.train.build")
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        config, runs = Path(folder) / "torture.yaml", Path(folder) / "runs"
        config.write_text(CONFIG.replace("DATA", str(make_data(Path(folder)))))
        runs.mkdir()
        try:
            return torture(Command(("--config", str(config), *overrides), runs, args.processes, args.new_python), args)
        finally:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
