"""The authors' published checkpoints as this model: their configurations and tensor names.

    parcae      sandyresearch/parcae (arXiv 2604.12946)
    huginn      seal-rg/recurrent-pretraining (2502.05171)
    flt         FuRuF-11/FullyLoopedTransformer and its baselines (2605.18797)
    blindspot   Rituraj003/readout-blind-spot (2606.24898)

A `Rule` says which parameters of ours one of their tensors holds. Where it holds several (fused q, k, v; gate and up;
the adapter's [h; e]) they follow one another along `dim`. The tables list what may occur; parameters that the
configured model does not have drop out, so that the configuration decides what must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pretrain.config.check import describe_type, without_null
from pretrain.config.families import make_model_config
from pretrain.config.model import Family, ModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.model.looped import LoopedLM

Source = Literal["parcae", "huginn", "flt", "blindspot"]


class Rule(NamedTuple):
    """Tensor `theirs` holds the parameters `ours`, one after another along `dim`."""

    theirs: str
    ours: tuple[str, ...]
    dim: int = 0


class Imported(NamedTuple):
    """A checkpoint in this model's terms."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    """Every parameter of `LoopedLM(config)`, in the checkpoint's type."""
    unused: list[str]
    """Tensors of the checkpoint that have no effect there and are left out: buffers, dead parameters."""
    zeroed: list[str]
    """Parameters of ours that the checkpoint's model does not have; as zeros they have no effect."""


