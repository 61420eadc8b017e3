"""A fuzzer of configurations: mutations of the shipped files, and a judge of what becomes of each.

    python -m tests.config.fuzz --seeds 11 12 13 --cases 1000 --starts 20

The rule for every mutation: it is refused with one message that names what was changed, or the configuration holds
exactly what was written. No traceback, no hang; and what a dry run accepts, a run can start with (`--starts`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.depth_tasks import word_tokenizer
from pretrain.config.check import all_keys, type_of, without_null
from pretrain.config.load import dump_config, load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.evaluation.depth import PROBLEMS
from pretrain.planning import Plan
from pretrain.preflight import preflight
from tests.config.test_preflight import write_data_set
from tests.helpers import REPOSITORY

SHIPPED = sorted(path.stem for path in REPOSITORY.glob("configs/*.yaml"))
KEYS = [key.replace("[]", "[0]") for key in all_keys() if not key.startswith(("data.path", "run.dir"))]
PATH_KEYS = (
    "run.dir", "run.name", "data.path", "data.sources[0].path", "checkpoint.initial_weights", "evaluation.task_data",
    "evaluation.core_bundle",
)  # fmt: skip
HANG_SEC = 60
"""Far above the longest case, since other processes may hold the machine."""
WORDS: dict[str, tuple[Any, ...]] = {
    # what is written -> what it may mean, where it is not refused
    **{str(n): (n,) for n in (0, 1, -1, 2, 3, 7, 100, 4096, 10**6, 10**9, 10**12, 2**31, 2**63, 2**64, 10**19, 10**40)},
    **{text: (float(text),) for text in ("0.0", "-0.0", "0.5", "1.0", "-1e-9", "1e-300", "1e-320", "1e3", "1e9")},
    **{text: (float(text),) for text in ("1e30", "1e308", "-1e308", ".5", "5.", "1E5", "+3.5", "1e-3")},
    "1e309": (), "-1e400": (), "9" * 5_000: (), "+3": (3,), "-0": (0,), "1_000": (1000,), "1__0": (), "_1": (),
    ".inf": (), "-.inf": (), ".nan": (), "inf": (), "nan": (), "NaN": (), "-inf": (), "Infinity": (),
    "0650": (), "-010": (), "00": (), "0x10": (), "0o17": (), "0b11": (), "10:50": (), "1:30:00": (), "10:50.5": (),
    "\uff12": (), "\uff11\uff12": (), "٣": (), "1e\uff13": (), "\uff11.\uff15": (), "²": (), "½": (),
    "1,5": (), "1.000,5": (), "1 000": (),
    "true": (True,), "True": (True,), "false": (False,), "FALSE": (False,), "yes": (True,), "off": (False,),
    "null": (None,), "~": (None,), "None": (), "none": (), "2026-01-01": (), "2026-01-01T10:00:00Z": (),
    "abc": (), "'3'": (3, "3"), "'1e-3'": (1e-3, "1e-3"), '"0650"': ("0650",), "'true'": (True, "true"), "''": ("",),
    "[]": ([],), "[1]": ([1],), "[1, 2]": ([1, 2],), "[0.5, 0.9]": ([0.5, 0.9],), "[[1]]": (), "{}": (), "{a: 1}": (),
    "[1, 2, 3]": ([1, 2, 3],), "[-1]": ([-1],), "[.inf]": (), "[0650]": (), "[1, null]": (), "[1e308, 0]": (),
    "[10:50]": (), "[true]": (), "[1, 1]": ([1, 1],), "[99999999999999999999]": ([99999999999999999999],),
    "${": (), "${}": (), "${nope}": (), "${optimizer.lr}": (8e-3,), "${train.seed}": (0,), "${model.width}": (128,),
    "${train}": (), "${optimizer.betas}": ([0.8, 0.95],), "${oc.env:FUZZ_NOT_SET}": (), "${data.path}": ("",),
    "${oc.env:HOME}": (os.environ.get("HOME", ""),), "${oc.decode:'1'}": (1,), "${oc.decode:inf}": (),
    "${oc.eval:1}": (),
    "${..lr}": (), "${a:${b:${c}}}": (), "${model.recurrence.distribution}": ("poisson",), "x${optimizer.lr}": (),
    "???": (), "!!int '3'": (3, "3"), "!!float 3": (3.0,), "!!str 3": ("3", 3), "!!python/object:os.system x": (),
    "!!binary aGk=": (), "!!set {1, 2}": (), "!!timestamp 2026-01-01": (), "&a 3": (3,), "*a": (), "&a [*a]": (),
    "!foo 3": (), "<<": (), "=": (), "@": (), "`": (), "%": (), "|": (), ">": (), "- 1": (), ": 1": (), "? 1": (),
    "\u202eabc": (), "\u200b3": (), "a\u0000b": (), "a\tb": (), "\ud800": (), "\x7f": (), "é": (), "🙂": (),
    "3\u00a0": (),
    "x" * 5_000: (), "a/b": (), "..": (), ".": (), "#3": (), "3 # of them": (3,), "'": (), '"': (), "\\": (),
}  # fmt: skip
PATHS = (
    "''", "~", "~/looped_fuzz", "~nobody_here/x", "~root/x", "'a\\0b'", '"a\\nb"', '"a\\0b"', "{tmp}/file",
    "{tmp}/file/x", "{tmp}/link", "{tmp}/dangling", "{tmp}/data", "{tmp}/missing/x", "relative/x", "./x", "../x",
    "/", "/proc/x", "/dev/null", "{tmp}/" + "n" * 300, "{tmp}/" + "d/" * 3_000, "{tmp}/ü", "{tmp}/\u202ex",
    "{tmp}/ ", "' {tmp}/x'", "{tmp}/loop", "{tmp}/x:y", "{tmp}/x%y", "{tmp}/x*", "$HOME/x", "s3://bucket/x",
    "http://x/y", ".", "..", "null", "3", "[]", "'\ud800'", "{tmp}/run_file", "{tmp}/run_log",
)  # fmt: skip
BROKEN = (
    "", "\n", "---\n---\n", "--- 1\n--- 2\n", "\ufeffrun: {name: x}\n", "- 1\n", "3\n", "text\n", "null\n", "[]\n",
    "{}\n", "a: [" * 30_000, "{" * 5_000, "a: {b: " * 3_000, "[" * 100_000, "&a [*a]\n", "run: &a {name: *a}\n",
    "x: 9" + "9" * 6_000, "run: {name: \x00}\n", "%YAML 9.9\n---\nrun: {}\n", "run: !!python/name:os.system\n",
    "{1: 2}\n", "{[1]: 2}\n", "? {a: b}\n: 1\n", "null: 3\n", "true: 3\n", "1.5: 3\n", "run: {1: 2}\n",
    "run: {null: 2}\n", "run: {true: 1}\n", "run:\n\tname: x\n", "run: {name: x}\nrun: {name: y}\n",
    "<<: {run: {name: x}}\n", "run: {<<: {name: x}}\n", "run: {<<: 3}\n", "base: {BASE}\n<<: [{run: {name: x}}]\n",
    "optimizer: {betas: {0: 0.5}}\n", "data: {sources: {0: {path: a}}}\n", "lr: &lr 3\noptimizer: {lr: *lr}\n",
    "run: ''\n", "run: 3\n", "run: []\n", "run: null\n", "model: null\ntrain: null\n",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b]\n"
    "d: &d [*c, *c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d]\n",
    "run: {name: '${run.dir}', dir: '${run.name}'}\n", "run: ${train}\n", "${a}: 3\n", "run: {'${x}': 3}\n",
    "run: ???\n", "optimizer: {lr: '${optimizer.eps}', eps: '${optimizer.lr}'}\n",
    "train: {max_steps: '${train.max_tokens}'}\n", "optimizer: '${oc.env:HOME}'\n", "base: ${oc.env:HOME}\n",
    "base: ''\n", "base: .\n", "base: [a]\n", "base: null\n", "base: {BASE}\nbase: {BASE}\n", "base: '{BASE}\\0'\n",
    "base: \"a\\nb\"\n", "base: ~/nothing.yaml\n", "base: /dev/null\n", "base: mine.yaml\n", "base: ./mine.yaml\n",
    "base: /dev/zero\n", "base: " + "x" * 5_000 + "\n", "base: ???\n",
)  # fmt: skip
GRAMMAR = (
    "", "=", "==", "=3", "--", "---", "--=3", "-", "a", "a=", "a=b", "a.b=c", ".=3", "..=3", ".lr=3",
    "optimizer.=3", "optimizer..lr=3", "optimizer.lr.=3", "optimizer=3", "optimizer=null", "optimizer={}",
    "optimizer={lr: 1}", "optimizer[lr]=3", "optimizer[0]=3", "optimizer.betas[0]=0.5", "optimizer.betas[1]=0.5",
    "optimizer.betas[2]=0.5", "optimizer.betas[-1]=0.5", "optimizer.betas[0][0]=1", "optimizer.betas[]=1",
    "optimizer.betas[=1", "optimizer.betas]=1", "optimizer.betas[a]=1", "optimizer.betas[0]x=1",
    "optimizer.betas[99999999999999999999999]=1", "optimizer.betas.0=0.5", "optimizer.betas[\uff10\uff10]=1",
    "optimizer.betas[01]=0.5", "optimizer.betas[0]=null", "optimizer.betas={0: 1}", "optimizer.betas=0.5",
    "optimizer.lr[0]=1", "train.skip_steps[0]=5", "train.skip_steps=5", "train.skip_steps=[5]",
    "train.skip_steps=[5", "train.skip_steps=1,2", "data.sources[0].path=x", "data.sources[1].path=x",
    "data.sources.path=x", "data.sources=[{path: x}]", "data.sources=[3]", "loss.schedules=[{term: z_loss}]",
    "loss.schedules=[{}]", "loss.schedules[0].term=x", "model=x", "model=null", "run=null", "OPTIMIZER.LR=3",
    "optmi.lr=3", "optimizer.LR=3", "Optimizer.lr=1", " optimizer.lr=3", "optimizer.lr =3", "optimizer.lr= 3",
    "optimizer .lr=3", "\u043eptimizer.lr=3", "optimizer.lr\uff1d3", "--optimizer.lr", "--optimizer.lr=",
    "--optimizer.lr==3", "---optimizer.lr=1", "optimizer.lr=3=4", "optimizer.lr:3", "optimizer/lr=3",
    "optimizer.lr=--3", "config=x", "base=x", "base.x=3", "hydra.run=3", "+optimizer.lr=3", "~optimizer.lr",
    "~optimizer.lr=3", "\x00=3", "a\nb=3", "optimizer.lr=3\n", "optimizer.lr=3\nrun.name=x", "\ud800=3",
    "run.name=\udcff", "model.recurrence.mean_loops.x=3", "recurrence.mean_loops=3", "mean_loops=3", "lr=3",
    "train.lr=1e-3", "model.recurrence=3", "model.recurrence=null", "model.recurrence=[]",
    "model.recurrence={mean_loops: 2, mean_loops: 3}", "model.recurrence={mean_loops: [2]}",
    "train.max_steps=5 train.max_tokens=6", "model.mean_loops=3", "logging.wandb=off", "${a}=3", "optimizer.${a}=3",
    "optimizer.lr=${optimizer.lr}", "optimizer.lr=${.lr}", "train.max_tokens=${train.max_tokens}",
    "run.name=${run.name}", "run.name=$", "run.name=$${x}", "run.name=\\${x}", "run.name=a\\",
    "run.name=${oc.env:HOME}",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One mutation: a file, overrides, and what the key that it is about may hold if it is accepted."""

    base: str
    text: str | bytes = "base: {BASE}\n"
    overrides: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """A refusal names one of them. Empty: any refusal will do."""
    meanings: tuple[Any, ...] | None = None
    """What keys[0] may be where it is accepted. None: anything."""
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = self.text if isinstance(self.text, str) else repr(self.text)
        parts = [f"base {self.base}", f"text {text[:300]!r}", f"overrides {[o[:200] for o in self.overrides]}"]
        return ", ".join([*parts, *([f"environment {self.environment}"] if self.environment else [])])


