"""A private SLURM for the session, and a run that takes a second on it."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.sets import CONTEXT, VOCAB, numbered_rows, write_set
from tests.slurm.cluster import PrivateSlurm, why_not

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
  recurrence: {{mean_loops: 2}}
data: {{path: DATA, num_workers: 1}}
optimizer: {{lr: 1e-3}}
train: {{max_steps: 300, global_batch_size: 16, micro_batch_size: 4, precision: fp32, activation_checkpointing: none}}
validation: {{every_steps: 50, rows: 8}}
checkpoint: {{every_steps: 40}}
logging: {{wandb: disabled}}
"""


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """Two idle nodes, n0 and n1."""
    if reason := why_not():
        pytest.skip(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit must not leave daemons behind
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = PrivateSlurm(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration's file; its data set is beside it."""
    folder = tmp_path_factory.mktemp("slurm")
    data = write_set(folder / "data", numbered_rows(400), numbered_rows(13, 500))
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.replace("DATA", str(data)))
    return path
