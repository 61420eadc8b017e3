"""Loop counts of tokens: the training forward is the plain loop, in which a token that has had its updates stays.

Parcae's code (arXiv 2604.12946) runs n loops without gradient and k with one, and in either phase updates a token while
the loop's number is below its own count. Written out here for each row by itself, in fp64, with every loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.accounting import readouts_per_row
from pretrain.config.loss import LossConfig
from pretrain.config.model import AuxiliaryConfig, ModelConfig
from pretrain.model.batch import MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM, LoopInputs
from pretrain.model.loss import Totals
from pretrain.model.objective import Objective
from pretrain.model.subspace import readout_directions
from tests.model.helpers import make_batch, train_loss, train_states
from tests.model.tiny import FAMILIES, random_model, tiny_config

LENGTH = 8
"""A multiple of 4, so that matrix products of one row and of several round alike (test_compaction.py)."""
OBJECTIVES = ("terminal", "per_loop", "last_third", "exit_weighted")
TERMS: dict[str, Any] = {
    "norm_penalty": 0.1, "scale_anchor": 0.2, "z_loss": 0.05, "state_prediction": 0.7, "state_prediction_loops": 2,
    "contrastive": 0.5, "contrastive_tokens": 4, "contrastive_temperature": 0.3, "subspace_penalty": 0.9,
    "subspace_rank": 3, "loop_heads": 0.6,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{family: (family, {}, {}) for family in FAMILIES if family != "gpt"},
    "final_norm": ("blindspot", {"interloop_norm": True, "readout": "final_norm"}, {}),
    "zoh_wide_core": ("parcae", {"discretization": "zoh"}, {"core_width": 24}),
    "state_is_input": ("parcae", {"state_init": "input"}, {}),
}


@pytest.fixture(autouse=True)
def weights_in_fp64() -> Iterator[None]:
    """Weights of loops, quotients of integers, in fp64 too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_of(name: str) -> LoopedLM:
    family, recurrence, options = VARIANTS[name]
    auxiliary = AuxiliaryConfig(state_predictor=True, loop_heads=2, exit_gate=True)
    cfg: ModelConfig = tiny_config(family, recurrence, auxiliary=auxiliary, **options)
    return random_model(cfg, dtype=torch.float64)


def loss_config(objective: str) -> LossConfig:
    """All terms at once."""
    return LossConfig(objective=objective, exit_entropy=0.2 if objective == "exit_weighted" else 0.0, **TERMS)


