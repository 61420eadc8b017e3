"""The published families as settings of the one model: what each fills in where the configuration is silent.

Sources: Parcae arXiv 2604.12946; Fully Looped Transformer (flt, lt*) 2605.18797; Readout Blind Spot 2606.24898;
Huginn / recurrent depth (rdm) 2502.05171. `parcae_flt` is this project's own combination.
"""

from __future__ import annotations

from typing import Any

from pretrain.config.model import Family, ModelConfig, RecurrenceConfig

_PARCAE: dict[str, Any] = {
    "recurrence": {"injection": "diagonal", "prelude_norm": True, "state_init": "like_init", "output_projection": True}
}

# FLT's code: weightless norms, relu(x)^2, half-split RoPE rotating backwards, untied head, softcap.
_FLT_LAYERS: dict[str, Any] = {
    "prelude_layers": 0,
    "coda_layers": 0,
    "norm_weight": False,
    "norm_eps": 2.0**-23,
    "relu2_scale": 1.0,
    "rope_base": 10_000.0,
    "rope_layout": "half",
    "rope_direction": "backward",
    "value_embeddings": False,
    "tie_embeddings": False,
    "logit_softcap": 15.0,
}


def _flt(**recurrence: Any) -> dict[str, Any]:
    base = {"prelude_norm": True, "interloop_norm": True, "state_init": "input", "output_projection": False}
    return _FLT_LAYERS | {"recurrence": base | recurrence}


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {
        "recurrence": {
            "injection": "none", "prelude_norm": False, "state_init": "input", "output_projection": False,
            "distribution": "fixed", "mean_loops": 1.0,
        }
    },
    "lt": _flt(injection="none"),
    # Adds the raw embedding and normalises the sum, so e itself stays un-normalised; h_0 = 0 makes loop 1 Norm(E).
    "lt_input": _flt(injection="input", prelude_norm=False, state_init="zero"),
    "lt_attention": _flt(injection="restart", feedback="attention_first"),
    "flt": _flt(injection="restart", feedback="attention"),
    "flt_res": _flt(injection="restart", feedback="residual"),
    "rdm": {
        "block": "sandwich", "mlp": "swiglu", "norm_eps": 1e-6, "qk_norm": False, "value_embeddings": False,
        "scale_embeddings": True, "norm_before_coda": True, "init": "scaled",
        "recurrence": {
            "injection": "concat", "prelude_norm": False, "state_init": "like_init", "output_projection": False,
        },
    },
    "add": {
        "recurrence": {
            "injection": "add", "prelude_norm": True, "state_init": "like_init", "output_projection": True,
        }
    },
    "parcae": _PARCAE,
    "parcae_flt": {"recurrence": _PARCAE["recurrence"] | {"feedback": "attention"}},
    "blindspot": {
        "prelude_layers": 0, "coda_layers": 0, "mlp": "swiglu", "norm_eps": 1e-6, "positions": "learned",
        "qk_norm": False, "value_embeddings": False, "init": "normal",
        "recurrence": {
            "injection": "none", "prelude_norm": False, "state_init": "input", "output_projection": False,
            "distribution": "fixed", "mean_loops": 4.0, "backprop_loops": 4,
        },
    },
}  # fmt: skip


def make_model_config(family: Family, recurrence: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    """The model section with `settings` (and those of `recurrence`) over the family's preset."""
    preset = FAMILIES[family] | settings
    loops = FAMILIES[family].get("recurrence", {}) | (recurrence or {})
    return ModelConfig(**preset | {"family": family, "recurrence": RecurrenceConfig(**loops)})
