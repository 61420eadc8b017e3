"""Build a data set of a depth task: problems whose answer takes a known number of dependent steps.

    python data_prep/depth_tasks.py walk --out cache/walk
    python pretrain/main.py --config configs/walk.yaml
    python -m tools.evaluate runs/walk --tasks depth:walk --num-loops 1,2,4,8,16,32

Tasks: walk, walk_a5, hops, add, mano, assign (docs/data.md). OUT gets training and validation rows as
shards, a manifest, and a tokenizer of the task's own words, or the one of --tokenizer. Depths are drawn
up to --max-depth, each --depth-ratio times as often as the one before. One problem in eight is kept for
the evaluation, at depths that have enough of them; the command says which have not.

With --requests the problems of the evaluation are written as folders of requests instead, one for each
depth, in the form of docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data_prep.build_shards import finished
from data_prep.encoding import read_tokenizer
from data_prep.packing import BuildSettings, write_shards
from data_prep.tasks import command, only_builder, sync, sync_folder, write_text
from data_prep.train_tokenizer import SPECIAL_TOKENS
from pretrain.arguments import integer, integers, number, pathname
from pretrain.data.manifest import (
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    Manifest,
    SplitInfo,
    read_manifest,
    token_dtype,
    tokenizer_sha256,
)
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.depth import HELD_OUT_SHARE, PROBLEMS, DepthProblems, Walk
from pretrain.evaluation.depth_task import (
    DEPTH_PREFIX,
    NUM_PROBLEMS,
    DepthTask,
    Encode,
    open_depth_task,
    plain_encoder,
)

UNKNOWN = "<|unk|>"
"""Any word that the task does not have."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What decides a data set; kept in its manifest, from which `depth:OUT` knows the task."""

    task: str
    generators: tuple[tuple[int, ...], ...] | None = None
    """Of a walk on a group of the user's own."""
    rows: int = 20_000
    validation_rows: int = 512
    row_tokens: int = 129
    max_depth: int = 8
    depth_ratio: float = 0.6
    seed: int = 0
    tokenizer_sha256: str | None = None
    """None: a tokenizer of the task's own words."""

    def __post_init__(self) -> None:
        for name in ("rows", "validation_rows", "max_depth"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "an integer >= 1")
        _require(self.row_tokens >= 2, "row_tokens", self.row_tokens, "at least 2: context_length + 1")
        _require(0 < self.depth_ratio <= 1, "depth_ratio", self.depth_ratio, "a number in (0, 1]")
        _require(self.seed >= 0, "seed", self.seed, "an integer >= 0")
        if self.generators is not None and self.task != "walk":
            raise ConfigError(f"--generators: expected the task walk, not {self.task}")
        largest = self.problems.max_depth
        if largest is not None:
            _require(self.max_depth <= largest, "max_depth", self.max_depth, f"at most {largest} for {self.task}")

    @property
    def problems(self) -> DepthProblems:
        """The task's."""
        return PROBLEMS[self.task] if self.generators is None else Walk(self.task, self.generators)


def build(out: Path, arguments: Arguments, tokenizer: Path | None = None) -> Manifest:
    """The manifest of the data set in `out`, which appears whole or not at all.

    Errors: ConfigError where `out` holds something else, for a tokenizer that does not suit the task, and where a
    problem of the largest depth does not fit into a row; DataError where the disk takes no more.
    """
    partial = out.absolute().with_name(out.name + PARTIAL_SUFFIX)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        manifest = finished(out, _jsonable(arguments))
        print(f"{out} is complete")
        return manifest
    with only_builder(partial):
        dataset = partial / "dataset"
        shutil.rmtree(dataset, ignore_errors=True)
        try:
            if tokenizer is None:
                save_tokenizer(arguments.problems, dataset / "tokenizer")
            else:
                shutil.copytree(tokenizer, dataset / "tokenizer")
            manifest = _write(dataset, arguments)
            sync_folder(dataset)
            os.replace(dataset, out)
        except OSError as error:
            raise DataError(f"{out}: not written ({error}); run the command again") from error
        sync(partial.parent)
    shutil.rmtree(partial)
    return manifest


