"""Compaction is exact: rows that join late end with the state, loss and gradients of each row alone.

Bit for bit in fp64. A matrix product may round differently for another number of rows: MKL's dgemm does so for the
last rows where their number is no multiple of 4. Sequences of 8 tokens keep it one, so that every difference left
would be the model's.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.config.schema import LossConfig
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM, LoopInputs
from tests.model.helpers import make_batch, state_logits, train_loss, train_states
from tests.model.tiny import random_model, tiny_config

SEQUENCE = 8
MODELS = {
    "parcae": tiny_config("parcae"),
    "zoh_wide_core": tiny_config("parcae", {"discretization": "zoh"}, core_width=24),
    "flt": tiny_config("flt"),
    "lt": tiny_config("lt"),
    "lt_input": tiny_config("lt_input"),
    "lt_attention": tiny_config("lt_attention"),
    "flt_res": tiny_config("flt_res"),
    "rdm": tiny_config("rdm"),
    "parcae_flt": tiny_config("parcae_flt"),
    "blindspot": tiny_config("blindspot", {"interloop_norm": True, "readout": "final_norm"}),
}


class Draw(NamedTuple):
    """A micro-batch of a random model: n and k of each row."""

    model: str
    no_grad: list[int]
    grad: list[int]
    documents: bool


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    model = draw(st.sampled_from(sorted(MODELS)))
    backprop_loops = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["any", "any", "any", "short", "equal", "one"]))
    count = 1 if kind == "one" else draw(st.integers(2, 6))
    if kind == "equal":
        num_loops = [draw(st.integers(1, 7))] * count
    else:
        num_loops = draw(
            st.lists(st.integers(1, backprop_loops if kind == "short" else 7), min_size=count, max_size=count)
        )
    grad = [min(t, backprop_loops) for t in num_loops]
    return Draw(model, [t - k for t, k in zip(num_loops, grad, strict=True)], grad, draw(st.booleans()))


@cache
def _model(name: str, dtype: torch.dtype) -> LoopedLM:
    return random_model(MODELS[name], dtype=dtype)


def _batch(draw: Draw) -> tuple[MicroBatch, Loops, list[int], list[int]]:
    """The micro-batch, and n and k of its rows in its order."""
    rows = len(draw.grad)
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = (torch.randint(29, (rows, SEQUENCE), generator=generator) for _ in range(2))
    labels[:, 3] = -100
    batch, loops, order = make_batch(tokens, labels, draw.no_grad, draw.grad)
    if draw.documents:
        documents = torch.randint(2, (rows, SEQUENCE), generator=generator).cumsum(1)
        batch = batch._replace(document_ids=documents)
    return batch, loops, [draw.no_grad[i] for i in order], [draw.grad[i] for i in order]


class Reference:
    """The loop with a mask: all rows run to the deepest count and keep their state once they have had theirs."""

    def __init__(self, model: LoopedLM, batch: MicroBatch) -> None:
        self.model, self.batch = model, batch
        self.ctx = model.context_of(batch, None)
        e, self.h_0 = model.start(batch, self.ctx, StateKey(1, 0, batch.rows))
        self.inputs = LoopInputs(model.injection.input(e), self.ctx, model.look_up_values("core", batch.tokens))

    def step(self, h: Tensor, active: Tensor, first: Tensor) -> Tensor:
        """One loop; `active` and `first` [B or 1, 1 or S]."""
        first = first[..., None] if self.model.needs_first else None
        return torch.where(active[..., None], self.model.core_step(h, self.inputs, first), h)

    def states(self, no_grad: list[int], grad: list[int]) -> list[Tensor]:
        """States after the gradient loops; row i's own are the first grad[i]."""
        n, k = torch.tensor(no_grad)[:, None], torch.tensor(grad)[:, None]
        h = self.h_0
        with torch.no_grad():
            for t in range(max(no_grad)):
                h = self.step(h, n > t, torch.full_like(n, t, dtype=torch.int64) == 0)
        h = torch.where(n[..., None] > 0, h.detach(), self.h_0)
        states = []
        for t in range(max(grad)):
            h = self.step(h, k > t, (n == 0) & (t == 0))
            states.append(h)
        return states

    def loss(self, states: list[Tensor], grad: list[int], objective: str) -> Tensor:
        """The mean over tokens of each row's mean over its readouts."""
        labels, own = self.batch.labels, torch.tensor(grad)[:, None]
        total = torch.zeros((), dtype=states[0].dtype)
        for t, state in enumerate(states):
            last = own == t + 1
            # final_norm reads a row's last loop and its earlier ones in two ways.
            losses = torch.where(last, self._losses(state, True), self._losses(state, False))
            weights = last if objective == "terminal" else (t < own) / own
            total = total + (losses * weights).sum()
        return total / (labels >= 0).sum()

    def _losses(self, state: Tensor, last: bool) -> Tensor:
        """[B, S]"""
        values = self.model.look_up_values("coda", self.batch.tokens)
        y = self.model.decode(state, self.ctx, values, last=last)
        logits = y @ self.model.vocabulary_head.weight[: self.model.cfg.vocab_size].T
        cap = self.model.cfg.logit_softcap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), self.batch.labels, reduction="none")