# ------------------------------------------------------------------------------------------------------- generating


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields `count` mutations that follow from `seed`."""
    draw = random.Random(seed)
    kinds: list[tuple[int, Callable[[random.Random], Case]]] = [
        (30, _override), (25, _value_in_file), (8, _environment), (8, _path), (6, _structure), (5, _misspelt),
        (6, _damaged), (3, _broken), (6, _grammar), (1, _bases), (6, _several),
    ]  # fmt: skip
    weights, makers = zip(*kinds, strict=True)
    for _ in range(count):
        yield draw.choices(makers, weights)[0](draw)


def _base(draw: random.Random) -> str:
    return "tiny" if draw.random() < 0.6 else draw.choice(SHIPPED)


def _word(draw: random.Random, key: str) -> tuple[str, tuple[Any, ...] | None]:
    """Something to write, and what it may mean. Half of the time a number of a random size and sign."""
    if draw.random() < 0.35:
        number = draw.choice((-1, 1, 1, 1)) * 10 ** draw.uniform(-12, 14)
        text = f"{number:.0f}" if draw.random() < 0.5 else f"{number:.{draw.randrange(6)}e}"
        return text, (float(text), int(text)) if "e" not in text else (float(text),)
    written = draw.choice(list(WORDS))
    meanings = WORDS[written]
    if "${" in written:
        return written, None if meanings else ()
    return written, meanings


def _means(key: str, written: str, meanings: tuple[Any, ...] | None, unquoted: bool) -> tuple[Any, ...] | None:
    """Also the text as it stands, where the key takes text."""
    if meanings is None:
        return None
    hint = without_null(type_of(key, written))
    takes_text = hint is str or "Literal" in str(hint)
    plain = [written] if unquoted else []
    return (*meanings, *(plain if takes_text else []))


def _override(draw: random.Random) -> Case:
    key = draw.choice(KEYS)
    written, meanings = _word(draw, key)
    setting = f"{key}={written}" if draw.random() < 0.7 else f"--{key}={written}"
    return Case(_base(draw), overrides=(setting,), keys=(key,), meanings=_means(key, written, meanings, True))


def nested(key: str, written: str) -> str:
    """`written` at `key` in a YAML file; the item of a list as a list of one."""
    text = written
    for name in reversed(key.split(".")):
        text = f"{name.removesuffix('[0]')}: " + (f"[{text}]" if name.endswith("[0]") else text)
        text = "{" + text + "}"
    return text[1:-1] + "\n"


def _value_in_file(draw: random.Random) -> Case:
    key = draw.choice(KEYS)
    written, meanings = _word(draw, key)
    if draw.random() < 0.5 or any(mark in written for mark in "{}[],|>#&*!?-:%@`'\"\n"):
        lines = [name.removesuffix("[0]") for name in key.split(".")]
        text = "".join("  " * depth + f"{name}:\n" for depth, name in enumerate(lines[:-1]))
        body = text + "  " * (len(lines) - 1) + f"{lines[-1]}: {written}\n"
        if "[0]" in key:
            body = nested(key, written)
    else:
        body = nested(key, written)
    plain = written.split(" #")[0].strip()
    return Case(_base(draw), "base: {BASE}\n" + body, keys=(key,), meanings=_means(key, plain, meanings, True))


def _environment(draw: random.Random) -> Case:
    key = draw.choice(KEYS)
    written, meanings = _word(draw, key)
    if "\0" in written or "\ud800" in written:
        written, meanings = "3", (3,)
    meanings = None if meanings is None else _means(key, written, meanings, True)
    setting = f"{key}=" + draw.choice(("${oc.env:FUZZ}", "${oc.decode:${oc.env:FUZZ}}", "${oc.env:FUZZ,3}"))
    if "decode" in setting:
        meanings = None
    return Case(
        _base(draw), overrides=(setting,), keys=(key,), meanings=meanings, environment={"FUZZ": written}
    )  # fmt: skip


def _path(draw: random.Random) -> Case:
    key, written = draw.choice(PATH_KEYS), draw.choice(PATHS)
    if draw.random() < 0.5:
        return Case("tiny", overrides=(f"{key}={written}",), keys=(key,))
    return Case("tiny", "base: {BASE}\n" + nested(key, written), keys=(key, "base"))


def _structure(draw: random.Random) -> Case:
    sections = list(dict.fromkeys(key.rsplit(".", 1)[0] for key in KEYS if "[" not in key))
    section = draw.choice(sections)
    written = draw.choice(("null", "{}", "[]", "3", "x", "[{}]", "{x: 1}", "{lr: {lr: 1}}", "${train}", "true", "???"))
    if draw.random() < 0.5:
        return Case(_base(draw), overrides=(f"{section}={written}",), keys=(section,))
    return Case(_base(draw), "base: {BASE}\n" + nested(section, written), keys=(section,))


def _misspelt(draw: random.Random) -> Case:
    key = draw.choice([key for key in KEYS if "[" not in key])
    at = draw.randrange(len(key))
    change = draw.choice((key[at].upper(), "", "_", key[at] * 2, "-", ".", "[0]", " ", "é"))
    name = key[:at] + change + key[at + 1 :]
    if name in KEYS:
        return Case(_base(draw), overrides=(f"{name}=3",), keys=(name,))
    return Case(_base(draw), overrides=(f"{name}=3",), keys=(name,), meanings=())


def _damaged(draw: random.Random) -> Case:
    base = _base(draw)
    text = (REPOSITORY / f"configs/{base}.yaml").read_text(encoding="utf-8").replace("base: ", "base: {CONFIGS}/")
    if draw.random() < 0.3:
        blocks = ("\n" + text).split("\n")
        first, last = sorted(draw.sample(range(len(blocks)), 2))
        return Case(base, "\n".join(blocks[:first] + blocks[last:]) + "\n")
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(text))
        piece = draw.choice(["", "\0", "é", "\u2028", *": \n\t-[{}'\"#&*!0e"])
        text = text[:at] + piece + text[at + draw.randrange(3) :]
    if draw.random() < 0.2:
        return Case(base, text.encode("utf-8")[: draw.randrange(len(text))] + bytes([draw.randrange(256)]))
    return Case(base, text)


def _broken(draw: random.Random) -> Case:
    return Case(_base(draw), draw.choice(BROKEN))


def _grammar(draw: random.Random) -> Case:
    return Case(_base(draw), overrides=tuple(draw.choice(GRAMMAR).split("\x1f")))


def _bases(draw: random.Random) -> Case:
    length = draw.choice((2, 5, 300, 1_200))
    end = draw.choice([f"base: {name}\n" for name in ("{BASE}", "mine.yaml", "b0.yaml", "none.yaml", "[x]")])
    files = {f"b{i}.yaml": f"base: b{i + 1}.yaml\n" for i in range(length)} | {f"b{length}.yaml": end}
    return Case("tiny", "base: b0.yaml\n", files=files)


def _several(draw: random.Random) -> Case:
    """Sound values of several keys at once: what sections must agree on."""
    pool = ("0", "1", "2", "3", "4", "8", "16", "0.1", "0.5", "true", "false", "null", "[]", "[1, 2]")
    settings = {}
    for key in draw.sample([key for key in KEYS if "[" not in key], draw.randrange(2, 6)):
        hint = without_null(type_of(key, ""))
        choices = list(hint.__args__) if "Literal" in str(hint) else pool
        settings[key] = draw.choice(choices)
    return Case(_base(draw), overrides=tuple(f"{key}={value}" for key, value in settings.items()))


# ---------------------------------------------------------------------------------------------------------- judging


class Workplace:
    """A folder with data sets, odd files and the mutated configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_text("x")
        (folder / "link").symlink_to(folder / "file")
        (folder / "dangling").symlink_to(folder / "nowhere")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "run_file").mkdir()
        (folder / "run_file/run").write_text("x")
        (folder / "run_log/run/log.txt").mkdir(parents=True)
        self._data: dict[tuple[int, int], Path] = {}

    def write(self, case: Case) -> tuple[Path, tuple[str, ...]]:
        """The file and the overrides of `case`."""
        path, configs = self.folder / "mine.yaml", REPOSITORY / "configs"
        for name, content in {**case.files, path.name: case.text}.items():
            if isinstance(content, str):
                content = content.replace("{BASE}", str(configs / f"{case.base}.yaml"))
                content = content.replace("{CONFIGS}", str(configs)).replace("{tmp}", str(self.folder))
                content = content.encode("utf-8", "surrogatepass")
            (self.folder / name).write_bytes(content)
        return path, tuple(text.replace("{tmp}", str(self.folder)) for text in case.overrides)

    def data_for(self, cfg: Config) -> Path:
        """A data set with the row length and vocabulary of a shipped file."""
        key = (cfg.model.context_length + 1, cfg.model.vocab_size)
        if key not in self._data:
            folder = self.folder / f"data_{key[0]}_{key[1]}"
            rows = max(2_000, cfg.train.global_batch_size, cfg.validation.rows)
            write_data_set(
                folder, row_tokens=key[0], vocab_size=key[1], max_id=key[1] - 1, rows=rows,
                tokenizer=word_tokenizer(PROBLEMS["walk"]).to_str(),  # which configs/walk.yaml is evaluated on
            )  # fmt: skip
            self._data[key] = folder
        return self._data[key]


