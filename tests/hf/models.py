"""Tiny models in both forms."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from pretrain.config.load import dump_config, load_config
from pretrain.hf.configuration_looped import LoopedConfig
from pretrain.hf.modeling_looped import LoopedForCausalLM
from pretrain.model.looped import LoopedLM
from pretrain.train.checkpoint.format import PARAMETER, TensorSlice
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.run_folder import write_run_folder
from pretrain.train.state import TrainState
from tests.model.tiny import random_model, tiny_config
from tools.hf_format import hf_config, hf_tensors

VOCAB = 29


def hf_model(native: LoopedLM, dtype: torch.dtype = torch.float32) -> LoopedForCausalLM:
    """The same model for transformers, in evaluation mode."""
    config = LoopedConfig(**hf_config(native.cfg), bos_token_id=0, pad_token_id=2)
    model = LoopedForCausalLM(config).eval()
    model.load_state_dict(hf_tensors(native.cfg, native.state_dict(), torch.float32))
    return model.to(dtype)


def pair(family: str, recurrence: dict[str, Any] | None = None, **settings: Any) -> tuple[LoopedLM, LoopedForCausalLM]:
    """(native, transformers') models of a family with the same random weights."""
    native = random_model(tiny_config(family, recurrence, **({"context_length": 96} | settings)))
    return native, hf_model(native)


@cache
def model(family: str, dtype: torch.dtype = torch.float32) -> LoopedForCausalLM:
    """A family's model, shared by tests that do not change it."""
    return pair(family)[1].to(dtype)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids above the padding's."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


VOCAB_OF_TEXT, CONTEXT = 270, 96
"""Of the data set that `text_config` makes."""
BARE = ("blindspot", "flt", "flt_res", "lt", "lt_input", "lt_attention")
"""Families without prelude and coda."""


def layers(family: str) -> tuple[str, ...]:
    """Overrides that give every family four layers, or two in its loop."""
    bare = ("model.prelude_layers=0", "model.coda_layers=0") if family in BARE else ()
    return (f"model.family={family}", *bare)


def save_run(config: Path, folder: Path, family: str, *overrides: str) -> Path:
    """A run's folder with one checkpoint, of random weights, at step 7; `config` as of `text_config`."""
    cfg = load_config(config, [*layers(family), f"run.dir={folder.parent}", f"run.name={folder.name}", *overrides])
    native = random_model(cfg.model)
    write_run_folder(folder, cfg)
    writer = CheckpointWriter(folder, cfg.checkpoint, dump_config(cfg), Ranks())
    slices = [
        TensorSlice(name, PARAMETER, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        for name, tensor in native.state_dict().items()
    ]
    writer.save(slices, TrainState(step=7, tokens=700))
    return folder
