"""The saved tokenizer is what AutoTokenizer reads back, with exactly the vocabulary asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.encoding import Encoder
from data_prep.sources import TextFormat, find_files
from data_prep.train_tokenizer import RANGE_BYTES, sample_documents, train_tokenizer
from pretrain.errors import ConfigError
from tests.data_prep.conftest import make_documents, write_documents


def test_auto_tokenizer_reads_it_back_exactly(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = write_documents(tmp_path / "a.jsonl", make_documents(300))
    out = tmp_path / "tokenizer"
    train_tokenizer([str(source)], out, vocab_size=350)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == tokenizer.vocab_size == 350
    assert set(tokenizer(["a", "a loop"], padding=True)) == {"input_ids", "attention_mask"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    encoder = Encoder(out)
    for text in [*make_documents(30, seed=5)[1:], "  two  blanks , and\r\nlines\n\n"]:
        text = text.replace("<|bos|>", "")
        ids = tokenizer(text)["input_ids"]
        assert ids == [0, *encoder.encode(text).tolist()]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    with pytest.raises(ConfigError, match="exists"):
        train_tokenizer([str(source)], out, vocab_size=350)


def test_the_text_must_suffice_for_the_vocabulary(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "a.jsonl", ["too little text"])
    with pytest.raises(
        ConfigError, match=r"--vocab-size is 5000, the text gives only 2\d\d tokens"
    ):
        train_tokenizer([str(source)], tmp_path / "out", vocab_size=5_000)
    with pytest.raises(ConfigError, match="--vocab-size is 258, expected at least 259"):
        train_tokenizer([str(source)], tmp_path / "out", vocab_size=258)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("run", [" ", "a", "!", "東"])
def test_long_runs_do_not_stop_the_training(tmp_path: Path, run: str) -> None:
    texts = [*make_documents(300), f"word {run * 1_000_000} word"]
    train_tokenizer(
        [str(write_documents(tmp_path / "a.jsonl", texts))], tmp_path / "tokenizer", vocab_size=350
    )


def test_a_sample_is_spread_over_the_files_and_repeatable(tmp_path: Path) -> None:
    for i in range(8):
        write_documents(tmp_path / f"{i}.jsonl", [f"{i} " + "x " * (RANGE_BYTES // 16)] * 12)
    files = find_files([str(tmp_path)])
    sample = list(sample_documents(files, 2 * RANGE_BYTES, 0, TextFormat()))
    assert 2 * RANGE_BYTES <= sum(map(len, sample)) < 2.2 * RANGE_BYTES
    assert len({text[0] for text in sample}) >= 2
    assert sample == list(sample_documents(files, 2 * RANGE_BYTES, 0, TextFormat()))
    assert sample != list(sample_documents(files, 2 * RANGE_BYTES, 1, TextFormat()))
