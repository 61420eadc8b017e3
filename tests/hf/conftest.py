"""A data set of English words with a tokenizer of its own, and a run's configuration on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from data_prep.build_shards import build
from data_prep.packing import BuildSettings
from data_prep.sources import TextFormat
from data_prep.train_tokenizer import train_tokenizer
from tests.hf.models import CONTEXT, VOCAB_OF_TEXT

torch.set_num_threads(1)  # the models are tiny, and the machine may be shared

WORDS = ["the", "loop", "reads", "its", "state", "twice", "and", "halts"]
CONFIG = f"""
model:
  vocab_size: {VOCAB_OF_TEXT}
  context_length: {CONTEXT}
  width: 32
  num_heads: 2
  ffn_width: 48
  value_gate_channels: 8
  prelude_layers: 1
  core_layers: 2
  coda_layers: 1
data: {{path: DATA, num_workers: 0}}
optimizer: {{name: adamw, lr: 3e-3, eps: 1e-8}}
train: {{max_steps: 50, global_batch_size: 8, micro_batch_size: 8, precision: fp32, activation_checkpointing: none}}
validation: {{every_steps: null, rows: 8}}
checkpoint: {{every_steps: null}}
"""


@pytest.fixture(scope="session")
def text_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration's file. Not to be changed."""
    folder = tmp_path_factory.mktemp("words")
    rng = random.Random(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(rng.choices(WORDS, k=40)) + "." for _ in range(200)))
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", vocab_size=VOCAB_OF_TEXT)
    settings = BuildSettings(
        inputs=(str(folder / "text.txt"),), tokenizer=folder / "tokenizer", out=folder / "data",
        row_tokens=CONTEXT + 1, validation_fraction=0.2, text_format=TextFormat(separator="\n\n"),
    )  # fmt: skip
    build(settings)
    path = folder / "words.yaml"
    path.write_text(CONFIG.replace("DATA", str(folder / "data")))
    return path