class Case:
    """A micro-batch whose tokens have counts of their own, in the order of its plan."""

    def __init__(self, seed: int, backprop_loops: int, rows: int = 3, documents: bool = False, **options: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(1, 9, (rows, LENGTH), generator=generator)
        counts[0] = counts[0].clamp(max=3)  # a row that is much shallower than the others
        k = counts.clamp(max=backprop_loops)
        tokens, labels = (torch.randint(29, (rows, LENGTH), generator=generator) for _ in range(2))
        labels[:, 3] = -100
        self.batch, self.loops, order = make_batch(tokens, labels, (counts - k).numpy(), k.numpy(), **options)
        if documents:
            ids = torch.randint(2, (rows, LENGTH), generator=generator).cumsum(1)
            self.batch = self.batch._replace(document_ids=ids)
        self.no_grad, self.grad = (counts - k)[order], k[order]


class PlainRow:
    """One row by itself: `states` after each of its gradient loops, [1, S, d_h]."""

    def __init__(self, model: LoopedLM, case: Case, row: int) -> None:
        self.model, self.batch = model, MicroBatch(*(None if x is None else x[row : row + 1] for x in case.batch))
        self.k = case.grad[row].tolist()
        self.ctx = model.context_of(self.batch, StateKey(1, 0, self.batch.rows))
        e, h_0 = model.start(self.batch, self.ctx, StateKey(1, 0, self.batch.rows))
        inputs = LoopInputs(model.injection.input(e), self.ctx, model.look_up_values("core", self.batch.tokens))
        updates = torch.zeros(1, LENGTH, dtype=torch.int64)

        def loop(h: Tensor, active: Tensor) -> Tensor:
            nonlocal updates
            updated = model.core_step(h, inputs, (updates == 0)[..., None])
            updates = updates + active
            return torch.where(active[..., None], updated, h)

        n, k = case.no_grad[row][None], case.grad[row][None]
        h = h_0
        with torch.no_grad():
            for step in range(int(n.max())):
                h = loop(h, step < n)
        h = torch.where(n[..., None] > 0, h.detach(), h_0)
        self.states = []
        for step in range(int(k.max())):
            h = loop(h, step < k)
            self.states.append(h)
        assert torch.equal(updates, n + k)

    def own(self, token: int) -> list[Tensor]:
        """States [d_h] after the token's own gradient loops."""
        return [self.states[j][0, token] for j in range(self.k[token])]

    def readouts(self) -> list[Tensor]:
        """Logits [S, V] of the readout after each of the row's gradient loops."""
        values = self.model.look_up_values("coda", self.batch.tokens)
        last = len(self.states) - 1
        decoded = [self.model.decode(h, self.ctx, values, last=i == last)[0] for i, h in enumerate(self.states)]
        logits = [y @ self.model.vocabulary_head.weight[:29].T for y in decoded]
        cap = self.model.cfg.logit_softcap
        return logits if cap is None else [cap * torch.tanh(x / cap) for x in logits]

    def cross_entropy(self, objective: str) -> tuple[Tensor, Tensor, Tensor]:
        """(cross entropy, squared logsumexp, entropy of exits), summed over the row's tokens as `objective` weighs."""
        logits = self.readouts()
        ce = z = entropy = torch.zeros((), dtype=torch.float64)
        for i, k in enumerate(self.k):
            places = [*range(k - 1), len(logits) - 1]  # the last readout is at the end
            first = {"terminal": k - 1, "last_third": 2 * k // 3}.get(objective, 0)
            weights: list[Any] = [float(j >= first) / (k - first) for j in range(k)]
            if objective == "exit_weighted":
                gate = self.model.auxiliary.exit_gate
                exits = [torch.sigmoid(h @ gate.weight[0] + gate.bias) for h in self.own(i)]
                left = torch.ones(1, dtype=torch.float64)
                for j in range(k):
                    weights[j] = (left if j == k - 1 else left * exits[j]).squeeze()
                    left = left * (1 - exits[j])
                entropy = entropy - sum(p * p.clamp(min=1e-8).log() for p in weights)
            if self.batch.labels[0, i] >= 0:
                for weight, place in zip(weights, places, strict=True):
                    ce = ce + weight * F.cross_entropy(logits[place][i], self.batch.labels[0, i])
                    z = z + weight * logits[place][i].logsumexp(-1).square()
        return ce, z, entropy

    def terms(self) -> dict[str, Tensor]:
        """The losses of the state, summed over tokens; loop_heads over labelled ones."""
        heads, cfg, zero = self.model.auxiliary, LossConfig(**TERMS), torch.zeros((), dtype=torch.float64)
        names = ("norm_penalty", "scale_anchor", "state_prediction", "contrastive", "subspace_penalty", "loop_heads")
        sums = dict.fromkeys(names, zero)
        basis = readout_directions(self.model).bottom(3)
        for i, k in enumerate(self.k):
            h = self.own(i)
            for state in h:
                sums["norm_penalty"] = sums["norm_penalty"] + state.square().mean() / k
                rms = (state.square().mean() + 1e-12).sqrt()
                sums["scale_anchor"] = sums["scale_anchor"] + (rms - cfg.scale_target).square() / k
                inside = (state @ basis).square().sum() / len(state)
                sums["subspace_penalty"] = sums["subspace_penalty"] + inside / k
            for early, late in zip(h, h[2:], strict=False):
                error = (early + early @ heads.state_predictor.weight.T - late.detach()).square().sum()
                error = error / late.detach().square().sum() / (k - 2)
                sums["state_prediction"] = sums["state_prediction"] + error
            if i % 2 == 0:  # four evenly spaced positions
                for j, (early, _) in enumerate(pairwise(h)):
                    cosines = F.cosine_similarity(early[None], self.states[j + 1][0, ::2], dim=-1) / 0.3
                    loss = F.cross_entropy(cosines, torch.tensor(i // 2)) / (k - 1)
                    sums["contrastive"] = sums["contrastive"] + loss * LENGTH / 4
            if self.batch.labels[0, i] >= 0:
                for head, state in zip(heads.loop_heads, h[-2::-1], strict=False):
                    logits = head.norm(state) @ head.weight[:29].T
                    cap = self.model.cfg.logit_softcap
                    logits = logits if cap is None else cap * torch.tanh(logits / cap)
                    loss = F.cross_entropy(logits, self.batch.labels[0, i]) / min(2, k - 1)
                    sums["loop_heads"] = sums["loop_heads"] + loss
        return sums


def plain_loss(model: LoopedLM, case: Case, cfg: LossConfig) -> Tensor:
    """The loss with this micro-batch as the global batch."""
    labels, total = case.batch.labels, torch.zeros((), dtype=torch.float64)
    valid, tokens = int((labels >= 0).sum()), labels.numel()
    for row in range(len(labels)):
        plain = PlainRow(model, case, row)
        ce, z, entropy = plain.cross_entropy(cfg.objective)
        total = total + ce / valid + cfg.z_loss * z / valid - cfg.exit_entropy * entropy / tokens
        for name, value in plain.terms().items():
            total = total + getattr(cfg, name) * value / (valid if name == "loop_heads" else tokens)
    return total


def gradients(model: LoopedLM) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(own: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, gradient in expected.items():
        difference = float((own[name] - gradient).norm())
        assert difference <= tolerance * max(1.0, float(gradient.norm())), (name, difference)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(VARIANTS)), st.integers(1, 4), st.integers(0, 2**20), st.booleans())
def test_states_are_those_of_the_plain_loop(name: str, backprop_loops: int, seed: int, documents: bool) -> None:
    model, case = model_of(name), Case(seed, backprop_loops, documents=documents)
    rows = [PlainRow(model, case, row).states for row in range(3)]
    states = train_states(model, case.batch, case.loops)
    assert len(states) == max(map(len, rows))
    for row, plain in enumerate(rows):  # rows end together
        own = [state[row : row + 1] for state in states if len(state) > row]
        assert len(own) == len(plain) and all(map(torch.equal, own, plain))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_loss_and_gradients_are_those_of_the_plain_loop(name: str) -> None:
    model = model_of(name)
    policies = ("loop", "layer", "every_k_loops")
    for number, objective in enumerate(OBJECTIVES):
        case, cfg = Case(number, backprop_loops=(5, 3)[number % 2], documents=number == 1), loss_config(objective)
        model.zero_grad(set_to_none=True)
        expected = plain_loss(model, case, cfg)
        expected.backward()
        reference = gradients(model)
        for policy in ("none", policies[(number + sorted(VARIANTS).index(name)) % 3]):
            model.checkpointing, model.loops_per_checkpoint = policy, 2
            loss = train_loss(model, case.batch, case.loops, cfg).loss
            assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-9), (objective, policy)
            assert_same(gradients(model), reference, 1e-8)
        model.checkpointing = "none"


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "name", ["parcae", "flt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lt", "parcae_flt"))]
)
def test_rows_computed_without_need_change_nothing(name: str, objective: str) -> None:
    """Buckets, and the lockstep of ZeRO-3, where this rank has fewer loops than others."""
    model = model_of(name)
    cfg = loss_config(objective)
    # Without gradient a rank may have too few loops where all its tokens have mu_b with one; with it where none has n.
    cases: list[tuple[int, dict[str, int]]] = [
        (3, {"bucket": 3}), (3, {"min_no_grad_loops": 9}), (8, {"min_no_grad_loops": 2, "min_grad_loops": 11}),
    ]  # fmt: skip
    for backprop_loops, options in cases:
        plain, padded = Case(5, backprop_loops), Case(5, backprop_loops, **options)
        expected = train_loss(model, plain.batch, plain.loops, cfg).loss
        reference = gradients(model)
        loss = train_loss(model, padded.batch, padded.loops, cfg).loss
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
        assert_same(gradients(model), reference, 1e-10)


