"""A data set of few words, and checkpoints of models that were not trained."""

from __future__ import annotations

import random
from pathlib import Path

from data_prep.build_shards import build
from data_prep.packing import BuildSettings
from data_prep.sources import TextFormat
from data_prep.train_tokenizer import train_tokenizer
from pretrain.config.load import dump_config
from pretrain.config.model import ModelConfig
from pretrain.config.schema import CheckpointConfig, Config, DataConfig, LossConfig, RunConfig, TrainConfig
from pretrain.model.looped import LoopedLM
from pretrain.train.checkpoint.format import PARAMETER
from pretrain.train.checkpoint.placement import Placement
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.state import TrainState

VOCAB, CONTEXT = 270, 32


def write_words(folder: Path) -> Path:
    """A data set of rows of CONTEXT + 1 tokens with its tokenizer of VOCAB ids; returns its folder."""
    words, rng = ["the", "loop", "reads", "its", "state", "twice", "and", "halts"], random.Random(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=40)) + "." for _ in range(120)))
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", vocab_size=VOCAB)
    build(
        BuildSettings(
            inputs=(str(folder / "text.txt"),), tokenizer=folder / "tokenizer", out=folder / "data",
            row_tokens=CONTEXT + 1, validation_fraction=0.2, text_format=TextFormat(separator="\n\n"),
        )
    )  # fmt: skip
    return folder / "data"


def save_model(
    runs: Path, name: str, cfg: ModelConfig, model: LoopedLM, data: Path, loss: LossConfig, step: int = 7
) -> Path:
    """A run's folder with one checkpoint of the model; returns it."""
    config = Config(
        run=RunConfig(name=name, dir=str(runs)), model=cfg, data=DataConfig(path=str(data)), loss=loss,
        train=TrainConfig(max_steps=step, precision="fp32"),
    )  # fmt: skip
    writer = CheckpointWriter(runs / name, CheckpointConfig(), dump_config(config), Ranks(), timeout_sec=30)
    placement = Placement.of_model(model, tensor_rank=0, tensor_size=1, model_ranks=Ranks())
    tensors = ((parameter, PARAMETER, p.detach()) for parameter, p in model.named_parameters())
    writer.save(placement.slices(tensors), TrainState(step=step, tokens=step))
    writer.wait()
    return runs / name