def judge(case: Case, place: Workplace) -> tuple[str, str]:
    """(verdict, words): accepted, refused, or what is wrong: traceback, hang, lie (another value), nameless."""
    with _alarm(HANG_SEC), _environment_of(case):
        path, overrides = place.write(case)
        try:
            cfg = check(path, overrides, case, place)
        except ConfigError as error:
            return _judge_refusal(case, str(error))
        except TimeoutError:
            return "hang", f"longer than {HANG_SEC} s"
        except BaseException:
            return "traceback", traceback.format_exc()[-1_500:]
    return _judge_value(case, cfg, place)


def check(path: Path, overrides: tuple[str, ...], case: Case, place: Workplace) -> Config:
    """The configuration as pretrain/main.py --dry-run checks it, up to the model that it builds."""
    about_data = any(key.startswith(("data.path", "data.sources")) for key in case.keys)
    # The last override wins, and the case is to have the last word.
    own = () if about_data else (f"data.path={place.data_for(_shipped(case.base))}",)
    folder = () if "run.dir" in case.keys else (f"run.dir={place.folder / 'runs'}",)
    cfg = load_config(path, [*own, *folder, *overrides])
    validate(cfg, None)
    preflight(cfg)
    plan = Plan(cfg, cfg.parallel.tensor * cfg.parallel.pipeline)
    assert all(math.isfinite(number) for number in (*plan.loops_per_row, plan.work.readouts)), plan.work
    return cfg