def import_checkpoint(source: Source, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Imported:
    """The weights for `LoopedLM(result.config)` from the official `config` object and tensors.

    ConfigError names a field that is unknown, absent or beyond this model; CheckpointError names the tensors that are
    missing, unknown or of a wrong shape.
    """
    cfg = import_config(source, config, tensors)
    shapes = parameter_shapes(cfg)
    rules = list(_rules(source, cfg, shapes))
    unused = _unused(source, config, cfg, tensors)
    zeroed = _zeroed(source, config, cfg)
    needed = {rule.theirs for rule in rules if not zeroed.issuperset(rule.ours)}
    missing, unknown = needed - tensors.keys(), tensors.keys() - needed - unused
    if missing or unknown:
        raise CheckpointError(
            f"{source} checkpoint: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}: expected the "
            "official names that its config.json implies; check that both are of the same checkpoint"
        )
    result = {name: torch.zeros(shapes[name]) for name in sorted(zeroed)}
    for rule in rules:
        if rule.theirs in needed:
            result |= _split(rule, tensors[rule.theirs], shapes)
    return Imported(cfg, result, sorted(unused), sorted(zeroed))


def official_tensors(source: Source, cfg: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back: parameters, or their gradients, under the official names and fused as there."""
    shapes = parameter_shapes(cfg)
    result = {}
    for rule in _rules(source, cfg, shapes):
        pieces = [_piece_shape(rule, shapes, name) for name in rule.ours]
        parts = [ours[name].reshape(shape) for name, shape in zip(rule.ours, pieces, strict=True)]
        result[rule.theirs] = torch.cat(parts, rule.dim)
    return result


def parameter_shapes(cfg: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of the model's parameters, without memory for them."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in LoopedLM(cfg).named_parameters()}


def _piece_shape(rule: Rule, shapes: Mapping[str, torch.Size], name: str) -> torch.Size:
    """Shape of a parameter of ours within their tensor: the biases [heads, C] are [1, 1, heads, C] there."""
    return torch.Size((1, 1, *shapes[name])) if name.endswith(("query_bias", "key_bias")) else shapes[name]


def _split(rule: Rule, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    pieces = [_piece_shape(rule, shapes, name) for name in rule.ours]
    sizes = [shape[rule.dim] if shape else 1 for shape in pieces]
    expected = list(pieces[0])
    expected[rule.dim] = sum(sizes)
    if list(tensor.shape) != expected:
        raise CheckpointError(f"tensor {rule.theirs}: shape {list(tensor.shape)}, expected {expected} by config.json")
    parts = tensor.split(sizes, rule.dim)
    return {name: part.reshape(shapes[name]).clone() for name, part in zip(rule.ours, parts, strict=True)}


# --------------------------------------------------------------------------------------------------------- tensor names

_PARCAE_LAYER = {
    "norm_1.weight": "attention_norm.weight",
    "norm_2.weight": "mlp_norm.weight",
    "attn.c_q.weight": "attention.query.weight",
    "attn.c_k.weight": "attention.key.weight",
    "attn.c_v.weight": "attention.value.weight",
    "attn.c_proj.weight": "attention.output.weight",
    "attn.qk_bias": "attention.query_bias attention.key_bias",
    "attn.ve_gate.weight": "attention.value_gate.weight",
    "mlp.fc.weight": "mlp.gate.weight mlp.up.weight",
    "mlp.proj.weight": "mlp.down.weight",
}
_HUGINN_LAYER = {
    "norm_1.weight": "attention_norm.weight",
    "attn.Wqkv.weight": "attention.query.weight attention.key.weight attention.value.weight",
    "attn.qk_bias": "attention.query_bias attention.key_bias",
    "attn.proj.weight": "attention.output.weight",
    "mlp.fc.weight": "mlp.gate.weight mlp.up.weight",
    "mlp.proj.weight": "mlp.down.weight",
}
# The same name means another norm in the two blocks.
_HUGINN_NORMS = {
    "pre": {"norm_2.weight": "mlp_norm.weight"},
    "sandwich": {
        "norm_2.weight": "attention_post_norm.weight",
        "norm_3.weight": "mlp_norm.weight",
        "norm_4.weight": "mlp_post_norm.weight",
    },
}
_FLT_LAYER = {
    "attn.c_q.weight": "attention.query.weight",
    "attn.c_k.weight": "attention.key.weight",
    "attn.c_v.weight": "attention.value.weight",
    "attn.c_proj.weight": "attention.output.weight",
    "mlp.c_fc.weight": "mlp.up.weight",
    "mlp.c_proj.weight": "mlp.down.weight",
}
_BLINDSPOT_LAYER = {
    "attn_norm.weight": "attention_norm.weight",
    "attn.qkv.weight": "attention.query.weight attention.key.weight attention.value.weight",
    "attn.out_proj.weight": "attention.output.weight",
    "ffn_norm.weight": "mlp_norm.weight",
    "ffn.w1.weight": "mlp.gate.weight",
    "ffn.w3.weight": "mlp.up.weight",
    "ffn.w2.weight": "mlp.down.weight",
}
_BLOCKS = {"prelude": "transformer.prelude", "core": "transformer.core_block", "coda": "transformer.coda"}


class _Names(NamedTuple):
    layers: Mapping[str, str]
    """Prefix of the layers of each part."""
    layer: Callable[[ModelConfig], Mapping[str, str]]
    outside: Mapping[str, str]


_NAMES: dict[Source, _Names] = {
    "parcae": _Names(
        _BLOCKS,
        lambda cfg: _PARCAE_LAYER,
        {
            "transformer.wte.weight": "embedding.weight",
            "transformer.ln_prelude.weight": "prelude_norm.weight",
            "transformer.adapter.A_log": "injection.input.A_log",
            "transformer.adapter.dt_bias": "injection.input.dt_bias",
            "transformer.adapter.B": "injection.input.B.weight",
            "transformer.adapter.adapter.weight": "injection.state.weight injection.input.weight",
            "transformer.C.weight": "output_projection.weight",
            "transformer.ln_f.weight": "final_norm.weight",
            "lm_head.weight": "head.weight",
        },
    ),
    "huginn": _Names(
        _BLOCKS,
        lambda cfg: _HUGINN_LAYER | _HUGINN_NORMS[cfg.block],
        {
            "transformer.wte.weight": "embedding.weight",
            "transformer.adapter.weight": "injection.state.weight injection.input.weight",
            "transformer.ln_f.weight": "final_norm.weight",
            "lm_head.weight": "head.weight",
        },
    ),
    "flt": _Names(
        {"core": "transformer.h"},
        lambda cfg: _FLT_LAYER,
        {"transformer.wte.weight": "embedding.weight", "lm_head.weight": "head.weight"},
    ),
    "blindspot": _Names(
        {"core": "layers"},
        lambda cfg: _BLINDSPOT_LAYER,
        {
            "token_embedding.weight": "embedding.weight",
            "position_embedding.weight": "position_embedding.weight",
            "loop_norm.weight": "injection.interloop_norm.weight",
            "decode_norm.weight": "final_norm.weight",
        },
    ),
}


def _rules(source: Source, cfg: ModelConfig, shapes: Collection[str]) -> Iterator[Rule]:
    """The rules of a configured model, in the order of its layers."""
    names = _NAMES[source]
    table = dict(names.outside)
    for part, prefix in names.layers.items():
        for index in range(getattr(cfg, f"{part}_layers")):
            for theirs, ours in names.layer(cfg).items():
                table[f"{prefix}.{index}.{theirs}"] = " ".join(f"{part}.{index}.{name}" for name in ours.split())
            table[f"value_embeds.{cfg.layer_index(part, index)}.weight"] = (
                f"{part}.{index}.attention.value_table.weight"
            )
    for theirs, ours in table.items():
        own = tuple(name for name in ours.split() if name in shapes)
        if own:
            yield Rule(theirs, own, dim=1 if own[0] == "injection.state.weight" else 0)


def _value_layers(config: Mapping[str, Any], cfg: ModelConfig) -> dict[str, tuple[bool, bool]]:
    """(has a table, has a gate) of each Parcae layer, under the two rules of the reference; it uses those with both."""
    last_table = cfg.num_layers - 1
    last_gate = cfg.core_layers * int(config["mean_backprop_depth"]) - 1
    looped = cfg.prelude_layers + cfg.core_layers * int(config["mean_recurrence"])
    result = {}
    for part, start in (("prelude", 0), ("core", cfg.prelude_layers), ("coda", looped)):
        for index in range(getattr(cfg, f"{part}_layers")):
            table = (last_table - cfg.layer_index(part, index)) % 2 == 0
            gate = (last_gate - start - index) % 2 == 0
            result[f"{part}.{index}"] = (table, gate)
    return result


def _unused(source: Source, config: Mapping[str, Any], cfg: ModelConfig, tensors: Mapping[str, Tensor]) -> set[str]:
    """Tensors of the checkpoint that its model never reads, or (the tied head) holds twice."""
    names: set[str] = set()
    if source in ("parcae", "huginn"):
        names.add("freqs_cis")
        head, embedding = tensors.get("lm_head.weight"), tensors.get("transformer.wte.weight")
        if cfg.tie_embeddings and head is not None and embedding is not None and torch.equal(head, embedding):
            names.add("lm_head.weight")
    if source == "parcae" and cfg.value_embeddings:
        for layer, (table, gate) in _value_layers(config, cfg).items():
            part, index = layer.split(".")
            if table != gate:
                names.add(f"value_embeds.{cfg.layer_index(part, int(index))}.weight")
                names.add(f"{_BLOCKS[part]}.{index}.attn.ve_gate.weight")
    if source == "blindspot":
        names |= {"raw_alpha", "exit_gate.weight", "exit_gate.bias"}
        if not cfg.recurrence.interloop_norm:
            names.add("loop_norm.weight")
        if cfg.recurrence.readout == "raw":
            names.add("decode_norm.weight")
    return names & tensors.keys()


def _zeroed(source: Source, config: Mapping[str, Any], cfg: ModelConfig) -> set[str]:
    """Value embeddings that our model has and the reference, for want of a gate, does not use."""
    if source != "parcae" or not cfg.value_embeddings:
        return set()
    layers = [layer for layer, (table, gate) in _value_layers(config, cfg).items() if table and not gate]
    kinds = ("value_table", "value_gate")
    return {f"{layer}.attention.{kind}.weight" for layer in layers for kind in kinds}


# ------------------------------------------------------------------------------------------------------- configurations


class _Fields:
    """An official configuration whose fields are taken out one by one; what is left at the end is unknown."""

    def __init__(self, source: Source, config: Mapping[str, Any]) -> None:
        self.source, self.left = source, dict(config)

    def fail(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"config.json of the {self.source} checkpoint: {name}={value!r}: expected {expected}")

    def take(self, name: str, kind: Any, *default: Any) -> Any:
        """The value of a field of a type (int, float, bool, str; `| None`), which must be there without a default."""
        value, core = self._pop(name, *default), without_null(kind)
        fits = isinstance(value, int | float if core is float else core) and isinstance(value, bool) == (core is bool)
        if not fits and (value is not None or core is kind):
            raise self.fail(name, value, describe_type(kind))
        return value

    def _pop(self, name: str, *default: Any) -> Any:
        if name not in self.left and not default:
            raise self.fail(name, None, "a value (the field is absent)")
        return self.left.pop(name, *default)

    def choose(self, name: str, ours: Mapping[Any, Any], *default: Any) -> Any:
        """Our word for the field's."""
        value = self._pop(name, *default)
        for theirs, own in ours.items():
            if value == theirs:
                return own
        raise self.fail(name, value, "one of " + ", ".join(map(repr, ours)))

    def expect(self, **values: Any) -> None:
        """Fields of which this model knows one value only; absent ones have it."""
        for name, value in values.items():
            self.choose(name, {value: value}, value)

    def end(self, *ignored: str) -> None:
        """All fields but `ignored`, which do not concern the model, must have been taken."""
        unknown = sorted(self.left.keys() - set(ignored))
        if unknown:
            raise self.fail(
                unknown[0], self.left[unknown[0]], "a configuration without this field, whose meaning is unknown"
            )


_STATE_INITS = {"like-init": "like_init", "zero": "zero", "normal": "normal", "embed": "embed", "unit": "unit"}
# (distribution, sampled_loops)
_SAMPLING = {
    "poisson-truncated-full": ("poisson", "all"),
    "poisson-fill": ("poisson", "no_grad"),
    "poisson-lognormal-filling": ("lognormal_poisson", "all"),
}
_INJECTIONS = {"diagonal": "diagonal", "linear": "concat", "add": "add"}
_FAMILIES: dict[str, Family] = {"diagonal": "parcae", "concat": "rdm", "add": "add"}
_MLPS = {"BaseMLP ReLU2": "relu2", "GatedMLP SiLU": "swiglu"}


def import_config(source: Source, config: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """The model section for an official configuration; `names` of the tensors tell what it does not say.

    ConfigError names a field that is unknown, absent or beyond this model.
    """
    translate = {"parcae": _parcae, "huginn": _huginn, "flt": _flt, "blindspot": _blindspot}[source]
    return translate(_Fields(source, config), names)


def _recurrent_gpt(f: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model settings, recurrence settings) of the fields that Parcae's code took over from Huginn's."""
    f.left["mlp"] = f"{f.take('mlp_class_name', str)} {f.take('nonlin_name', str)}"
    f.expect(bias=False, logit_scale=1.0, rope_condense_ratio=1, use_rope=True)
    model = {
        "vocab_size": f.take("vocab_size", int),
        "vocab_multiple": f.take("padding_multiple", int),
        "context_length": f.take("block_size", int),
        "width": f.take("n_embd", int),
        "num_heads": f.take("num_attention_heads", int),
        "num_kv_heads": f.take("num_key_value_heads", int | None),
        "ffn_width": f.take("intermediate_size", int),
        "prelude_layers": f.take("n_layers_in_prelude", int),
        "core_layers": f.take("n_layers_in_recurrent_block", int),
        "coda_layers": f.take("n_layers_in_coda", int),
        "norm_eps": f.take("norm_eps", float),
        "mlp": f.choose("mlp", _MLPS),
        "relu2_scale": 0.5,
        "rope_base": float(f.take("rope_base", float)),
        "rope_layout": "interleaved",
        "qk_bias": f.take("qk_bias", bool, False),
        "tie_embeddings": f.take("tie_embeddings", bool),
    }
    distribution, sampled_loops = f.choose("sampling_scheme", _SAMPLING)
    recurrence = {
        "injection": f.choose("injection_type", _INJECTIONS),
        "state_init": f.choose("state_init", _STATE_INITS),
        "mean_loops": float(f.take("mean_recurrence", float)),
        "backprop_loops": f.take("mean_backprop_depth", int),
        "distribution": distribution,
        "sampled_loops": sampled_loops,
    }
    return model, recurrence


def _parcae(f: _Fields, names: Collection[str]) -> ModelConfig:
    rope = f.left.pop("rope_settings", {})
    if not isinstance(rope, Mapping):
        raise f.fail("rope_settings", rope, "an object")
    f.left |= rope
    model, recurrence = _recurrent_gpt(f)
    f.expect(
        block_class_name="TransformerPreNormBlock", norm_class_name="RMSNorm", emb_scale=1.0, use_abacus=False,
        randomize_positions_from=None, mup_model_scaling_factor=1, debias_attention=False, center_attention=False,
        clip_qkv=None, _class_name="ParcaeConfig", model_class_name="Parcae", init_strategy="scaled-zero",
    )  # fmt: skip
    recurrence |= {
        "prelude_norm": f.take("prelude_norm", bool),
        "output_projection": True,
        "granularity": f.choose(
            "recurrent_iteration_method", {"per-sequence": "sequence", "per-batch": "batch", "per-token": "token"}
        ),
    }
    model |= {
        "block": "pre",
        "core_width": f.take("recurrent_embedding_dimension", int),
        "core_ffn_width": f.take("recurrent_intermediation_embedding_dimension", int),
        "core_num_heads": f.take("recurrent_num_attention_heads", int | None, None),
        "qk_norm": f.take("qk_norm", bool),
        # The reference has no switch; a model made without them has no tables.
        "value_embeddings": any(name.startswith("value_embeds.") for name in names),
        "logit_softcap": f.take("logit_softcap", float | None),
        "norm_before_coda": False,
        "scale_embeddings": False,
        "init": "scaled_zero",
    }
    padded, head_size, core_head_size = (
        f.take(name, int | None, None) for name in ("padded_vocab_size", "head_size", "recurrent_head_size")
    )
    f.end(
        "name", "hf_config", "attn_impl", "init_orthogonal", "skip_initialization", "use_fused_head", "simple_ops",
        "activation_checkpoint_impl", "strategy", "lockstep_n", "lockstep_k", "curriculum_target",
        "_is_recurrent_block_config",
    )  # fmt: skip
    cfg = make_model_config(_FAMILIES[recurrence["injection"]], recurrence, **model)
    derived = {"padded_vocab_size": (padded, cfg.padded_vocab_size), "head_size": (head_size, cfg.head_channels)}
    derived["recurrent_head_size"] = (core_head_size, cfg.head_channels)
    for name, (value, expected) in derived.items():
        if value not in (None, expected):
            raise f.fail(name, value, f"{expected}, which follows from the other fields")
    return cfg


def _huginn(f: _Fields, names: Collection[str]) -> ModelConfig:
    model, recurrence = _recurrent_gpt(f)
    f.expect(norm_class_name="RMSNorm_llama", architecture_class_name="RecurrentGPT", init_strategy="takase")
    scale, root = f.take("emb_scale", float), max(0, model["width"]) ** 0.5
    if abs(scale - root) > 1e-6 * root:
        raise f.fail("emb_scale", scale, f"{root}, the root of n_embd")
    recurrence |= {"prelude_norm": False, "output_projection": False}
    model |= {
        "block": f.choose("block_class_name", {"TransformerPreNormBlock": "pre", "SandwichBlock": "sandwich"}),
        "qk_norm": False,
        "value_embeddings": False,
        "norm_before_coda": True,
        "scale_embeddings": True,
        "init": "scaled",
    }
    f.end()
    return make_model_config(_FAMILIES[recurrence["injection"]], recurrence, **model)


def _flt(f: _Fields, names: Collection[str]) -> ModelConfig:
    family = f.choose(
        "model_type",
        {"LT": "lt", "LT_i": "lt_input", "LT_ia": "lt_attention", "FLT": "flt", "FLT_res": "flt_res"},
    )
    width, length, pattern = f.take("n_embd", int), f.take("sequence_len", int), f.take("window_pattern", str, "L")
    loops = f.take("K", int)
    model = {
        "vocab_size": f.take("vocab_size", int),
        "vocab_multiple": 64,
        "context_length": length,
        "width": width,
        "num_heads": f.take("n_head", int),
        "num_kv_heads": f.take("n_kv_head", int),
        "ffn_width": 4 * width,
        "core_layers": f.take("n_layer", int),
        "rope_table": "bf16",
        "sliding_window": max(length // 4, 1) if "S" in pattern else None,
        "window_pattern": pattern,
        "init": "normal",
    }
    # Dropout is a field of theirs that their code never uses; the loss is chosen for a run, not for a model.
    f.end("dropout", "loss_type")
    recurrence = {"mean_loops": float(loops), "backprop_loops": loops, "distribution": "fixed"}
    return make_model_config(family, recurrence, **model)


def _blindspot(f: _Fields, names: Collection[str]) -> ModelConfig:
    width, loops = f.take("d_model", int), f.take("num_loops", int)
    normed, final_only = f.take("use_decode_norm", bool), f.take("decode_norm_final_only", bool, False)
    recurrence = {
        "mean_loops": float(loops),
        "backprop_loops": loops,
        "distribution": "fixed",
        "interloop_norm": f.take("inter_loop_norm", bool),
        "readout": ("final_norm" if final_only else "norm") if normed else "raw",
    }
    model = {
        "vocab_size": f.take("vocab_size", int),
        "vocab_multiple": 1,
        "context_length": f.take("max_seq_len", int),
        "width": width,
        "num_heads": f.take("num_heads", int),
        "ffn_width": f.take("ff_multiplier", int) * width,
        "core_layers": f.take("num_layers", int),
        "norm_eps": f.take("norm_eps", float),
        "tie_embeddings": f.take("tie_weights", bool),
        "dropout": f.take("dropout", float),
        "init": "uniform",
    }
    f.end()
    return make_model_config("blindspot", recurrence, **model)
