"""Dropout's masks follow from seed, step, row, position, loop and place, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pretrain.config.schema import LossConfig
from pretrain.model.attention_mask import attend, make_context
from pretrain.model.batch import Loops
from pretrain.model.counter import StateKey
from pretrain.model.dropout import Dropout, dropout_noise
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.sampling import Depths, DepthSampler, LoopPlan
from tests.model.helpers import make_batch
from tests.model.test_compile import assert_equal_training, compiled_copy, rows_of_tokens, with_documents
from tests.model.tiny import FAMILIES, random_model, tiny_config

ROWS, LENGTH, P = 4, 16, 0.3
NO_GRAD, GRAD = (3, 1, 0, 0), (2, 2, 2, 1)


def model_of(family: str, dropout: float = P) -> LoopedLM:
    recurrence = None if family == "gpt" else {"mean_loops": 4.0, "backprop_loops": 2}
    return random_model(tiny_config(family, recurrence, dropout=dropout), dtype=torch.float64).train()


def gradients(model: LoopedLM, groups: list[list[int]], seed: int = 1, step: int = 0) -> dict[str, Tensor]:
    """Of a batch of four rows, cut into micro-batches of these rows; `loss` beside the parameters."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 29, (2, ROWS, LENGTH), generator=generator)
    looped = model.cfg.family != "gpt"
    no_grad, grad = (NO_GRAD, GRAD) if looped else ((0,) * ROWS, (1,) * ROWS)
    objective = "per_loop" if looped else "terminal"
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for rows in groups:
        counts = [[count[row] for row in rows] for count in (no_grad, grad)]
        batch, loops, order = make_batch(tokens[rows], labels[rows], *counts)
        places = torch.tensor(rows)[order]
        key, totals = StateKey(seed, step, places), Totals(float(ROWS * LENGTH), float(ROWS))
        settings = LossConfig(objective=objective)  # type: ignore[arg-type]
        loss = model.training_loss(batch._replace(rows=places), loops, key, settings, totals).loss
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert own.keys() == other.keys()
    for name, value in own.items():
        torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_micro_batches_nor_recomputation_change_the_gradient(family: str) -> None:
    """Rows of other depths beside a row, its place among them, and late joining leave its masks as they are."""
    model = model_of(family)
    whole = gradients(model, [[0, 1, 2, 3]])
    assert_close(gradients(model, [[2], [0], [3], [1]]), whole)
    assert_close(gradients(model, [[3, 0], [2, 1]]), whole)
    for checkpointing in ("loop", "layer", "every_k_loops"):
        model.checkpointing, model.loops_per_checkpoint = checkpointing, 2
        assert_close(gradients(model, [[1, 0], [2, 3]]), whole)


def test_a_repetition_drops_the_same_and_another_seed_or_step_does_not() -> None:
    model = model_of("blindspot")
    first = gradients(model, [[0, 1, 2, 3]])
    torch.rand(3)  # the global generator has no part in it
    assert all(torch.equal(x, first[name]) for name, x in gradients(model, [[0, 1, 2, 3]]).items())
    others = [gradients(model, [[0, 1, 2, 3]], seed=2), gradients(model, [[0, 1, 2, 3]], step=1)]
    assert len({float(found["loss"]) for found in (first, *others)}) == 3


def test_evaluation_drops_nothing() -> None:
    model, plain = model_of("blindspot"), model_of("blindspot", dropout=0.0)
    tokens = torch.arange(LENGTH)[None]
    assert torch.equal(model.logits(tokens, 3), plain.logits(tokens, 3))
    dropping, without = gradients(model, [[0, 1, 2, 3]]), gradients(plain, [[0, 1, 2, 3]])
    assert dropping["loss"] != without["loss"]
    assert torch.equal(gradients(model.eval(), [[0, 1, 2, 3]])["loss"], without["loss"])


def mask(noise: Tensor, place: str = "core.0.mlp", width: int = 32) -> Tensor:
    return Dropout(P, place)(torch.ones(*noise.shape, width), noise) == 0


def test_every_row_position_loop_and_place_has_a_mask_of_its_own() -> None:
    key = StateKey(1, 0, torch.arange(ROWS))
    noise = dropout_noise(key, LENGTH)
    plan = LoopPlan.from_depths(Depths(np.array([3]), np.array([2])))
    loops = Loops(plan.no_grad, plan.grad, (2,))
    ctx = make_context(tiny_config("blindspot"), LENGTH, noise.device, torch.float32, noise=noise)
    numbers = [loops.number(i, grad) for grad, count in ((False, 3), (True, 2)) for i in range(count)]
    masks = [mask(found) for number in numbers if (found := ctx.in_loop(number).noise) is not None]
    masks += [mask(noise, place) for place in ("embedding", "prelude.0.mlp", "core.0.mlp", "core.1.mlp", "coda.0.mlp")]
    masks += [mask(dropout_noise(StateKey(seed, step, key.rows), LENGTH)) for seed, step in ((2, 0), (1, 1))]
    tokens = torch.stack(masks).flatten(0, 2)
    assert len(masks) == 12 and len(tokens.unique(dim=0)) == len(tokens)
    assert abs(float(tokens.float().mean()) - P) < 5 * (P * (1 - P) / tokens.numel()) ** 0.5
    # Two masks agree as often as independent ones: no loop, layer or step sees another one's.
    agreement = P**2 + (1 - P) ** 2
    flat = tokens.view(len(masks), -1).float()
    for i, own in enumerate(flat):
        for other in flat[i + 1 :]:
            assert abs(float((own == other).float().mean()) - agreement) < 6 * 0.5 / own.numel() ** 0.5


