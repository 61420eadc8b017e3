"""The model for transformers equals the native one: logits, loss, gradients, whatever the family."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig, RecurrenceConfig
from pretrain.hf.configuration_looped import LoopedConfig
from pretrain.hf.modeling_looped import LoopedForCausalLM
from tests.hf.models import hf_model, model, pair, tokens
from tests.model.helpers import make_batch, train_loss
from tests.model.tiny import FAMILIES, random_model, tiny_config
from tools.hf_folder import read_folder
from tools.hf_format import hf_config, model_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
VARIANTS = {
    "gqa": ("parcae", {}, {"num_heads": 4, "num_kv_heads": 2}),
    "core_width": ("parcae", {"state_init": "unit"}, {"core_width": 24, "core_num_heads": 4, "core_ffn_width": 16}),
    "zoh": ("parcae", {"discretization": "zoh", "state_init": "normal"}, {}),
    "window": ("flt", {}, {"sliding_window": 3, "window_pattern": "SL"}),
    "huginn": ("rdm", {"state_init": "embed"}, {"qk_bias": True, "block": "pre"}),
    "raw": ("blindspot", {"readout": "raw", "interloop_norm": True}, {}),
    "final_norm": ("blindspot", {"readout": "final_norm"}, {"dropout": 0.1}),
    "bf16_table": ("flt", {}, {"rope_table": "bf16", "logit_softcap": 2.0}),
}


@pytest.mark.parametrize("case", [*FAMILIES, *VARIANTS])
@torch.no_grad()
def test_logits_are_the_native_ones(case: str) -> None:
    family, recurrence, settings = VARIANTS.get(case, (case, {}, {}))
    native, exported = pair(family, recurrence, **settings)
    ids = tokens(2, 12)
    for loops in (1, 2, 4, 11):
        torch.testing.assert_close(
            exported(ids, num_loops=loops).logits, native.logits(ids, loops), atol=1e-5, rtol=1e-6
        )
    assert torch.equal(exported(ids).logits, exported(ids, num_loops=native.cfg.recurrence.default_loops).logits)


@pytest.mark.slow
def test_a_compiled_model_has_no_graph_for_each_length() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    plain = model("parcae")
    torch.compiler.reset()
    compiled = torch.compile(plain, backend=backend, fullgraph=True)
    for length in (12, 8, 5, 9, 20):
        ids = tokens(2, length)
        with torch.no_grad():
            expected = plain(ids, num_loops=3).logits
            torch.testing.assert_close(compiled(ids, num_loops=3).logits, expected, atol=1e-6, rtol=0)
    assert len(graphs) == 2  # for the first length, and for any
    torch.compiler.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_native_ones(family: str) -> None:
    native, exported = pair(family)
    ids, loops = tokens(3, 10), 3
    state = torch.randn(3, 10, native.cfg.width, generator=torch.Generator().manual_seed(1))
    if native.cfg.recurrence.state_init == "input":
        state = None
    labels = ids.clone()
    labels[0, :4] = -100
    output = exported.train()(ids, labels=labels, num_loops=loops, initial_state=state)
    output.loss.backward()
    targets = torch.cat((labels[:, 1:], torch.full((3, 1), -100)), 1)
    batch, plan, _ = make_batch(ids, targets, [0] * 3, [loops] * 3, state)
    reference = train_loss(native, batch, plan).loss
    torch.testing.assert_close(output.loss, reference, atol=1e-5, rtol=1e-5)
    expected = {name: p.grad for name, p in native.named_parameters()}
    for name, parameter in exported.named_parameters():
        assert parameter.grad is not None, name
        gradient = expected[name][: len(parameter)]
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_checkpointed_layers_give_the_same_gradients() -> None:
    ids, found = tokens(2, 8), []
    for checkpointed in (False, True):
        _, exported = pair("parcae_flt")
        if checkpointed:
            exported.gradient_checkpointing_enable({"use_reentrant": False})
        exported.train()(ids, labels=ids, num_loops=3).loss.backward()
        found.append({name: p.grad for name, p in exported.named_parameters()})
    with pytest.raises(ValueError, match="use_cache: expected False where gradient checkpointing runs layers twice"):
        exported(ids, use_cache=True)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


@pytest.mark.slow
def test_the_trainer_of_transformers_fine_tunes(tmp_path: Path) -> None:
    """With accumulation and checkpointed layers; what it saves is the model that it has."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    _, exported = pair("parcae_flt")
    ids = tokens(8, 12)
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=True, report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(exported, arguments, train_dataset=rows, eval_dataset=rows)
    with torch.no_grad():
        before = float(exported(ids, labels=ids).loss)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert before > losses[0] > losses[1]
    trainer.save_model(str(tmp_path / "saved"))
    again = LoopedForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), exported.parameters(), strict=True))


