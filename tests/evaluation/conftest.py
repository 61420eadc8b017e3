"""A byte-level tokenizer, and a random model that speaks it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.train_tokenizer import train_tokenizer
from pretrain.evaluation.requests import Encoder
from pretrain.model.looped import LoopedLM
from tests.model.tiny import random_model, tiny_config

TEXT = "The river runs to the sea. She was born in the north, and he in the south of the old land. " * 20


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(TEXT)
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", vocab_size=300)
    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


@pytest.fixture(scope="session")
def encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    return Encoder(tokenizer, 48)


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> LoopedLM:
    return random_model(tiny_config("parcae_flt", vocab_size=len(tokenizer), context_length=48))