def test_what_is_kept_keeps_the_mean() -> None:
    noise = dropout_noise(StateKey(1, 0, torch.arange(64)), 64)
    x = Dropout(P, "embedding")(torch.ones(64, 64, 64, dtype=torch.float64), noise)
    assert set(x.unique().tolist()) == {0.0, 1 / (1 - P)}
    assert abs(float(x.mean()) - 1) < 5 * (P / (1 - P) / x.numel()) ** 0.5


@pytest.mark.parametrize(
    ("family", "documents"),
    [
        ("flt", False),
        pytest.param("parcae_flt", True, marks=pytest.mark.slow),
        *(pytest.param(family, False, marks=pytest.mark.slow) for family in FAMILIES if family not in ("gpt", "flt")),
    ],
)  # fmt: skip
def test_compiled_loops_drop_the_same_in_two_graphs(family: str, documents: bool) -> None:
    torch.compiler.reset()
    recurrence = {"mean_loops": 4.0, "backprop_loops": 3, "distribution": "poisson"}
    model = random_model(tiny_config(family, recurrence, dropout=P)).train()
    compiled, backend = compiled_copy(model)
    compiled.train()
    sampler = DepthSampler.from_config(model.cfg.recurrence, seed=5, global_batch_size=6)
    for step in range(4):
        depths = sampler.draw(step)
        batch, loops, _ = make_batch(*rows_of_tokens(step), depths.no_grad_loops, depths.grad_loops)
        assert_equal_training(model, compiled, with_documents(batch) if documents else batch, loops)
    assert backend.graphs == 2
    torch.compiler.reset()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_that_drops_is_attention_with_zeroed_weights(window: int | None, documents: bool) -> None:
    """By a plain loop over heads, in fp64; grouped heads, a window and documents. With p = 0 it is the fused one."""
    cfg = tiny_config("parcae", sliding_window=window)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, LENGTH, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    ids = torch.arange(LENGTH)[None].expand(2, -1) // 6 if documents else None
    noise = dropout_noise(StateKey(1, 0, torch.arange(2)), LENGTH)
    plain = make_context(cfg, LENGTH, q.device, q.dtype, document_ids=ids)
    dropping = make_context(cfg, LENGTH, q.device, q.dtype, document_ids=ids, noise=noise)
    fused = attend(q, k, v, plain, window, Dropout(0.0, "core.0.attention"))
    torch.testing.assert_close(attend(q, k, v, dropping, window, Dropout(0.0, "core.0.attention")), fused)
    dropout = Dropout(P, "core.0.attention")
    found = attend(q, k, v, dropping, window, dropout)
    kept = dropout.weights(torch.ones(2, 4, LENGTH, LENGTH, dtype=torch.float64), noise, 0)
    places = torch.arange(LENGTH)
    allowed = (places[:, None] >= places) & (places[:, None] - places < (window or LENGTH))
    for row in range(2):
        seen = allowed if ids is None else allowed & (ids[row, :, None] == ids[row])
        for head in range(4):
            scores = (q[row, :, head] @ k[row, :, head // 2].T / 8**0.5).masked_fill(~seen, -torch.inf)
            expected = (scores.softmax(-1) * kept[row, head]) @ v[row, :, head // 2]
            torch.testing.assert_close(found[row, :, head], expected, rtol=1e-12, atol=1e-12)


def test_on_cuda_documents_have_masks_where_weights_are_dropped() -> None:
    """The kernel for documents there takes no dropout; shapes alone, since CUDA need not be there."""
    with FakeTensorMode():
        device = torch.device("cuda")
        ids = torch.zeros(2, LENGTH, dtype=torch.int64, device=device)
        noise = torch.zeros(2, LENGTH, dtype=torch.int32, device=device)
        ctx = make_context(tiny_config("blindspot"), LENGTH, device, torch.bfloat16, document_ids=ids, noise=noise)
    assert ctx.boundaries is None and ctx.full_mask is not None
    assert ctx.full_mask.shape == (2, 1, LENGTH, LENGTH)


def test_a_share_of_the_heads_drops_what_it_would_among_all() -> None:
    noise, dropout = dropout_noise(StateKey(1, 0, torch.arange(2)), LENGTH), Dropout(P, "core.0.attention")
    whole = dropout.weights(torch.ones(2, 4, LENGTH, LENGTH), noise, 0)
    shares = [dropout.weights(torch.ones(2, 2, LENGTH, LENGTH), noise, first) for first in (0, 2)]
    assert torch.equal(torch.cat(shares, 1), whole)


def test_the_attention_output_is_not_dropped() -> None:
    """The paper's places alone: the embedding, the weights of attention, and the output of every MLP."""
    places = {name for name, part in model_of("blindspot").named_modules() if isinstance(part, Dropout)}
    layers = ("core.0", "core.1")
    assert places == {"dropout", *(f"{x}.dropout" for x in layers), *(f"{x}.attention.dropout" for x in layers)}