def test_loss_over_accumulated_batches_is_the_mean_over_tokens() -> None:
    ids = tokens(4, 9)
    with torch.no_grad():
        whole = model("parcae")(ids, labels=ids).loss
        parts = [model("parcae")(part, labels=part, num_items_in_batch=4 * 8).loss for part in ids.split(2)]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("family", ["parcae", "flt", "rdm", "blindspot"])
@torch.no_grad()
def test_what_a_forward_returns(family: str) -> None:
    ids, exported = tokens(2, 7), model(family)
    output = exported(ids, num_loops=4, output_hidden_states=True, output_loop_logits=True)
    assert output.loop_logits.shape == (4, 2, 7, 29) and len(output.hidden_states) == 6
    for loops in (1, 2, 3, 4):
        alone = exported(ids, num_loops=loops, output_hidden_states=True)
        torch.testing.assert_close(output.loop_logits[loops - 1], alone.logits, atol=1e-6, rtol=1e-6)
        assert torch.equal(output.hidden_states[loops], alone.hidden_states[loops])
    assert exported(ids, return_dict=False)[0].shape == (2, 7, 29)
    assert torch.equal(exported(ids, logits_to_keep=2).logits, exported(ids).logits[:, -2:])


@pytest.mark.parametrize("family", ["parcae", "flt", "blindspot"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(family: str) -> None:
    ids, exported = tokens(3, 9), model(family, torch.float64)
    expected = exported(ids, num_loops=3).logits
    padding, ones = torch.full((3, 4), 2), torch.ones(3, 9, dtype=torch.int64)
    left = exported(torch.cat((padding, ids), 1), torch.cat((padding * 0, ones), 1), num_loops=3).logits[:, 4:]
    right = exported(torch.cat((ids, padding), 1), torch.cat((ones, padding * 0), 1), num_loops=3).logits[:, :9]
    moved = exported(ids, position_ids=torch.arange(5, 14)[None], num_loops=3).logits
    torch.testing.assert_close(left, expected)
    torch.testing.assert_close(right, expected)
    assert not torch.allclose(moved, expected, atol=1e-3) or family == "flt", "positions matter"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_loops": 0}, "num_loops=0: expected an integer >= 1"),
        ({"num_loops": -1}, "num_loops=-1"),
        ({"num_loops": 2.0}, "num_loops=2.0"),
        ({"exit_rule": "entropy"}, "exit_rule='entropy': expected one of none, kl, state, margin"),
        ({"exit_rule": "kl"}, "exit_threshold=None: expected a number or 'never'"),
        ({"exit_threshold": 0.1}, "exit_threshold=0.1: expected None, since exit_rule is none"),
        ({"exit_rule": "kl", "exit_threshold": -1}, "exit_threshold=-1: expected a number >= 0 or 'never'"),
        ({"exit_rule": "state", "exit_threshold": -0.5}, "exit_threshold=-0.5: expected a number >= 0"),
        ({"exit_rule": "margin", "exit_threshold": -1.0}, "exit_threshold=-1.0: expected a number >= 0"),
        ({"exit_rule": "margin", "exit_threshold": math.inf}, "exit_threshold=inf: expected a number >= 0"),
        ({"exit_rule": "kl", "exit_threshold": math.nan}, "exit_threshold=nan: expected a number >= 0"),
        ({"exit_rule": "kl", "exit_threshold": True}, "exit_threshold=True: expected a number >= 0"),
        ({"exit_rule": "kl", "exit_threshold": "soon"}, "exit_threshold='soon': expected a number >= 0"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1: expected 0, for all, or a number of last tokens"),
        ({"position_ids": torch.zeros(1, 3, dtype=torch.int64)}, r"position_ids: shape \[1, 3\], expected \[2, 4\]"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask: shape \[2, 3\], expected \[2, 4\]"),
        ({"initial_state": torch.zeros(2, 4, 3)}, r"initial_state: shape \[2, 4, 3\], expected \[2, 4, 16\]"),
        ({"labels": torch.zeros(2, 4, dtype=torch.int64), "logits_to_keep": 1}, "logits_to_keep=1: expected 0"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model("parcae")(tokens(2, 4), **arguments)


OUT_OF_RANGE: dict[str, list[object]] = {
    "num_loops": [0, -1, 2.5, True, None],
    "exit_rule": ["entropy", None],
    "exit_threshold": [-1, 0.1],  # the second without a rule
    "cache_mode": ["half"],
    "vocab_size": [0],
    "num_kv_heads": [3],
    "core_num_kv_heads": [3],
    "head_dim": [0, 7],
    "core_layers": [0],
    "prelude_layers": [-1],
    "norm_eps": [0.0, -1e-5, math.nan],
    "logit_softcap": [0, -15.0],
    "dropout": [1.0, -0.1],
    "sliding_window": [0],
    "window_pattern": ["SX", ""],
    "value_gate_channels": [10_000],
    "injection": ["diag"],
    "readout": ["normed"],
    "state_init": ["ones"],
    "state_std": [0.0, math.inf],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_configurations_out_of_range(name: str, tmp_path: Path) -> None:
    """At once, and in a folder whose settings are given to from_pretrained, which sets them later."""
    sound = model("parcae")
    settings = {key: value for key, value in sound.config.to_dict().items() if key in LoopedConfig.__annotations__}
    sound.save_pretrained(tmp_path)
    for value in OUT_OF_RANGE[name]:
        message = re.escape(f"{name}={value!r}: expected ")
        with pytest.raises(ValueError, match=message):
            LoopedConfig(**settings | {name: value})
        with pytest.raises(ValueError, match=message):
            LoopedForCausalLM.from_pretrained(tmp_path, **{name: value})


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"input_ids: shape \[1, 0\]"):
        model("parcae")(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="position 96: expected below context_length=96"):
        model("blindspot")(tokens(1, 97))
    with pytest.raises(ValueError, match="position -1: expected none below 0"):
        model("blindspot")(tokens(1, 2), position_ids=torch.tensor([[-1, 0]]))
    with pytest.raises(NotImplementedError, match="value embeddings"):
        model("parcae").resize_token_embeddings(64)


@pytest.mark.parametrize("family", ["parcae", "flt"])
@torch.no_grad()
def test_saved_and_loaded_again(family: str, tmp_path: Path) -> None:
    model(family).save_pretrained(tmp_path)
    again = LoopedForCausalLM.from_pretrained(tmp_path)
    assert again.state_dict().keys() == model(family).state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model(family).parameters(), strict=True))
    cfg, tensors = read_folder(tmp_path)
    assert hf_config(cfg) == hf_config(tiny_config(family, context_length=96))
    assert tensors.keys() == again.state_dict().keys()
    ids = tokens(2, 5)
    assert torch.equal(again.eval()(ids).logits, model(family)(ids).logits)
    low = LoopedForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact = {name for name, p in low.named_parameters() if p.dtype == torch.float32}
    assert exact == {name for name in low.state_dict() if name.endswith(("A_log", "dt_bias"))}
    difference = (low(ids).logits - model(family)(ids).logits).abs().max()
    assert 0 < difference < 0.1 * model(family)(ids).logits.abs().max()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_survive_the_way_there_and_back(path: Path) -> None:
    there = hf_config(load_config(path).model)
    assert hf_config(model_config(there | {"model_type": "looped"}, "config.json")) == there


def test_an_export_from_before_a_field_existed_is_read() -> None:
    there = hf_config(tiny_config("parcae")) | {"model_type": "looped"}
    older = there | {"training": {name: value for name, value in there["training"].items() if name != "sampled_loops"}}
    assert model_config(older, "config.json") == model_config(there, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_model_is_exported(family: str) -> None:
    """A field of ours that nobody thought of here would be lost in silence."""
    cfg = tiny_config(family, num_kv_heads=1, head_dim=4, core_num_heads=6, core_ffn_width=8, qk_norm_eps=1e-3)
    back = model_config(hf_config(cfg) | {"model_type": "looped"}, "config.json")
    own, other = dataclasses.asdict(cfg), dataclasses.asdict(back)
    assert {**other, "core_width": None} == {**own, "core_width": None}
    names = {field.name for kind in (ModelConfig, RecurrenceConfig) for field in dataclasses.fields(kind)}
    renamed, of_training = {"recurrence", "tie_embeddings"}, {"auxiliary"}
    exported = hf_config(cfg)
    assert names - renamed - of_training <= exported.keys() | exported["training"].keys()


def test_random_weights_of_a_new_model_are_finite() -> None:
    """transformers' own initialisation, for a model made from its configuration alone."""
    fresh = LoopedForCausalLM(hf_model(random_model(tiny_config("parcae"))).config)
    assert torch.isfinite(fresh(tokens(1, 4)).logits).all()
