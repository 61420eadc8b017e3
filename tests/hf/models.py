"""Tiny models in both forms."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from pretrain.hf.configuration_looped import LoopedConfig
from pretrain.hf.modeling_looped import LoopedForCausalLM
from pretrain.model.looped import LoopedLM
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