_cache: dict[str, Config] = {}


def _shipped(name: str) -> Config:
    if name not in _cache:
        _cache[name] = load_config(REPOSITORY / f"configs/{name}.yaml")
    return _cache[name]


def _judge_refusal(case: Case, message: str) -> tuple[str, str]:
    names = [key.split("[")[0].lstrip("-") for key in case.keys]
    # A file that is no YAML has a line instead of a key.
    if case.keys and not any(name in message for name in (*names, "not valid YAML", "cannot be read: 'utf-8'")):
        return "nameless", message
    if len(message) > 2_000:
        return "long", message[:300]
    return "refused", message


def _judge_value(case: Case, cfg: Config, place: Workplace) -> tuple[str, str]:
    if case.meanings is not None:
        value = value_at(cfg, case.keys[0])
        if not any(same(value, meaning) for meaning in case.meanings):
            return "lie", f"{case.keys[0]} is {value!r}, not one of {case.meanings!r}"
    saved = place.folder / "saved.yaml"
    saved.write_text(dump_config(cfg), encoding="utf-8")
    if load_config(saved) != cfg:
        return "lie", "the saved configuration differs"
    return "accepted", ""


def value_at(cfg: Config, key: str) -> Any:
    """The value of `key`, such as data.sources[0].weight."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name.removesuffix("[0]"))
        value = value[0] if name.endswith("[0]") else value
    return value


def same(value: Any, meaning: Any) -> bool:
    """Equal, and not a truth value for a number; a list for a tuple."""
    if isinstance(value, list | tuple) and isinstance(meaning, list | tuple):
        return len(value) == len(meaning) and all(map(same, value, meaning))
    return isinstance(value, bool) == isinstance(meaning, bool) and value == meaning


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _environment_of(case: Case) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(case.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(argv: list[str]) -> int:
    """Judges the cases of each seed and prints what is wrong; returns the number of faults, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--cases", type=int, default=1_000, help="of each seed (%(default)s)")
    args = parser.parse_args(argv)
    faults = 0
    for seed in args.seeds:
        counts: dict[str, int] = {}
        with tempfile.TemporaryDirectory() as folder:
            place = Workplace(Path(folder) / "place")
            for case in cases(seed, args.cases):
                verdict, words = judge(case, place)
                counts[verdict] = counts.get(verdict, 0) + 1
                if verdict not in ("accepted", "refused"):
                    faults += 1
                    print(f"{verdict}: {case}\n    {words}".encode("utf-8", "replace").decode())
        print(f"seed {seed}: {counts}")
    return min(faults, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