def make_row(
    arguments: Arguments, split: str, index: int, bos_id: int, encode: Encode
) -> tuple[list[int], int]:
    """(ids of a row and of what is over, number of documents): documents after <|bos|> until the row is full."""
    problems = arguments.problems
    rng = problems.rng(split, arguments.seed, index)
    depths = range(1, arguments.max_depth + 1)
    weights = list(itertools.accumulate(arguments.depth_ratio**depth for depth in depths))

    def draw_depth() -> int:
        return rng.choices(depths, cum_weights=weights)[0]

    ids: list[int] = []
    documents = 0
    while len(ids) < arguments.row_tokens:
        ids += [bos_id, *encode(problems.document(rng, draw_depth, arguments.row_tokens))]
        documents += 1
    return ids, documents


def write_requests(folder: Path, task: DepthTask) -> None:
    """Folders of requests for the problems of each depth: choices, or the one answer where it has several parts."""
    problems = task.problems
    for depth in task.depths:
        path = folder / problems.name / f"depth_{depth:02}" / "requests.jsonl"
        if path.exists():
            raise ConfigError(f"{path}: there are requests; choose another folder or remove it")
        lines = []
        for i, (context, answer) in enumerate(problems.evaluation_problems(depth, task.num_problems)):
            choices = problems.choices if answer in problems.choices else (answer,)
            lines += [
                {
                    "doc_id": i,
                    "idx": j,
                    "label": choices.index(answer),
                    "request": {"context": context, "continuation": f" {choice}"},
                }
                for j, choice in enumerate(choices)
            ]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        print(f"wrote {path}: {task.num_problems} problems")


def _write(dataset: Path, arguments: Arguments) -> Manifest:
    """Rows, indexes and the manifest, in a folder that has the tokenizer."""
    info = read_tokenizer(dataset / "tokenizer")
    encode, unknown_id = plain_encoder(dataset / "tokenizer")
    deepest = DepthTask(arguments.task, arguments.problems, (arguments.max_depth,), False)
    deepest.at_depths(encode, unknown_id, arguments.row_tokens - 1)
    settings = BuildSettings(
        inputs=(), tokenizer=dataset / "tokenizer", out=dataset, row_tokens=arguments.row_tokens
    )
    splits = {}
    for split, count in (("train", arguments.rows), ("validation", arguments.validation_rows)):
        rows = np.empty((count, arguments.row_tokens), token_dtype(info.vocab_size))
        num_tokens = num_documents = 0
        for i in range(count):
            ids, documents = make_row(arguments, split, i, info.bos_id, encode)
            rows[i] = ids[: arguments.row_tokens]
            num_tokens += len(ids)
            num_documents += documents
        folder = dataset / split / "00000"
        folder.mkdir(parents=True)
        shards = write_shards(settings, rows, folder)
        index = {"version": 2, "shards": shards}
        write_text(dataset / split / "index.json", json.dumps(index, sort_keys=True))
        splits[split] = SplitInfo(
            documents=num_documents, tokens=num_tokens, rows=count, dropped_tokens=num_tokens - rows.size,
            padded_tokens=0, max_id=int(rows.max()), shards=len(shards),
        )  # fmt: skip
    manifest = Manifest(
        dtype=token_dtype(info.vocab_size), row_tokens=arguments.row_tokens, tokenizer=info, splits=splits,
        source={"arguments": _jsonable(arguments)}, seed=arguments.seed,
    )  # fmt: skip
    write_text(dataset / MANIFEST_NAME, manifest.to_json())
    return read_manifest(dataset)


def word_tokenizer(problems: DepthProblems) -> Tokenizer:
    """One id for each word: special tokens first, then the task's."""
    words = [*SPECIAL_TOKENS.values(), UNKNOWN, *problems.words]
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # marks apart from words
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, words.index(bos))]
    )
    return tokenizer


