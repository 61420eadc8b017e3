"""Data sets against the model, before torch is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.schema import CheckpointConfig, Config, DataConfig, RunConfig, SourceConfig, ValidationConfig
from pretrain.data.manifest import COLUMN, HASH, Manifest, SplitInfo, TokenizerInfo, tokenizer_sha256
from pretrain.errors import ConfigError
from pretrain.preflight import RUN_FILES, preflight


def write_data_set(
    folder: Path, *, row_tokens: int = 2_049, vocab_size: int = 32_768, max_id: int = 32_767, rows: int = 600,
    splits: tuple[str, ...] = ("train", "validation"), tokenizer: str = "{}",
) -> Path:  # fmt: skip
    """A data set whose manifest, tokenizer and indexes are sound; it has no shards, for nothing here reads them."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer/tokenizer.json").write_text(tokenizer)
    split = SplitInfo(
        documents=1, tokens=rows * row_tokens, rows=rows, dropped_tokens=0, padded_tokens=0, max_id=max_id, shards=1
    )
    sha256 = tokenizer_sha256(folder / "tokenizer")
    info = TokenizerInfo(path="tokenizer", sha256=sha256, vocab_size=vocab_size, bos_id=0, eos_id=1, pad_id=2)
    dtype = "uint16" if vocab_size <= 65_536 else "uint32"
    manifest = Manifest(
        dtype=dtype, row_tokens=row_tokens, tokenizer=info, splits=dict.fromkeys(splits, split), source={}, seed=0
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    size = 1 + rows * (4 + manifest.row_bytes)
    raw = {"basename": "shard.00000.mds", "bytes": size, "hashes": {HASH: "0"}}
    entry: dict[str, Any] = {
        "column_names": [COLUMN], "column_encodings": [manifest.encoding], "samples": rows, "compression": None,
        "format": "mds", "raw_data": raw, "zip_data": None,
    }  # fmt: skip
    for name in splits:
        (folder / name).mkdir()
        (folder / name / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return folder


def config(tmp_path: Path, *paths: Path) -> Config:
    sources = [SourceConfig(path=str(path)) for path in paths]
    return Config(data=DataConfig(sources=sources), run=RunConfig(dir=str(tmp_path / "runs")))


def refusal(cfg: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(cfg)
    return str(caught.value)


def test_a_data_set_that_fits(tmp_path: Path) -> None:
    preflight(config(tmp_path, write_data_set(tmp_path / "a"), write_data_set(tmp_path / "b")))


def test_a_missing_folder(tmp_path: Path) -> None:
    assert f"{tmp_path / 'a'}: no such folder" in refusal(config(tmp_path, tmp_path / "a"))


def test_a_tokenizer_other_than_the_shards(tmp_path: Path) -> None:
    folder = write_data_set(tmp_path / "a")
    (folder / "tokenizer/tokenizer.json").write_text("{ }")
    message = refusal(config(tmp_path, folder))
    assert str(folder / "tokenizer") in message and "another tokenizer" in message


def test_rows_of_another_length(tmp_path: Path) -> None:
    message = refusal(config(tmp_path, write_data_set(tmp_path / "a", row_tokens=1_025)))
    assert "model.context_length=2048: expected 1024" in message and "1025" in message


@pytest.mark.parametrize(
    ("vocab_size", "max_id", "needed"), [(32_769, 100, 32_769), (40_000, 39_999, 40_000), (70_000, 69_999, 70_000)]
)
def test_a_vocabulary_smaller_than_the_ids(tmp_path: Path, vocab_size: int, max_id: int, needed: int) -> None:
    folder = write_data_set(tmp_path / "a", vocab_size=vocab_size, max_id=max_id)
    message = refusal(config(tmp_path, folder))
    assert f"model.vocab_size=32768: expected at least {needed}" in message and f"ids up to {max_id}" in message


def test_sources_of_different_tokenizers(tmp_path: Path) -> None:
    one, two = write_data_set(tmp_path / "a"), write_data_set(tmp_path / "b", tokenizer="{ }")
    message = refusal(config(tmp_path, one, two))
    assert "made by one tokenizer" in message and str(one) in message and str(two) in message


def test_too_few_rows(tmp_path: Path) -> None:
    message = refusal(config(tmp_path, write_data_set(tmp_path / "a", rows=255)))
    assert "train.global_batch_size=256: expected at most the 255 training rows" in message
    message = refusal(config(tmp_path, write_data_set(tmp_path / "b", rows=300)))
    assert "validation.rows=512: expected at most the 300 validation rows" in message
    message = refusal(config(tmp_path, write_data_set(tmp_path / "c", splits=("train",))))
    assert "at most the 0 validation rows" in message
    preflight(
        replace(config(tmp_path, write_data_set(tmp_path / "d", rows=300)), validation=ValidationConfig(rows=300))
    )


def test_a_remote_source_is_checked_once_it_is_here(tmp_path: Path) -> None:
    cfg = config(tmp_path, tmp_path / "cache")
    cfg.data.sources[0].remote = "s3://bucket/set"
    preflight(cfg)
    write_data_set(tmp_path / "cache", row_tokens=9)
    assert "model.context_length=2048" in refusal(cfg)


@pytest.mark.parametrize("name", [*RUN_FILES, "wandb"])
def test_what_the_run_will_write_has_the_name_of_something_else(tmp_path: Path, name: str) -> None:
    cfg = config(tmp_path, write_data_set(tmp_path / "a"))
    path = tmp_path / "runs/run" / name
    path.parent.mkdir(parents=True)
    if name in RUN_FILES:
        path.mkdir()
    else:
        path.touch()
    message = refusal(cfg)
    assert "run.name='run'" in message and str(path) in message
    path.rmdir() if name in RUN_FILES else path.unlink()
    path.symlink_to(tmp_path / "nowhere")  # dangling
    assert "run.name='run'" in refusal(cfg)


def test_the_run_s_folder_is_a_file(tmp_path: Path) -> None:
    cfg = config(tmp_path, write_data_set(tmp_path / "a"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run").touch()
    assert "run.name='run'" in refusal(cfg)


def test_shares_of_an_epoch_and_of_the_validation(tmp_path: Path) -> None:
    cfg = config(tmp_path, write_data_set(tmp_path / "a"), write_data_set(tmp_path / "b"))
    cfg.data.sources[1].weight = 1e-6
    assert "data.sources[1].weight=1e-06: expected a weight that gives" in refusal(cfg)
    cfg.data.sources[1].weight = 0.01
    cfg.validation.rows = 1_000
    assert "validation.rows=1000: expected fewer, since 990 of them fall to" in refusal(cfg)
    cfg.validation.rows, cfg.data.canonical_nodes = 10, 1_201
    assert "data.canonical_nodes=1201: expected at most the 1200 rows" in refusal(cfg)


def test_folders_of_weights_and_of_the_run(tmp_path: Path) -> None:
    cfg = config(tmp_path, write_data_set(tmp_path / "a"))
    assert "initial_weights" in refusal(replace(cfg, checkpoint=CheckpointConfig(initial_weights=str(tmp_path / "x"))))
    (tmp_path / "file").touch()
    assert "run.dir=" in refusal(replace(cfg, run=RunConfig(dir=str(tmp_path / "file" / "runs"))))