@pytest.mark.parametrize("name", ["parcae", "flt", "lt", "rdm"])
def test_equal_counts_of_tokens_are_counts_of_rows(name: str) -> None:
    model, cfg = model_of(name), LossConfig(objective="last_third", **TERMS)
    n, k = torch.tensor([3, 0, 1]), torch.tensor([4, 2, 4])
    tokens, labels = (torch.randint(29, (3, LENGTH), generator=torch.Generator().manual_seed(i)) for i in range(2))
    rows = make_batch(tokens, labels, n.numpy(), k.numpy())
    each = make_batch(tokens, labels, *(x[:, None].repeat(1, LENGTH).numpy() for x in (n, k)))
    expected = train_loss(model, rows[0], rows[1], cfg).loss
    reference = gradients(model)
    loss = train_loss(model, each[0], each[1], cfg).loss
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert_same(gradients(model), reference, 1e-10)


def test_a_token_that_is_done_is_seen_with_its_last_state() -> None:
    """Changing what the first token starts from changes what later ones see of it, although it has one update only."""
    model = model_of("parcae")
    counts = torch.tensor([[1, *[4] * (LENGTH - 1)]])
    tokens = torch.arange(LENGTH)[None]
    e_shape = (1, LENGTH, model.cfg.width)
    start = torch.randn(e_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch, loops, _ = make_batch(tokens, tokens, (counts * 0).numpy(), counts.numpy(), start)
    first, *later = train_states(model, batch, loops)
    assert all(torch.equal(h[:, 0], first[:, 0]) for h in later)
    inputs = LoopInputs(
        model.injection.input(model.start(batch, model.context_of(batch, None), None)[0]),
        model.context_of(batch, None), model.look_up_values("core", tokens),
    )  # fmt: skip
    assert torch.equal(later[0][:, 1:], model.core_step(first, inputs, None)[:, 1:])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_readouts_begin_where_a_loop_may_have_a_weight(objective: str) -> None:
    """And are as many as the accounting says."""
    model, cfg = model_of("blindspot"), loss_config(objective)
    for per_token, most in product((False, True), range(1, 10)):
        counts = torch.full((1, LENGTH), most)
        if per_token:
            counts[0, :-1] = torch.randint(1, most + 1, (LENGTH - 1,), generator=torch.Generator().manual_seed(most))
        own = counts if per_token else counts[:, 0]
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
        batch, loops, _ = make_batch(tokens, tokens, (own * 0).numpy(), own.numpy())
        totals = Totals(float(LENGTH), 1.0)
        found = Objective(model, batch, loops, cfg, totals, model.context_of(batch, None), [], 0)
        weights = found.readout_weights
        assert most - found.first_readout == readouts_per_row(most, objective, per_token)
        if objective != "exit_weighted":  # whose weights are those of the gate
            assert torch.allclose(weights.sum(0), torch.ones(())) and not weights[: found.first_readout].any()


def test_the_local_share_of_the_sequence_has_the_row_s_own_loops() -> None:
    """Under sequence parallelism a rank holds a part of the tokens; the row joins with its deepest one elsewhere."""
    case = Case(2, 3)
    assert case.loops.tokens is not None
    parts = [case.loops.local(slice(0, 4)), case.loops.local(slice(4, 8))]
    for grad, steps in ((False, case.loops.no_grad), (True, case.loops.grad)):
        for loop, step in enumerate(steps):
            for name in ("waiting", "updates_before"):
                whole = getattr(case.loops.tokens, name)(loop, grad, step.computed)
                halves = [getattr(part.tokens, name)(loop, grad, step.computed) for part in parts]
                assert torch.equal(torch.cat(halves, 1), whole)
