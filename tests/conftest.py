"""A small data set and the configuration of a small run on it, for the tests that train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.sets import BOS, write_set

VOCAB, CONTEXT = 256, 32
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
data: {{path: DATA, num_workers: 0, shuffle_block_rows: 64}}
optimizer: {{name: adamw, lr: 1e-3, eps: 1e-8}}
train: {{max_steps: 8, global_batch_size: 8, micro_batch_size: 2, precision: fp32, activation_checkpointing: none}}
validation: {{every_steps: 2, rows: 5}}
checkpoint: {{every_steps: null}}
logging: {{every_steps: 1}}
"""


def write_small(folder: Path) -> Path:
    """The file of a small run and its data set, in `folder`."""
    generator = np.random.default_rng(0)
    rows = generator.zipf(1.3, size=(130, CONTEXT + 1)) % (VOCAB - 1) + 1
    rows[generator.random(rows.shape) < 0.08] = BOS
    data = write_set(folder / "data", rows[:100], rows[100:], vocab_size=VOCAB)
    path = folder / "small.yaml"
    path.write_text(CONFIG.replace("DATA", str(data)))
    return path


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file: Parcae of width 32 on 100 rows of documents with 4 to 40 tokens. Not to be changed."""
    return write_small(tmp_path_factory.mktemp("small"))
