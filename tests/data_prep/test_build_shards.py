"""A build writes every token of every document once, in an order set by its arguments alone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import models

import data_prep.build_shards
from data_prep.build_shards import build
from data_prep.encoding import Encoder, _byte_chars
from data_prep.packing import BuildSettings, key_ranges
from data_prep.train_tokenizer import SPECIAL_TOKENS, _new_tokenizer
from data_prep.verify_shards import verify
from pretrain.data.manifest import read_manifest
from pretrain.errors import ConfigError, DataError
from tests.data_prep.conftest import all_rows, make_documents, save_tokenizer, tree, write_documents

REPOSITORY = Path(__file__).resolve().parents[2]
MakeSettings = Callable[..., BuildSettings]


def texts(ids: np.ndarray, encoder: Encoder) -> list[str]:
    """The documents of a stream that begins with a document; the last one may be cut."""
    starts = np.flatnonzero(ids == encoder.info.bos_id)
    assert starts[0] == 0
    return [encoder.decode(part[1:].tolist()) for part in np.split(ids, starts[1:])]


def test_rows_give_back_the_documents(make_settings: MakeSettings, documents: list[str]) -> None:
    settings = make_settings()
    manifest = build(settings)
    encoder = Encoder(settings.out / "tokenizer")
    found = []
    for split, info in manifest.splits.items():
        stream = all_rows(settings.out, split).ravel()
        assert len(stream) == info.rows * 33 == info.tokens - info.dropped_tokens
        assert info.dropped_tokens < 33
        assert stream.max() == info.max_id
        *whole, cut = texts(stream, encoder)
        # The tail that was dropped held the end of one document, and perhaps some whole ones.
        assert set(whole) <= set(documents)
        assert sum(text.startswith(cut) for text in documents) >= 1
        assert len(whole) <= info.documents <= len(whole) + 1 + info.dropped_tokens
        found += whole
    assert max(Counter(found).values()) == 1
    assert sum(info.documents for info in manifest.splits.values()) == len(documents)
    total = sum(1 + len(encoder.encode(text)) for text in documents)
    assert sum(info.tokens for info in manifest.splits.values()) == total
    order = [documents.index(text) for text in found]
    assert abs(np.corrcoef(order[:200], np.arange(200))[0, 1]) < 0.3
    assert read_manifest(settings.out) == manifest


def test_processes_do_not_change_a_byte(built: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(bucket_tokens=3_000, shard_bytes=4_096)
    build(settings, processes=2)
    assert tree(settings.out) == tree(built)
    assert len(list((built / "train").iterdir())) > 3
    assert verify(settings.out, processes=2) == []
    assert not settings.out.with_name("set.partial").exists()


def test_buckets_and_units_change_tails_only(
    built: Path, make_settings: MakeSettings, documents: list[str], tmp_path: Path
) -> None:
    build(make_settings(unit_bytes=1 << 20, bucket_tokens=3_000, out=tmp_path / "units"))
    np.testing.assert_array_equal(all_rows(tmp_path / "units", "train"), all_rows(built, "train"))
    one = build(make_settings())
    many = read_manifest(built)
    assert many.splits["train"].tokens == one.splits["train"].tokens
    assert many.splits["train"].documents == one.splits["train"].documents
    buckets = len(key_ranges(many.splits["train"].tokens, 3_000))
    assert 33 < many.splits["train"].dropped_tokens < 33 * buckets
    encoder = Encoder(built / "tokenizer")
    stream = all_rows(built, "train").ravel()
    assert sum(text in documents for text in texts(stream, encoder)) > 0.9 * 270


def test_seed_changes_order_and_split(make_settings: MakeSettings, tmp_path: Path) -> None:
    first, second = (
        build(make_settings(seed=seed, out=tmp_path / str(seed))).splits for seed in (0, 1)
    )
    assert first["validation"].tokens != second["validation"].tokens
    assert (all_rows(tmp_path / "0", "train")[0] != all_rows(tmp_path / "1", "train")[0]).any()


def test_equal_documents_lie_in_one_split(make_settings: MakeSettings, tmp_path: Path) -> None:
    documents = make_documents(40) * 5
    source = write_documents(tmp_path / "a.jsonl", documents)
    settings = make_settings(inputs=(str(source),), validation_fraction=0.3, row_tokens=2)
    build(settings)
    encoder = Encoder(settings.out / "tokenizer")
    train, validation = (
        set(texts(all_rows(settings.out, split).ravel(), encoder)[:-1])
        for split in ("train", "validation")
    )
    assert len(train) > 20
    assert len(validation) > 5
    assert not train & validation


def test_without_validation(make_settings: MakeSettings) -> None:
    settings = make_settings(validation_fraction=0.0)
    assert list(build(settings).splits) == ["train"]
    assert not (settings.out / "validation").exists()


def test_streaming_reads_it_locally_compressed_and_remotely(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    from streaming import StreamingDataset

    settings = make_settings(compression="zstd:3", bucket_tokens=3_000, shard_bytes=4_096)
    build(settings)
    rows = StreamingDataset(
        remote=str(settings.out / "train"), local=str(tmp_path / "cache"), batch_size=1,
        shuffle=False, num_canonical_nodes=1, validate_hash="xxh3_64",
    )  # fmt: skip
    np.testing.assert_array_equal([row["tokens"] for row in rows], all_rows(settings.out, "train"))


def pairs_tokenizer(folder: Path) -> Path:
    """3 special ids, 256 bytes, all 65,536 pairs of bytes; zz is 65535, zy is 65536."""
    char = _byte_chars()
    pairs = [(char[a], char[b]) for a in range(256) for b in range(256)]
    chosen = [("z", "z"), ("z", "y")]
    pairs = [pair for pair in pairs if pair not in chosen]
    at = 65_535 - 3 - 256
    pairs[at:at] = chosen
    tokens = [*SPECIAL_TOKENS.values(), *char.values(), *map("".join, pairs)]
    bpe = _new_tokenizer()
    bpe.model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    bpe.add_special_tokens(list(SPECIAL_TOKENS.values()))
    return save_tokenizer(folder, bpe)


def test_ids_above_65535_survive(make_settings: MakeSettings, tmp_path: Path) -> None:
    source = write_documents(tmp_path / "a.jsonl", ["zz", "zy"])
    settings = make_settings(
        inputs=(str(source),), tokenizer=pairs_tokenizer(tmp_path / "pairs"), row_tokens=2,
        validation_fraction=0.0,
    )  # fmt: skip
    manifest = build(settings)
    assert (manifest.dtype, manifest.tokenizer.vocab_size) == ("uint32", 65_795)
    assert manifest.splits["train"].max_id == 65_536
    assert sorted(all_rows(settings.out, "train").tolist()) == [[0, 65_535], [0, 65_536]]


def test_failure_in_packing_then_restart(
    built: Path,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = make_settings(bucket_tokens=3_000, shard_bytes=4_096)
    whole, calls = data_prep.build_shards.pack_bucket, []

    def fails(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            folder = args[-1]
            assert isinstance(folder, Path)
            folder.mkdir(parents=True)
            (folder / "shard.00000.mds").write_bytes(b"half a shard")
            raise OSError("No space left on device")
        return whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(data_prep.build_shards, "pack_bucket", fails)
    with pytest.raises(
        DataError, match="train_00002: No space left on device; finished work is kept"
    ):
        build(settings)
    assert not settings.out.exists()
    with pytest.raises(ConfigError, match="its build has not finished"):
        read_manifest(settings.out)
    monkeypatch.setattr(data_prep.build_shards, "pack_bucket", whole)
    capsys.readouterr()
    build(settings)
    output = capsys.readouterr().out
    assert "train: 2 of" in output
    units = output.split("encode: ")[1].split(" of ")[0]
    assert int(units) > 3
    assert tree(settings.out) == tree(built)


def running() -> dict[int, int]:
    """Parent of every process that runs now (zombies do not)."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
            if state not in "ZX":
                parents[int(path.parent.name)] = int(parent)
    return parents


