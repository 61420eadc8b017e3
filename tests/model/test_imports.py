"""Published checkpoints come in whole or not at all: what is missing, unknown, dead or beyond the model is named."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.errors import CheckpointError, ConfigError
from pretrain.model.imports import Source, import_checkpoint, import_config, official_tensors, parameter_shapes
from pretrain.model.looped import LoopedLM
from tests.parity import Case, load_case, official_config, parity_folder

CASES: list[tuple[Source, str]] = [
    ("parcae", "a_base"), ("parcae", "f_linear_injection"), ("huginn", "sandwich"), ("huginn", "prenorm_add"),
    ("flt", "FLT"), ("flt", "FLT_gqa"), ("blindspot", "norm_interloop"),
]  # fmt: skip
PARCAE: dict[str, Any] = {
    "vocab_size": 100, "padding_multiple": 64, "block_size": 32, "n_embd": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 48, "recurrent_embedding_dimension": 32,
    "recurrent_intermediation_embedding_dimension": 48, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2, "mean_recurrence": 6, "mean_backprop_depth": 3, "norm_class_name": "RMSNorm",
    "norm_eps": 1e-5, "mlp_class_name": "BaseMLP", "nonlin_name": "ReLU2", "qk_norm": True, "prelude_norm": True,
    "bias": False, "tie_embeddings": True, "injection_type": "diagonal", "state_init": "like-init",
    "init_strategy": "scaled-zero", "sampling_scheme": "poisson-truncated-full",
    "recurrent_iteration_method": "per-sequence", "block_class_name": "TransformerPreNormBlock",
    "logit_softcap": None, "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000},
    "_class_name": "ParcaeConfig",
}  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("poisson-truncated-full", ("poisson", "all")),
        ("poisson-fill", ("poisson", "no_grad")),
        ("poisson-lognormal-filling", ("lognormal_poisson", "all")),
    ],
)
def test_sampling_schemes(scheme: str, expected: tuple[str, str]) -> None:
    cfg = import_config("parcae", PARCAE | {"sampling_scheme": scheme}, ["value_embeds.0.weight"])
    assert (cfg.recurrence.distribution, cfg.recurrence.sampled_loops) == expected


def _parcae_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the official names, with table and gate in every second layer."""
    cfg = import_config("parcae", config, ["value_embeds.0.weight"])
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(cfg).items()}
    return official_tensors("parcae", cfg, ours)


@pytest.mark.parametrize(("source", "name"), CASES)
def test_the_way_back_gives_the_same_tensors(source: Source, name: str) -> None:
    case = load_case(source, name)
    back = official_tensors(source, case.imported.config, case.imported.tensors)
    assert back.keys() == case.official.keys() - set(case.imported.unused)
    assert all(torch.equal(back[key], case.official[key]) for key in back)


