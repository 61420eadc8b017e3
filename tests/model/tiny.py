"""Tiny models with random weights in every tensor, one per way in which the loop can differ."""

from __future__ import annotations

from typing import Any

import torch

from pretrain.config.families import make_model_config
from pretrain.config.model import ModelConfig
from pretrain.model.looped import LoopedLM

_SIZES: dict[str, Any] = {
    "vocab_size": 29, "context_length": 16, "width": 16, "num_heads": 2, "ffn_width": 24, "value_gate_channels": 8,
}  # fmt: skip
_LAYERS = {"prelude_layers": 1, "core_layers": 2, "coda_layers": 1}
FAMILIES = (
    "gpt", "lt", "lt_input", "lt_attention", "flt", "flt_res", "rdm", "add", "parcae", "parcae_flt", "blindspot",
)  # fmt: skip


def tiny_config(family: str, recurrence: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    """A model of four layers (two without prelude and coda), width 16."""
    bare = family in ("blindspot", "flt", "flt_res") or family.startswith("lt")
    sizes = _SIZES | ({"core_layers": 2} if bare else _LAYERS)
    return make_model_config(family, recurrence, **sizes | settings)


def random_model(cfg: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoopedLM:
    """The model with every parameter random (the usual start has zero matrices, which hide mistakes)."""
    model = LoopedLM(cfg).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            vector = parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias"))
            parameter.copy_(1 + 0.2 * noise if vector else 0.35 * noise)
    model.compute_dtype = dtype
    return model.to(dtype)