def workers_of(pid: int) -> set[int]:
    """Grandchildren of a build: its children are the servers that multiprocessing starts."""
    parents = running()
    return {child for child, parent in parents.items() if parents.get(parent) == pid}


def wait_until(holds: Callable[[], bool], timeout_sec: float) -> None:
    end = time.monotonic() + timeout_sec
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_kill_and_rerun(
    corpus: Path, built: Path, make_settings: MakeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(bucket_tokens=3_000, shard_bytes=4_096)
    partial = settings.out.with_name("set.partial")
    command = [
        sys.executable, "data_prep/build_shards.py", str(corpus), "--out", str(settings.out),
        "--tokenizer", str(settings.tokenizer), "--row-tokens=33", "--validation-fraction=0.1",
        "--unit-bytes=4000", "--bucket-tokens=3000", "--shard-bytes=4096", "--processes=2",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(partial.glob("records/*.json"))) >= 2, timeout_sec=120)
        workers = workers_of(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert workers
    wait_until(lambda: not workers & running().keys(), timeout_sec=10)
    assert partial.is_dir()
    assert not settings.out.exists()
    with pytest.raises(ConfigError, match=r"run the same .* command again"):
        read_manifest(settings.out)
    build(settings)
    assert "tasks were done before" in capsys.readouterr().out
    assert tree(settings.out) == tree(built)


def test_restart_refuses_other_arguments(
    make_settings: MakeSettings, corpus: Path, tmp_path: Path
) -> None:
    source = tmp_path / "corpus"
    shutil.copytree(corpus, source)
    settings = make_settings(inputs=(str(source),), row_tokens=100_000, bucket_tokens=400_000)
    with pytest.raises(ConfigError, match=r"train has \d+ tokens, less than one row of 100000"):
        build(settings)
    with pytest.raises(ConfigError, match=r"set.partial: begun with row_tokens=100000 \(now 33\)"):
        build(replace(settings, row_tokens=33))
    os.utime(source / "c.parquet", ns=(0, 0))
    with pytest.raises(ConfigError, match="begun with files_modified_ns="):
        build(settings)


def test_finished_set_is_left_alone(
    built: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(bucket_tokens=3_000, shard_bytes=4_096, out=built)
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    build(settings)
    with pytest.raises(ConfigError, match=r"built with seed=0 \(now 7\); choose another --out"):
        build(replace(settings, seed=7))
    assert before == {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").touch()
    with pytest.raises(ConfigError, match="other: exists and is not a data set"):
        build(replace(settings, out=tmp_path / "other"))


def test_one_builder_at_a_time(make_settings: MakeSettings) -> None:
    settings = make_settings()
    partial = settings.out.with_name("set.partial")
    partial.mkdir()
    with open(partial / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another build is at work"):
            build(settings)


def test_bad_and_empty_documents(
    make_settings: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_documents(tmp_path / "a.jsonl", make_documents(50))
    with open(source, "a") as stream:
        stream.write('{"text": null}\n{"text": ""}\n{"text": " \\n"}\n')
    settings = make_settings(inputs=(str(source),), validation_fraction=0.3)
    with pytest.raises(DataError, match=r"a\.jsonl, document at \d+: the text is NoneType.*skip"):
        build(settings)
    shutil.rmtree(tmp_path / "set.partial")
    manifest = build(replace(settings, on_bad_document="skip"))
    assert sum(info.documents for info in manifest.splits.values()) == 50
    assert manifest.source["bad_documents"] == 1
    assert manifest.source["empty_documents"] == 2
    output = capsys.readouterr().out
    assert "1 bad documents were left out" in output
    assert "a.jsonl, document at" in output


UNENCODABLE = {
    "blanks": "word " + " " * 1_000_000 + "word",
    "tabs": "word " + "\t" * 1_000_000 + "word",
}


@pytest.mark.parametrize("text", UNENCODABLE.values(), ids=UNENCODABLE.keys())
def test_documents_that_a_library_cannot_take(
    make_settings: MakeSettings, tmp_path: Path, text: str
) -> None:
    source = write_documents(tmp_path / "a.jsonl", [*make_documents(20), text, *make_documents(20)])
    settings = make_settings(inputs=(str(source),), validation_fraction=0.0, unit_bytes=1 << 24)
    expected = r"a\.jsonl, document at \d+: cannot be encoded \(ValueError: .*--on-bad-document skip"
    with pytest.raises(DataError, match=expected):
        build(settings)
    shutil.rmtree(tmp_path / "set.partial")
    manifest = build(replace(settings, on_bad_document="skip"))
    assert manifest.splits["train"].documents == 40
    assert manifest.source["bad_documents"] == 1


def test_a_library_that_panics_on_a_document(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panics of Rust are BaseExceptions; an interrupt is one too, and ends the build."""

    class Panic(BaseException):
        pass

    settings = make_settings(
        inputs=(str(write_documents(tmp_path / "a.jsonl", make_documents(30))),),
        validation_fraction=0.0, on_bad_document="skip",
    )  # fmt: skip
    raised: list[BaseException] = [Panic("index out of bounds")]

    def fails(*_: object, **__: object) -> None:
        raise raised[0]

    monkeypatch.setattr("tiktoken.Encoding.encode_to_numpy", fails)
    with pytest.raises(ConfigError, match="train has 0 tokens"):
        build(settings)
    record = json.loads((tmp_path / "set.partial/records/encode_000000.json").read_text())
    assert record["bad_documents"] > 1
    assert "cannot be encoded (Panic: index out of bounds)" in record["bad_examples"][0]
    shutil.rmtree(tmp_path / "set.partial")
    raised[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        build(settings)


@pytest.mark.parametrize("name", ["plan.json", "records/encode_000000.json"])
def test_damaged_notes_of_a_build_are_named(make_settings: MakeSettings, name: str) -> None:
    settings = make_settings(row_tokens=100_000, bucket_tokens=400_000)
    with pytest.raises(ConfigError, match="less than one row"):
        build(settings)
    path = settings.out.with_name("set.partial") / name
    path.write_bytes(path.read_bytes()[:-3] + b"\xff")
    with pytest.raises((ConfigError, DataError), match=rf"{name}: not valid JSON .*; remove"):
        build(settings)


def test_the_tokenizer_of_a_set_feeds_generation(make_settings: MakeSettings) -> None:
    from transformers import AutoTokenizer

    settings = make_settings()
    build(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.out / "tokenizer")
    batch = tokenizer(["the loop", "reads its own state"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert tokenizer.model_max_length == 32
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id, "padding is on the left"
    assert batch["input_ids"][1][0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_tokens": 1}, "--row-tokens is 1, expected an integer >= 2"),
        ({"validation_fraction": 1.0}, "--validation-fraction is 1.0"),
        ({"seed": -1}, "--seed is -1"),
        ({"compression": "zip"}, "--compression is 'zip', expected zstd"),
        ({"shard_bytes": 100}, "--shard-bytes is 100, expected at least 528"),
        ({"bucket_tokens": 100}, "--bucket-tokens is 100, expected at least 132"),
    ],
)
def test_arguments_are_checked(
    make_settings: MakeSettings, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_settings(**change)


@pytest.mark.parametrize("start", [["data_prep/build_shards.py"], ["-m", "data_prep.build_shards"]])
def test_command_line(start: list[str], tmp_path: Path) -> None:
    arguments = ["nowhere", "--tokenizer", "x", "--row-tokens", "9", "--out", str(tmp_path / "set")]
    result = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "build_shards.py: error: nowhere: no such file or folder" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "script", ["build_shards", "train_tokenizer", "verify_shards", "fetch_fineweb_edu"]
)
def test_help(script: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "data_prep" / f"{script}.py"), "--help"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "usage:" in result.stdout


def test_manifest_json_is_the_contract(built: Path) -> None:
    saved = json.loads((built / "manifest.json").read_text())
    assert list(saved) == [
        "format_version",
        "dtype",
        "row_tokens",
        "tokenizer",
        "splits",
        "source",
        "seed",
    ]
    assert saved["tokenizer"]["path"] == "tokenizer"
    assert saved["dtype"] == "uint16"
    assert set(saved["splits"]["validation"]) == {
        "documents", "tokens", "rows", "dropped_tokens", "cropped_tokens", "padded_tokens", "max_id", "shards"
    }  # fmt: skip
