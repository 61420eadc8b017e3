"""Auxiliary losses: each against its equation written out, in any cut into micro-batches; refused where it must be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pretrain.accounting import StepWork, auxiliary_flops, count_parameters, model_flops, parameter_table
from pretrain.config.loss import LossConfig, WeightSchedule
from pretrain.config.model import AuxiliaryConfig
from pretrain.config.schema import Config, DataConfig, ParallelConfig, TrainConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.model.ops import TensorOps
from pretrain.model.subspace import readout_directions
from tests.model.helpers import make_batch, train_loss, train_states
from tests.model.tiny import random_model, tiny_config
from tests.parity import assert_gradients, load_case

AUXILIARY = AuxiliaryConfig(state_predictor=True, loop_heads=2, exit_gate=True)
LENGTH = 8
LOSSES: dict[str, LossConfig] = {
    "state_prediction": LossConfig(state_prediction=0.7, state_prediction_loops=2),
    "contrastive": LossConfig(contrastive=0.5, contrastive_tokens=4, contrastive_temperature=0.3),
    "subspace_penalty": LossConfig(subspace_penalty=0.9, subspace_rank=3),
    "loop_heads": LossConfig(loop_heads=0.6),
    "exit_weighted": LossConfig(objective="exit_weighted", exit_entropy=0.2),
}
ALL = LossConfig(
    objective="exit_weighted", exit_entropy=0.2, state_prediction=0.7, contrastive=0.5, contrastive_tokens=4,
    subspace_penalty=0.9, loop_heads=0.6, norm_penalty=0.1,
)  # fmt: skip


def make_model(family: str = "blindspot", dtype: torch.dtype = torch.float64) -> LoopedLM:
    return random_model(tiny_config(family, auxiliary=AUXILIARY), dtype=dtype)


def make_rows(model: LoopedLM, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(model.cfg.vocab_size, (2, count, LENGTH), generator=generator)
    labels[0, 2] = -100
    return tokens, labels


def of_row(model: LoopedLM, states: list[Tensor], labels: Tensor, valid: int, name: str) -> Tensor:
    """The term of one row from its own states [1, S, d], as the equations say; totals: 1 row, `valid` tokens."""
    cfg, heads = LOSSES[name], model.auxiliary
    h, total = [state[0] for state in states], torch.zeros((), dtype=torch.float64)
    if name == "state_prediction":
        pairs = list(zip(h, h[2:], strict=False))
        for early, late in pairs:
            predicted = early + early @ heads.state_predictor.weight.T
            error = (predicted - late.detach()).square().sum(-1) / late.detach().square().sum(-1)
            total = total + error.mean() / len(pairs)
    elif name == "contrastive":
        for early, late in pairwise(h):
            cosines = F.cosine_similarity(early[::2, None], late[None, ::2], dim=-1) / 0.3
            total = total + F.cross_entropy(cosines, torch.arange(4)) / (len(h) - 1)
    elif name == "subspace_penalty":
        basis = readout_directions(model).bottom(3)
        total = sum((x @ basis).square().sum(-1).mean() / 16 for x in h) / len(h)
    elif name == "loop_heads":
        used = list(zip(heads.loop_heads, h[-2::-1], strict=False))
        for head, state in used:
            logits = head.norm(state) @ head.weight[:29].T
            total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / valid / len(used)
    else:
        survival = torch.ones(LENGTH, dtype=torch.float64)
        for t, state in enumerate(h):
            exits = torch.sigmoid(state @ heads.exit_gate.weight[0] + heads.exit_gate.bias)
            p = survival if t == len(h) - 1 else survival * exits
            survival = survival * (1 - exits)
            logits = model.final_norm(state) @ model.embedding.weight[:29].T
            losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
            total = total + (p * losses).sum() / valid + cfg.exit_entropy * torch.xlogy(p, p).mean()
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_equation_for_rows_of_any_depth(name: str) -> None:
    model, grad = make_model(), [4, 1, 3]
    tokens, labels = make_rows(model, 3)
    batch, loops, order = make_batch(tokens, labels, [2, 0, 0], grad)
    output = train_loss(model, batch, loops, LOSSES[name])
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    valid, expected = int((labels >= 0).sum()), torch.zeros((), dtype=torch.float64)
    states = train_states(model, batch, loops)
    for row, original in enumerate(order.tolist()):
        own = [state[row : row + 1] for state in states if len(state) > row]
        assert len(own) == grad[original]
        term = of_row(model, own, labels[original], valid, name)
        expected = expected + (term if name in ("loop_heads", "exit_weighted") else term / 3)
    if name == "exit_weighted":
        # Entropies are means over rows: of_row counted each as if alone.
        entropy = output.metrics["exit_entropy"]
        expected = expected + 0.2 * (3 * entropy - entropy)
        assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        return
    plain = train_loss(model, batch, loops, LossConfig())
    weight = getattr(LOSSES[name], name)
    assert float(output.metrics[name]) == pytest.approx(float(expected.detach()), rel=1e-6)
    total = plain.loss.detach() + weight * expected.detach()
    assert float(output.loss.detach()) == pytest.approx(float(total), rel=1e-6)
    (weight * expected).backward()  # on top of the plain loss's gradients
    for n, p in model.named_parameters():
        if n in gradients:
            torch.testing.assert_close(gradients[n], p.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("checkpointing", ["none", "loop"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("family", ["blindspot", "parcae"])
def test_all_of_them_together_do_not_depend_on_micro_batches(family: str, per_token: bool, checkpointing: str) -> None:
    model = make_model(family)
    model.checkpointing = checkpointing
    tokens, labels = make_rows(model, 4)
    num_loops = torch.tensor([6, 2, 1, 4])
    if per_token:
        num_loops = num_loops[:, None] + torch.randint(0, 2, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    grad = num_loops.clamp(max=3)
    no_grad = num_loops - grad
    totals = Totals(float((labels >= 0).sum()), 4.0)

    def run(parts: list[list[int]], **options: int) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = 0.0
        for rows in parts:
            batch, loops, order = make_batch(
                tokens[rows], labels[rows], no_grad[rows].numpy(), grad[rows].numpy(), **options
            )
            batch = batch._replace(rows=torch.tensor(rows)[order])
            output = model.training_loss(batch, loops, StateKey(1, 0, batch.rows), ALL, totals)
            output.loss.backward()
            loss += float(output.loss.detach())
        return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    together, gradients = run([[0, 1, 2, 3]])
    assert gradients.keys() == dict(model.named_parameters()).keys(), "every parameter has a gradient"
    variants: list[tuple[list[list[int]], dict[str, int]]] = [([[0, 3], [1, 2]], {})]
    variants += [] if per_token else [([[0, 1, 2, 3]], {"bucket": 4}), ([[0, 3], [1, 2]], {"min_grad_loops": 3})]
    for parts, options in variants:
        loss, own = run(parts, **options)
        assert loss == pytest.approx(together, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-7, atol=1e-9, msg=name)


def test_the_penalty_of_all_directions_is_the_norm_penalty() -> None:
    model = make_model()
    batch, loops, _ = make_batch(*make_rows(model, 2), [1, 0], [3, 2])
    both = train_loss(model, batch, loops, LossConfig(norm_penalty=0.1, subspace_penalty=0.1, subspace_rank=16))
    assert float(both.metrics["subspace_penalty"]) == pytest.approx(float(both.metrics["norm_penalty"]), rel=1e-6)


@pytest.mark.parametrize("loops", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["norm", "raw", "final_only", "norm_interloop"])
def test_exit_weighting_is_the_authors_adaptive_loss(name: str, loops: int) -> None:
    """Theirs divides cross entropies by all positions, ours by those that count."""
    case = load_case("blindspot", name)
    cfg = case.imported.config
    cfg.auxiliary = AuxiliaryConfig(exit_gate=True)
    model = LoopedLM(cfg).eval()
    official = load_file(_weights(case.report))
    gate = {f"auxiliary.exit_gate.{k}": official[f"exit_gate.{k}"] for k in ("weight", "bias")}
    model.load_state_dict(case.imported.tensors | gate)
    case.model = model
    batch, plan, _ = make_batch(case.tokens, case.labels, [0] * len(case.tokens), [loops] * len(case.tokens))
    model.zero_grad()
    loss_cfg = LossConfig(objective="exit_weighted", exit_entropy=0.1)
    totals = Totals(float(case.labels.numel()), float(len(case.labels)))
    output = model.training_loss(batch, plan, StateKey(0, 0, batch.rows), loss_cfg, totals)
    output.loss.backward()
    reference = float(case.io[f"k{loops}_adaptive.loss"])
    assert float(output.loss.detach()) == pytest.approx(reference, abs=1e-5, rel=1e-6)
    run = f"k{loops}_adaptive"
    if run in case.report["grads"]:
        own = {k: v for k, v in case.report["grads"][run].items() if not k.startswith("exit_gate")}
        gates = {k: model.auxiliary.exit_gate.get_parameter(k).grad for k in ("weight", "bias")}
        model.auxiliary.exit_gate.zero_grad()
        assert_gradients(case.gradients(), own, 1e-4)
        for key, gradient in gates.items():
            assert float(gradient.norm()) == pytest.approx(case.report["grads"][run][f"exit_gate.{key}"][0], rel=1e-4)


def _weights(report: dict[str, Any]) -> Any:
    from tests.parity import parity_folder

    return parity_folder("blindspot") / report["weights"]


def test_schedules_change_weights_with_the_step() -> None:
    ramp = WeightSchedule(term="norm_penalty", from_step=10, to_step=20, from_factor=0.0, to_factor=2.0)
    cfg = LossConfig(norm_penalty=0.1, loop_heads=0.3, schedules=[ramp])
    assert [cfg.weights_at(step)["norm_penalty"] for step in (0, 10, 15, 20, 99)] == pytest.approx(
        [0, 0, 0.1, 0.2, 0.2]
    )
    assert cfg.weights_at(0)["loop_heads"] == 0.3 and cfg.weights_at(0).keys() == {"norm_penalty", "loop_heads"}
    model = make_model()
    batch, loops, _ = make_batch(*make_rows(model, 2), [0, 0], [2, 2])
    output = train_loss(model, batch, loops, LossConfig(norm_penalty=0.5, schedules=[ramp]))  # of step 0
    assert output.metrics["norm_penalty"] > 0 and output.loss == output.metrics["cross_entropy"]


def refused(loss: LossConfig, auxiliary: AuxiliaryConfig, world: int = 1, **layout: Any) -> str:
    cfg = Config(
        model=tiny_config("blindspot", auxiliary=auxiliary), loss=loss, data=DataConfig(path="x"),
        train=TrainConfig(max_steps=9, global_batch_size=8, micro_batch_size=2, precision="fp32"),
        parallel=ParallelConfig(**layout),
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        validate(cfg, world)
    return str(caught.value)


def test_what_a_layout_cannot_do_is_refused_by_name() -> None:
    predictor, gate, heads = AuxiliaryConfig(state_predictor=True), AuxiliaryConfig(exit_gate=True), AuxiliaryConfig()
    pipeline: dict[str, Any] = {"world": 2, "pipeline": 2}
    sequence: dict[str, Any] = {"world": 2, "tensor": 2, "sequence_parallel": True}
    exits = LossConfig(objective="exit_weighted")
    for loss, auxiliary, layout, term in (
        (LossConfig(state_prediction=0.1), predictor, pipeline, "loss.state_prediction"),
        (LossConfig(contrastive=0.1), heads, pipeline, "loss.contrastive"),
        (exits, gate, pipeline, "loss.objective=exit_weighted"),
        (LossConfig(contrastive=0.1), heads, sequence, "loss.contrastive"),
        (exits, gate, sequence, "loss.objective=exit_weighted"),
    ):  # fmt: skip
        text = refused(loss, auxiliary, **layout)
        assert term in text and text.startswith("parallel."), text


def test_losses_and_their_parameters_go_together() -> None:
    assert "model.auxiliary.state_predictor=False" in refused(LossConfig(state_prediction=0.1), AuxiliaryConfig())
    assert "model.auxiliary.loop_heads=2: expected 0" in refused(LossConfig(), AuxiliaryConfig(loop_heads=2))
    assert "model.auxiliary.exit_gate=True" in refused(LossConfig(), AuxiliaryConfig(exit_gate=True))
    assert "loss.exit_entropy=0.1" in refused(LossConfig(exit_entropy=0.1), AuxiliaryConfig())
    unused = [WeightSchedule(term="contrastive")]
    assert "loss.contrastive=0.0: expected a weight > 0" in refused(LossConfig(schedules=unused), AuxiliaryConfig())
    wide = LossConfig(subspace_penalty=0.1, subspace_rank=17)
    assert "loss.subspace_rank=17: expected at most 16" in refused(wide, AuxiliaryConfig())
    many = refused(LossConfig(loop_heads=0.1), AuxiliaryConfig(loop_heads=4))
    assert "backprop_loops=4: expected at least 5, since loss.loop_heads" in many
    far = LossConfig(state_prediction=0.1, state_prediction_loops=4)
    assert "backprop_loops=4: expected at least 5" in refused(far, AuxiliaryConfig(state_predictor=True))


def test_the_table_of_parameters_knows_the_heads() -> None:
    model = make_model("parcae")
    table = parameter_table(model.cfg)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {n: p.shape for n, p in table.items()}
    ops = TensorOps()
    ops.size = 2
    with torch.device("meta"):
        sharded = LoopedLM(model.cfg, ops)
    assert all(p.tensor_partition_dim == table[n].partition_dim for n, p in sharded.named_parameters())
    assert count_parameters(model.cfg).parts["auxiliary"] == 16 * 16 + 17 + 2 * (64 * 16 + 16)


def test_flops_of_the_terms_by_hand() -> None:
    cfg = Config(model=tiny_config("blindspot", auxiliary=AUXILIARY), loss=ALL)
    per_token = 3 * 2 * 16**2  # state prediction: pairs of successive loops
    per_token += 3 * 2 * 4 * 4 * 16 // 16  # contrastive: 4 x 4 cosines of 16 channels over 16 tokens
    per_token += 4 * 2 * 16 * 8 + 2 * 2 * 29 * 16 + 4 * 2 * 16  # subspace, two heads, gate
    assert auxiliary_flops(cfg, [4]) == per_token
    plain, more = StepWork.of([0], [4], "per_loop"), StepWork.of([0], [4], "exit_weighted", per_token)
    assert model_flops(cfg.model, more) - model_flops(cfg.model, plain) == 3 * per_token * 16
