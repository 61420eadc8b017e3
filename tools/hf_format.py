"""Configuration and tensors of a model in Hugging Face form (pretrain/hf), and back.

Names of parameters are the same in both. The form has no padding of the vocabulary, no second copy of a tied embedding
and none of the heads that only auxiliary losses use. Its configuration is flat and resolved, so that it can be read
without ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pretrain.config.check import check_tree
from pretrain.config.model import AuxiliaryConfig, ModelConfig, RecurrenceConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.model.imports import parameter_shapes
from pretrain.model.state import state_std

MODEL_TYPE = "looped"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_MODEL = (
    "family", "vocab_size", "context_length", "width", "num_heads", "ffn_width", "prelude_layers", "core_layers",
    "coda_layers", "block", "norm_eps", "norm_weight", "mlp", "relu2_scale", "dropout", "positions", "rope_base",
    "rope_layout", "rope_direction", "rope_table", "qk_norm", "qk_bias", "value_embeddings", "value_gate_channels",
    "sliding_window", "window_pattern", "scale_embeddings", "logit_softcap", "norm_before_coda",
)  # fmt: skip
_LOOP = (
    "injection", "discretization", "feedback", "prelude_norm", "interloop_norm", "output_projection", "state_init",
    "state_seed", "readout",
)  # fmt: skip
# What only further training needs.
_TRAINING_MODEL = ("vocab_multiple", "init", "embedding_std")
_TRAINING_LOOP = (
    "mean_loops", "backprop_loops", "distribution", "sampled_loops", "lognormal_sigma", "granularity", "max_loops",
    "curriculum", "curriculum_steps",
)  # fmt: skip
# Fields that older exports do not have, with the value that their models had.
_ADDED_FIELDS = {"sampled_loops": "all"}
_QK_NORM_EPS = 2.0**-23


def exported_config(cfg: ModelConfig) -> ModelConfig:
    """The model section without the heads that only auxiliary losses use."""
    return replace(cfg, auxiliary=AuxiliaryConfig())


def exported_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters without those heads."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("auxiliary.")}


def hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """The fields of LoopedConfig for a model section."""
    recurrence = cfg.recurrence
    return {
        **{name: getattr(cfg, name) for name in _MODEL},
        "num_kv_heads": cfg.kv_heads,
        "head_dim": cfg.head_channels,
        "core_width": cfg.width_of("core"),
        "core_num_heads": cfg.heads_of("core"),
        "core_num_kv_heads": cfg.kv_heads_of("core"),
        "core_ffn_width": cfg.ffn_width_of("core"),
        "qk_norm_eps": cfg.qk_norm_eps or _QK_NORM_EPS,
        "tie_word_embeddings": cfg.tie_embeddings,
        "state_std": state_std(cfg),
        **{name: getattr(recurrence, name) for name in _LOOP},
        "num_loops": recurrence.default_loops,
        "training": {
            **{name: getattr(cfg, name) for name in _TRAINING_MODEL},
            **{name: getattr(recurrence, name) for name in _TRAINING_LOOP},
        },
    }


def model_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """The model section for a config.json of this form, which `where` names in errors.

    Errors: ConfigError for another model's file, and for a field that is absent or does not fit.
    """
    if data.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"{where}: model_type={data.get('model_type')!r}: expected {MODEL_TYPE!r}, as tools/convert_to_hf.py and "
            "tools/import_checkpoint.py write it"
        )
    training = data.get("training")
    if not isinstance(training, Mapping):
        raise ConfigError(f"{where}: training={training!r}: expected an object; export the model again")
    training = _ADDED_FIELDS | dict(training)
    try:
        model = {name: data[name] for name in _MODEL} | {name: training[name] for name in _TRAINING_MODEL}
        loop = {name: data[name] for name in _LOOP} | {name: training[name] for name in _TRAINING_LOOP}
        derived = {name: data[name] for name in ("num_kv_heads", "head_dim", "qk_norm_eps")}
        core = {name: data[name] for name in ("core_width", "core_num_heads", "core_ffn_width")}
        tied = data.get("tie_word_embeddings", True)  # transformers 4 leaves out what is its own default
    except KeyError as error:
        raise ConfigError(f"{where}: field {error} is absent; export the model again") from error
    if derived["qk_norm_eps"] == _QK_NORM_EPS:
        derived["qk_norm_eps"] = None
    if core == {f"core_{name}": model[name] for name in ("width", "num_heads", "ffn_width")}:
        core = {}
    section = {**model, **derived, **core, "tie_embeddings": tied, "recurrence": loop}
    try:
        checked = check_tree({"model": section})["model"]
        cfg = ModelConfig(**checked | {"recurrence": RecurrenceConfig(**checked["recurrence"])})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for name in ("core_num_kv_heads", "state_std"):
        if data.get(name) != hf_config(cfg)[name]:
            raise ConfigError(
                f"{where}: {name}={data.get(name)!r}: expected {hf_config(cfg)[name]!r}, as the other fields have it"
            )
    return cfg


def _has_vocabulary(name: str) -> bool:
    return name in ("embedding.weight", "head.weight") or name.endswith("value_table.weight")


def hf_tensors(cfg: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is exported of the parameters, without the vocabulary's padding, in `dtype`; A_log and dt_bias stay fp32."""
    result = {}
    for name, whole in sorted(exported_tensors(tensors).items()):
        tensor = whole[: cfg.vocab_size] if _has_vocabulary(name) else whole
        exact = name.endswith(("A_log", "dt_bias"))
        result[name] = tensor.to(torch.float32 if exact else dtype, copy=True).contiguous()
    return result


def model_tensors(cfg: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The way back: fp32 parameters of `LoopedLM(cfg)`; rows of the padding, which nothing reads, are zero.

    Errors: CheckpointError that lists the tensors that are missing, unknown or of another shape.
    """
    shapes = parameter_shapes(cfg)
    wanted = {
        name: torch.Size((cfg.vocab_size, *shape[1:])) if _has_vocabulary(name) else shape
        for name, shape in shapes.items()
    }
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != wanted:
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))

        def show(group: Mapping[str, torch.Size], name: str) -> str:
            return str(list(group[name])) if name in group else "absent"

        lines = [f"  {name}: {show(found, name)}, expected {show(wanted, name)}" for name in differing]
        raise CheckpointError(f"{where}: tensors that are not those of its config.json:\n" + "\n".join(lines))
    result = {}
    for name, shape in shapes.items():
        result[name] = torch.zeros(shape)
        result[name][: wanted[name][0]] = tensors[name]
    return result