def _gradients(model: LoopedLM) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_close(own: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float) -> None:
    assert own.keys() == reference.keys()
    for name, expected in reference.items():
        difference = float((own[name] - expected).norm())
        assert difference <= tolerance * max(1.0, float(expected.norm())), (name, difference)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(draws())
def test_states_are_those_of_the_masked_loop_and_of_each_row_alone(draw: Draw) -> None:
    for dtype in (torch.float64, torch.float32):
        model = _model(draw.model, dtype)
        batch, loops, no_grad, grad = _batch(draw)
        with torch.no_grad():
            own = train_states(model, batch, loops)[-1]
            masked = Reference(model, batch).states(no_grad, grad)[-1]
            alone = []
            for row in range(len(grad)):
                one = MicroBatch(*(None if x is None else x[row : row + 1] for x in batch))
                alone.append(Reference(model, one).states(no_grad[row : row + 1], grad[row : row + 1])[-1])
            logits = [state_logits(model, batch.tokens, h) for h in (own, masked)]
        if dtype == torch.float64:
            assert torch.equal(own, masked)
            assert torch.equal(own, torch.cat(alone))
            assert torch.equal(*logits)
        else:
            for a, b in ((own, masked), (own, torch.cat(alone)), logits):
                torch.testing.assert_close(a, b, atol=1e-6 * max(1.0, float(b.abs().max())), rtol=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(draws(), st.sampled_from(["terminal", "per_loop"]))
def test_loss_and_gradients_are_those_of_the_masked_loop(draw: Draw, objective: str) -> None:
    model = _model(draw.model, torch.float64)
    batch, loops, no_grad, grad = _batch(draw)
    loss = train_loss(model, batch, loops, LossConfig(objective=objective)).loss
    own = _gradients(model)
    reference = Reference(model, batch)
    expected = reference.loss(reference.states(no_grad, grad), grad, objective)
    model.zero_grad(set_to_none=True)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6, rel=1e-6)
    _assert_close(own, _gradients(model), 1e-6)


def _loops_with(draw: Draw, **options: int) -> tuple[MicroBatch, Loops]:
    """The micro-batch of `draw` with another plan; options of LoopPlan.from_depths."""
    batch, _, no_grad, grad = _batch(draw)
    _, loops, _ = make_batch(batch.tokens, batch.labels, no_grad, grad, **options)
    return batch, loops


@pytest.mark.parametrize("model_name", sorted(MODELS))
@pytest.mark.parametrize("objective", ["terminal", "per_loop"])
@pytest.mark.parametrize(
    "options", [{"bucket": 4}, {"min_no_grad_loops": 5, "min_grad_loops": 4}], ids=["buckets", "lockstep"]
)
def test_rows_computed_without_need_change_nothing(model_name: str, objective: str, options: dict[str, int]) -> None:
    no_grad, grad = ([0, 3, 1, 0, 0], [2, 2, 2, 1, 2]) if "bucket" in options else ([0, 0, 0], [2, 1, 3])
    model = _model(model_name, torch.float64)
    cfg = LossConfig(objective=objective, norm_penalty=0.1, z_loss=0.1)
    draw = Draw(model_name, no_grad, grad, documents=False)
    plain, plan = _batch(draw)[:2], _loops_with(draw, **options)
    assert sum(step.computed for step in plan[1].no_grad + plan[1].grad) > sum(no_grad) + sum(grad)
    expected = train_loss(model, *plain, cfg).loss
    reference = _gradients(model)
    loss = train_loss(model, *plan, cfg).loss
    assert torch.equal(train_states(model, *plan)[-1], train_states(model, *plain)[-1])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    _assert_close(_gradients(model), reference, 1e-12)


def test_every_parameter_has_a_gradient_in_an_idle_micro_batch() -> None:
    for name in MODELS:
        model = _model(name, torch.float64)
        draw = Draw(name, [0], [1], documents=False)
        train_loss(model, *_loops_with(draw, min_no_grad_loops=2, min_grad_loops=2))
        missing = [n for n, p in model.named_parameters() if p.grad is None]
        assert not missing, (name, missing)
        train_loss(model, *_batch(Draw(name, [3], [1], documents=False))[:2])
        missing = [n for n, p in model.named_parameters() if p.grad is None]
        assert not missing, (name, missing)


@pytest.mark.parametrize("policy", ["loop", "layer", "every_k_loops"])
@pytest.mark.parametrize("model_name", ["parcae_flt", "rdm"])
def test_checkpointing_policies_give_the_same_gradients(policy: str, model_name: str) -> None:
    model = random_model(MODELS[model_name], dtype=torch.float64)
    draw = Draw(model_name, [3, 0, 1], [3, 2, 3], documents=True)
    batch, loops, _, _ = _batch(draw)
    for objective in ("terminal", "per_loop"):
        cfg = LossConfig(objective=objective, norm_penalty=0.1)
        model.checkpointing = "none"
        expected = train_loss(model, batch, loops, cfg).loss
        reference = _gradients(model)
        model.checkpointing, model.loops_per_checkpoint = policy, 2
        assert torch.equal(train_loss(model, batch, loops, cfg).loss, expected)
        _assert_close(_gradients(model), reference, 1e-12)
