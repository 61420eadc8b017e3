"""A trained model with its tokenizer, from a run's folder or one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.data.manifest import tokenizer_sha256
from pretrain.data.sources import tokenizer_folder
from pretrain.errors import CheckpointError
from pretrain.model.imports import parameter_shapes
from pretrain.model.looped import LoopedLM
from pretrain.train.checkpoint.find import open_checkpoint
from pretrain.train.checkpoint.reader import CheckpointReader


class Trained(NamedTuple):
    """What `load_model` returns."""

    model: LoopedLM
    tokenizer: PreTrainedTokenizerFast
    config: Config
    """Of the run that saved the checkpoint."""
    step: int


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", tokenizer: str | Path | None = None
) -> Trained:
    """The model of a run (newest complete checkpoint) or of one checkpoint's folder, in evaluation mode on `device`.

    Weights are whole, whatever layout saved them, and products run in the precision of the training. `tokenizer` is a
    folder to take in place of the one in the run's first data set. Errors: CheckpointError for a checkpoint that is
    missing, damaged or of another architecture; ConfigError where the tokenizer is not where the run read it.
    """
    with open_checkpoint(Path(path)) as reader:
        config, step = load_config(reader.config_path), reader.step
        tensors = read_parameters(config, reader)
    with torch.device("meta"):
        model = LoopedLM(config.model)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.compute_dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    folder = tokenizer_folder(config) if tokenizer is None else Path(tokenizer)
    tokenizer_sha256(folder)
    return Trained(model.to(device).eval(), PreTrainedTokenizerFast.from_pretrained(folder), config, step)


def read_parameters(config: Config, reader: CheckpointReader) -> dict[str, Tensor]:
    """The checkpoint's weights, whole, on the CPU."""
    saved = {name: torch.Size(reader.shape(name)) for name in reader.names()}
    expected = parameter_shapes(config.model)
    if saved != expected:
        differing = sorted(name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name))
        raise CheckpointError(
            f"{reader.folder}: its tensors are not those that its config.yaml means now (first: {differing[0]}); the "
            "version that wrote it can read it"
        )
    return {name: reader.read(name) for name in saved}
