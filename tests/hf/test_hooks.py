"""Weights that are there only while the module that owns them is called: offloaded, sharded, on another device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pretrain.hf.modeling_looped import LoopedForCausalLM
from tests.hf.models import model, pair, tokens
from tests.hf.test_model import VARIANTS
from tests.model.tiny import FAMILIES

UNTIED = {"untied": ("parcae", {}, {"tie_embeddings": False}), "untied_rdm": ("rdm", {}, {"tie_embeddings": False})}


def units(exported: LoopedForCausalLM, whole_layers: bool) -> dict[nn.Module, list[nn.Parameter]]:
    """Modules with what comes and goes with them: each with its own parameters, as accelerate's hooks have it, or
    layers and the model's other children with all below them, as FSDP has it."""
    if not whole_layers:
        return {module: list(module.parameters(recurse=False)) for module in exported.modules()}
    layers = [*exported.prelude, *exported.core, *exported.coda]
    others = [child for child in exported.children() if not isinstance(child, nn.ModuleList)]
    return {module: list(module.parameters()) for module in [*layers, *others]}


@contextmanager
def weights_of_the_called_alone(parameters: dict[nn.Module, list[nn.Parameter]]) -> Iterator[None]:
    """Parameters are NaN but during calls of their module."""
    handles = []
    for module, own in parameters.items():
        kept = [parameter.detach().clone() for parameter in own]

        def bring(_: Any, __: Any, own: list[nn.Parameter] = own, kept: list[Tensor] = kept) -> None:
            for parameter, tensor in zip(own, kept, strict=True):
                parameter.data.copy_(tensor)

        def take(_: Any, __: Any, ___: Any, own: list[nn.Parameter] = own) -> None:
            for parameter in own:
                parameter.data.fill_(torch.nan)

        handles += [module.register_forward_pre_hook(bring), module.register_forward_hook(take)]
        take(None, None, None)
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("whole_layers", [False, True])
@pytest.mark.parametrize("case", [*FAMILIES, *VARIANTS, *UNTIED])
@torch.no_grad()
def test_every_weight_is_read_in_a_call_of_its_module(case: str, whole_layers: bool) -> None:
    family, recurrence, settings = (VARIANTS | UNTIED).get(case, (case, {}, {}))
    exported, ids = pair(family, recurrence, **settings)[1], tokens(2, 7)
    calls: list[dict[str, Any]] = [
        {"num_loops": 3, "output_loop_logits": True},
        {"num_loops": 3, "exit_rule": "kl", "exit_threshold": 0.2},
    ]
    expected = [exported(ids, **call) for call in calls]
    text = exported.generate(ids, max_new_tokens=4, do_sample=False, num_loops=2, eos_token_id=None)
    with weights_of_the_called_alone(units(exported, whole_layers)):
        assert all(p.isnan().all() for p in exported.parameters())
        for call, output in zip(calls, expected, strict=True):
            found = exported(ids, **call)
            assert torch.equal(found.logits, output.logits)
            assert output.loop_logits is None or torch.equal(found.loop_logits, output.loop_logits)
        again = exported.generate(ids, max_new_tokens=4, do_sample=False, num_loops=2, eos_token_id=None)
    assert torch.equal(again, text)


@pytest.mark.parametrize("case", ["parcae", "flt", "rdm", "blindspot", "huginn", "untied"])
@torch.no_grad()
def test_any_part_may_lie_on_the_disk(case: str, tmp_path: Path) -> None:
    """accelerate's device_map: each part alone on the disk, and all but it."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    family, recurrence, settings = (VARIANTS | UNTIED).get(case, (case, {}, {}))
    exported, ids = pair(family, recurrence, **settings)[1], tokens(2, 7)
    exported.save_pretrained(tmp_path / "model")
    expected = exported(ids, num_loops=3).logits
    parts = [name for name, _ in exported.named_children()]
    for part in parts:
        for inside, outside in (("disk", "cpu"), ("cpu", "disk")):
            places = {name: inside if name == part else outside for name in parts}
            loaded = LoopedForCausalLM.from_pretrained(
                tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
            ).eval()
            torch.testing.assert_close(loaded(ids, num_loops=3).logits, expected, msg=f"{part} on {inside}")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["parcae", "parcae_flt", "rdm", "blindspot"])
def test_fully_sharded_layers_give_the_same_gradients(family: str, checkpointed: bool, group_of_one: None) -> None:
    ids, found = tokens(2, 7), []
    for sharded in (False, True):
        exported = pair(family)[1].train()
        if checkpointed:
            exported.gradient_checkpointing_enable({"use_reentrant": False})
        if sharded:
            mesh = dist.init_device_mesh("cpu", (1,))
            for layer in [*exported.prelude, *exported.core, *exported.coda, exported.embedding, exported.injection]:
                fully_shard(layer, mesh=mesh)
            fully_shard(exported, mesh=mesh)
        exported(ids, labels=ids, num_loops=3).loss.backward()
        gradients = {name: p.grad.full_tensor() if sharded else p.grad for name, p in exported.named_parameters()}
        found.append(gradients)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


@torch.no_grad()
def test_another_table_replaces_embedding_and_tied_head() -> None:
    exported, ids = pair("parcae", {}, value_embeddings=False)[1], tokens(1, 6)
    before = exported(ids).logits
    table = nn.Embedding(exported.config.vocab_size, exported.config.width, _weight=2 * exported.embedding.weight)
    exported.set_input_embeddings(table)
    assert exported.get_input_embeddings().weight is table.weight and not torch.equal(exported(ids).logits, before)
    doubled = exported(ids, output_hidden_states=True)
    torch.testing.assert_close(doubled.logits, doubled.hidden_states[-1] @ table.weight.T)
    exported.resize_token_embeddings(exported.config.vocab_size + 3)
    assert exported(ids).logits.shape[-1] == table.num_embeddings + 3
    torch.testing.assert_close(exported(ids).logits[..., : table.num_embeddings], doubled.logits)


def test_a_tied_table_gets_the_gradients_of_both_uses() -> None:
    exported, ids = model("parcae"), tokens(2, 6)
    inside, outside = exported.embedding(ids), torch.randn(2, 6, exported.config.width)
    (inside.sum() + exported.embedding(outside, as_head=True).sum()).backward()
    counts = torch.bincount(ids.flatten(), minlength=exported.config.vocab_size)
    expected = counts[:, None] + outside.sum((0, 1))[None]
    torch.testing.assert_close(exported.embedding.weight.grad, expected)
    exported.zero_grad()