@pytest.mark.parametrize(("source", "name"), CASES)
def test_a_missing_an_unknown_and_a_misshapen_tensor_are_named(source: Source, name: str) -> None:
    case = load_case(source, name)
    config = official_config(source, case.report)
    dropped = next(key for key in case.official if key.endswith("proj.weight"))
    without = {key: value for key, value in case.official.items() if key != dropped}
    with pytest.raises(CheckpointError, match=re.escape(dropped)):
        import_checkpoint(source, config, without)
    with pytest.raises(CheckpointError, match="strange"):
        import_checkpoint(source, config, case.official | {"strange.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"{re.escape(dropped)}: shape \[1, 2\], expected \[\d+, \d+\]"):
        import_checkpoint(source, config, case.official | {dropped: torch.zeros(1, 2)})


@pytest.mark.parametrize(("source", "name"), CASES)
def test_an_unknown_or_absent_configuration_field_is_named(source: Source, name: str) -> None:
    case = load_case(source, name)
    config = official_config(source, case.report)
    with pytest.raises(ConfigError, match="new_switch=True"):
        import_checkpoint(source, config | {"new_switch": True}, case.official)
    with pytest.raises(ConfigError, match="vocab_size=None: expected a value"):
        import_checkpoint(source, {k: v for k, v in config.items() if k != "vocab_size"}, case.official)


@pytest.mark.parametrize(("source", "name"), CASES)
def test_a_field_of_another_type_is_named(source: Source, name: str) -> None:
    case = load_case(source, name)
    config = official_config(source, case.report)
    for field in config.keys() - {"_class_name"}:
        for value in ("x", [1], {"a": 1}, -1):
            with contextlib.suppress(ConfigError):  # beside the fields that have no effect no other error may come
                import_config(source, config | {field: value}, case.official)
    for field, value in (("n_embd", "64"), ("n_embd", None), ("tie_embeddings", "no"), ("mean_recurrence", "x")):
        with pytest.raises(ConfigError, match=f"{field}={value!r}: expected (an integer|true or false|a number)$"):
            import_config("parcae", PARCAE | {field: value}, [])


@pytest.mark.parametrize(
    ("field", "value"),
    [("bias", True), ("nonlin_name", "GELU"), ("injection_type", "gated"), ("use_abacus", True), ("clip_qkv", 8.0)],
)
def test_a_setting_beyond_the_model_is_named(field: str, value: object) -> None:
    shown = "mlp='BaseMLP GELU'" if field == "nonlin_name" else f"{field}={value!r}"
    with pytest.raises(ConfigError, match=re.escape(shown)):
        import_config("parcae", PARCAE | {field: value}, [])


@pytest.mark.parametrize(
    ("layers", "dead_tables", "absent_gates", "dead_gates"),
    [
        # The reference's two rules of parity at odd layer counts, as reported for its own models.
        ((1, 3, 1), [4], ["coda.0"], []),
        ((2, 3, 2), [6], ["coda.1"], ["coda.0"]),
        ((1, 1, 1), [2], ["coda.0"], []),
        ((2, 1, 1), [1], ["prelude.1"], ["prelude.0", "core_block.0"]),
    ],
)
def test_dead_value_embeddings_of_odd_layer_counts(
    layers: tuple[int, int, int], dead_tables: list[int], absent_gates: list[str], dead_gates: list[str]
) -> None:
    names = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
    config = PARCAE | dict(zip(names, layers, strict=True))
    tensors = _parcae_tensors(config)
    for layer in absent_gates:
        del tensors[f"transformer.{layer}.attn.ve_gate.weight"]
    gates = {f"transformer.{layer}.attn.ve_gate.weight": torch.randn(2, 32) for layer in dead_gates}
    imported = import_checkpoint("parcae", config, tensors | gates | {"freqs_cis": torch.zeros(1)})
    assert imported.unused == sorted(["freqs_cis", *gates, *(f"value_embeds.{i}.weight" for i in dead_tables)])
    assert imported.zeroed == sorted(
        f"{layer}.attention.value_{kind}.weight" for layer in absent_gates for kind in ("gate", "table")
    )
    assert not any(imported.tensors[name].any() for name in imported.zeroed)
    LoopedLM(imported.config).load_state_dict(imported.tensors)


@pytest.mark.parametrize("granularity", ["batch", "sequence", "token"])
def test_what_shares_a_loop_count_is_taken_over(granularity: str) -> None:
    cfg = import_config("parcae", PARCAE | {"recurrent_iteration_method": f"per-{granularity}"}, [])
    assert cfg.recurrence.granularity == granularity


def test_a_tied_head_may_be_stored_twice_if_it_is_the_same() -> None:
    tensors = _parcae_tensors(PARCAE)
    table = tensors["transformer.wte.weight"]
    assert import_checkpoint("parcae", PARCAE, tensors | {"lm_head.weight": table.clone()}).unused == ["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        import_checkpoint("parcae", PARCAE, tensors | {"lm_head.weight": table + 1})


def test_biases_and_gated_mlps_of_parcae() -> None:
    config = PARCAE | {"qk_bias": True, "mlp_class_name": "GatedMLP", "nonlin_name": "SiLU"}
    tensors = _parcae_tensors(config)
    assert tensors["transformer.core_block.0.attn.qk_bias"].shape == (2, 1, 2, 16)
    assert tensors["transformer.core_block.0.mlp.fc.weight"].shape == (96, 32)
    imported = import_checkpoint("parcae", config, tensors)
    back = official_tensors("parcae", imported.config, imported.tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_released_form_holds_the_same_model() -> None:
    case: Case = load_case("parcae", "a_base")
    folder = parity_folder("parcae") / "released_format_a_base"
    tensors = torch.load(folder / "model.pt", weights_only=True)
    imported = import_checkpoint("parcae", json.loads((folder / "config.json").read_text()), tensors)
    assert imported.config == case.imported.config
    assert imported.unused == ["freqs_cis", "lm_head.weight"]
    assert all(torch.equal(imported.tensors[name], value) for name, value in case.imported.tensors.items())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("small-140m", 144_323_136),
        ("medium-370m", 388_003_328),
        ("large-770m", 776_655_680),
        ("xlarge-1_3b", 1_338_591_744),
    ],
)
def test_released_configurations(name: str, count: int) -> None:
    config = json.loads((parity_folder("parcae") / f"released_config_parcae-{name}.json").read_text())
    cfg = import_config("parcae", config, ["value_embeds.1.weight"])
    assert sum(shape.numel() for shape in parameter_shapes(cfg).values()) == count
    assert (cfg.family, cfg.recurrence.mean_loops, cfg.recurrence.backprop_loops) == ("parcae", 8.0, 4)