def save_tokenizer(problems: DepthProblems, folder: Path) -> None:
    """Writes `word_tokenizer` as transformers loads it."""
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(problems),
        clean_up_tokenization_spaces=False,
        unk_token=UNKNOWN,
        **SPECIAL_TOKENS,
    )
    saved.save_pretrained(folder)


def _jsonable(arguments: Arguments) -> dict[str, Any]:
    """As the manifest gives them back."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(arguments)))
    return data


def _report(out: Path, arguments: Arguments, manifest: Manifest) -> None:
    """What was made, what a run needs to know of it, and which problems both sides share."""
    for split, info in manifest.splits.items():
        print(
            f"{split}: {info.documents:,} documents, {info.tokens:,} tokens -> {info.rows:,} rows of "
            f"{manifest.row_tokens}, {info.dropped_tokens:,} dropped"
        )
    problems = arguments.problems
    shared = [k for k in range(1, arguments.max_depth + 1) if not problems.holds_out(k)]
    for depth in shared:
        print(f"depth {depth}: training and evaluation share its {problems.num_problems(depth):,} problems")
    if len(shared) < arguments.max_depth:
        print(f"depth {len(shared) + 1} and beyond: one problem in {HELD_OUT_SHARE} is for evaluation alone")
    print(
        f"wrote {out}: data.path={out} model.vocab_size={manifest.tokenizer.vocab_size} "
        f"model.context_length={manifest.context_length}"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; the options of a data set and of requests are there where they were given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("task", choices=tuple(PROBLEMS))
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=pathname, help="folder of the data set; must not exist")
    target.add_argument("--requests", type=pathname, help="folder for the problems of the evaluation, as requests")
    add("--generators", nargs="+", type=integers(), help="of a walk: where cells go, such as 1,2,0")
    of_data, of_requests = ["tokenizer"], ["depths", "limit"]
    add("--tokenizer", type=pathname, default=argparse.SUPPRESS, help="folder (default: one of the task's words)")
    for name, text in (
        ("rows", "training rows"), ("validation_rows", "validation rows"), 
        ("row_tokens", "ids per row: context_length + 1"),
        ("max_depth", "largest depth in the rows"), ("depth_ratio", "problems of depth k + 1 for one of depth k"),
        ("seed", "of the rows"),
    ):  # fmt: skip
        default = getattr(Arguments, name)
        read = integer() if isinstance(default, int) else number()
        of_data.append(name)
        add("--" + name.replace("_", "-"), type=read, default=argparse.SUPPRESS, help=f"{text} ({default})")
    add("--depths", type=integers(1, 4_096), default=argparse.SUPPRESS, help="of --requests, with commas between")
    limit_help = f"problems of each depth of --requests ({NUM_PROBLEMS})"
    add("--limit", type=integer(1, 10**9), default=argparse.SUPPRESS, help=limit_help)
    args = parser.parse_args(argv)
    wrong, target_name = (of_requests, "--out") if args.requests is None else (of_data, "--requests")
    if unused := [name for name in wrong if name in args]:
        parser.error(f"--{unused[0].replace('_', '-')} has no meaning with {target_name}")
    return args


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}, expected {expected}")


def main() -> None:
    """The command line."""
    args = vars(parse_arguments())
    task, out, folder = args.pop("task"), args.pop("out"), args.pop("requests")
    generators = None if args["generators"] is None else tuple(args["generators"])
    if folder is not None:
        problems = Arguments(task=task, generators=generators).problems
        opened = open_depth_task(DEPTH_PREFIX + task, args.get("depths", ()), args.get("limit"))
        write_requests(folder, replace(opened, problems=problems))
        return
    tokenizer = args.pop("tokenizer", None)
    digest = None if tokenizer is None else tokenizer_sha256(tokenizer)
    arguments = Arguments(task=task, tokenizer_sha256=digest, **args | {"generators": generators})
    _report(out, arguments, build(out, arguments, tokenizer))


if __name__ == "__main__":
    command(main)
