"""Activation checkpointing over the loops: equal gradients, and what is kept for backward.

Kept for backward are the tensors that autograd saves and the arguments of checkpointed functions. Counted are their
storages, each once, without the parameters. With policy `loop` only the states grow with the number of gradient loops
k, one of ROWS x LENGTH x width elements per loop, so that with M(k) the bytes kept for k loops

    M(16) <= 1.3 M(4) + (16 - 4) x ROWS x LENGTH x width x bytes per element

The recomputation in backward adds the saved tensors of one loop at a time, whatever k is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pretrain.config.schema import LossConfig
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from tests.model.helpers import make_batch, train_loss
from tests.model.tiny import random_model, tiny_config

ROWS, LENGTH = 8, 16
POLICIES = ("none", "loop", "layer", "every_k_loops")


def tokens() -> tuple[Tensor, Tensor]:
    rows = torch.randint(29, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return rows[:, :-1], rows[:, 1:]


def with_policy(model: LoopedLM, policy: str) -> LoopedLM:
    model.checkpointing, model.loops_per_checkpoint = policy, 2
    return model


def kept_bytes(model: LoopedLM, num_loops: int) -> int:
    """M(num_loops): bytes kept for backward when every row runs that many gradient loops."""
    batch, loops, _ = make_batch(*tokens(), [0] * ROWS, [num_loops] * ROWS)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(x.detach())
        return x

    checkpointed = model.checkpointed

    def counted(function: Callable[..., Any], *args: Any) -> Any:
        for x in tree_leaves(args):
            if isinstance(x, Tensor):
                keep(x)
        return checkpointed(function, *args)

    model.checkpointed = counted  # type: ignore[method-assign]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        totals = Totals(float(ROWS * LENGTH), float(ROWS))
        model.training_loss(batch, loops, StateKey(1, 0, batch.rows), LossConfig(), totals)
    del model.checkpointed
    return sum(storages.values())


@pytest.mark.parametrize("family", ["parcae", "flt", "rdm"])
def test_memory_of_16_loops(family: str) -> None:
    model = random_model(tiny_config(family))
    states = (16 - 4) * ROWS * LENGTH * model.cfg.width_of("core") * 4
    few, many = (kept_bytes(with_policy(model, "loop"), k) for k in (4, 16))
    assert few < many <= 1.3 * few + states
    # The bound tells policies apart: without recomputation all of a loop's tensors stay.
    few, many = (kept_bytes(with_policy(model, "none"), k) for k in (4, 16))
    assert many > 1.3 * few + states


def test_policies_in_order_of_memory() -> None:
    model = random_model(tiny_config("parcae"))
    kept = {policy: kept_bytes(with_policy(model, policy), 16) for policy in POLICIES}
    assert kept["every_k_loops"] < kept["loop"] < kept["layer"] < kept["none"], kept


@pytest.mark.parametrize("family", ["parcae_flt", "rdm"])
@pytest.mark.parametrize("objective", ["terminal", "per_loop"])
def test_equal_gradients(family: str, objective: Any) -> None:
    # fp64: policies add up the loops' gradients in different orders.
    model = random_model(tiny_config(family), dtype=torch.float64)
    batch, loops, _ = make_batch(*tokens(), [0, 0, 0, 0, 0, 1, 2, 5], [1, 2, 3, 4, 5, 5, 5, 5])
    cfg = LossConfig(objective=objective, norm_penalty=0.01)
    gradients = {}
    for policy in POLICIES:
        train_loss(with_policy(model, policy), batch, loops, cfg)
        gradients[policy] = [p.grad for p in model.parameters()]
    for policy in POLICIES:
        for actual, expected in zip(gradients[policy], gradients["none"], strict=True):
            scale = float(expected.abs().max()) + 1e-3
            torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-9)
