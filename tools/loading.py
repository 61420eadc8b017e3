"""A trained model with its tokenizer: of a run, of one checkpoint or of a folder in Hugging Face form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.schema import Config
from pretrain.data.manifest import read_manifest, tokenizer_sha256
from pretrain.data.sources import tokenizer_folder
from pretrain.data.tokenizer_files import load_tokenizer
from pretrain.errors import CheckpointError, ConfigError
from pretrain.model.imports import parameter_shapes
from pretrain.model.looped import LoopedLM
from pretrain.train.checkpoint.find import open_checkpoint
from pretrain.train.checkpoint.reader import CheckpointReader
from tools.hf_folder import is_hf_folder, read_config, read_folder


class Saved(NamedTuple):
    """A model as its folder holds it."""

    config: Config
    """Of the run that saved it; of an exported model the model section and the precision alone."""
    tensors: dict[str, Tensor]
    """Parameters of LoopedLM, whole, on the CPU."""
    tokenizer: PreTrainedTokenizerFast
    tokenizer_sha256: str
    step: int | None
    """None: an exported model's folder does not tell."""


class Trained(NamedTuple):
    """What `load_model` returns."""

    model: LoopedLM
    tokenizer: PreTrainedTokenizerFast
    config: Config
    step: int | None
    tokenizer_sha256: str
    """This, `config` and `step` as of Saved."""


def read_saved(path: Path, tokenizer: Path | None = None) -> Saved:
    """What is in the folder of a run (newest complete checkpoint), of one checkpoint or of an exported model.

    No code of an exported model's folder is run. `tokenizer` is a folder to take in place of the exported model's own
    or the one of the run's first data set. Errors: ConfigError for a path of another kind and where there is no
    tokenizer, or none that marks the beginning of a text; CheckpointError for weights that are missing, damaged or of
    another architecture.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: expected the folder of a run, of a checkpoint or of an exported model")
    if is_hf_folder(path):
        cfg, tensors = read_folder(path)
        config, step, folder = Config(model=cfg), None, tokenizer or path
        config.train.precision = "bf16" if read_config(path).get("dtype") == "bfloat16" else "fp32"
    else:
        with open_checkpoint(path) as reader:
            config, step = load_config(reader.config_path), reader.step
            tensors = read_parameters(config, reader)
        folder = tokenizer or tokenizer_folder(config)
    found = load_tokenizer(folder)
    if found.bos_token_id is None:
        raise ConfigError(
            f"{folder}: bos_token=None: expected a tokenizer with a token that begins every text (--tokenizer)"
        )
    if len(found) > config.model.vocab_size:
        raise ConfigError(
            f"{folder}: a tokenizer of {len(found)} ids; expected at most {config.model.vocab_size}, as the model in "
            f"{path} has (--tokenizer)"
        )
    return Saved(config, tensors, found, tokenizer_sha256(folder), step)


def load_model(path: str | Path, *, device: torch.device | str = "cpu", tokenizer: str | Path | None = None) -> Trained:
    """The model in a folder that `read_saved` reads, in evaluation mode on `device`.

    Products run in the precision of the training, or in that of the exported weights. Errors: as `read_saved`.
    """
    saved = read_saved(Path(path), None if tokenizer is None else Path(tokenizer))
    with torch.device("meta"):
        model = LoopedLM(saved.config.model)
    model.load_state_dict(saved.tensors, strict=True, assign=True)
    model.compute_dtype = torch.bfloat16 if saved.config.train.precision == "bf16" else torch.float32
    return Trained(model.to(device).eval(), saved.tokenizer, saved.config, saved.step, saved.tokenizer_sha256)


def check_loops(cfg: ModelConfig, num_loops: Sequence[int]) -> None:
    """ConfigError for loop counts that the model does not have."""
    if cfg.family == "gpt" and set(num_loops) != {1}:
        raise ConfigError(f"--num-loops {','.join(map(str, num_loops))}: expected 1, since a gpt has no loops")


def data_folder(saved: Saved | Trained, given: Path | None) -> Path:
    """`given`, else the first data set of the run.

    Errors: ConfigError where neither is known, for a folder that is no data set, and for one of another tokenizer.
    """
    sources = saved.config.data.all_sources
    if given is None and not sources:
        raise ConfigError("--data: expected the folder of a data set, since the model's own configuration names none")
    folder = given or Path(sources[0].path)
    found = read_manifest(folder, shards_are_local=False).tokenizer.sha256
    if found != saved.tokenizer_sha256:
        raise ConfigError(
            f"{folder}: its tokenizer.json has sha256 {found}, the model's {saved.tokenizer_sha256}: expected data "
            "made with the model's tokenizer (--data)"
        )
    return folder


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
