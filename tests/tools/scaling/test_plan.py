"""Plans: equal FLOPs against torch's counter, both constraints, refusals, and the sweep file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launchers.sweep import read_sweep
from pretrain.accounting import count_parameters
from pretrain.config.load import load_config
from pretrain.config.schema import LossConfig
from pretrain.errors import ConfigError
from pretrain.model import loss
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import Totals
from pretrain.planning import backprop_loops
from pretrain.sampling.distributions import loop_thresholds
from pretrain.sampling.plan import LoopPlan
from pretrain.sampling.sampler import Depths
from tests.test_accounting import _NoModules
from tests.tools.scaling.study import TINY
from tools.scaling.plan import CONSTRAINTS, TOLERANCE, PlannedRun, Study, read_plan, read_plans, write_plan

SMALL = [
    "model.width=64", "model.num_heads=2", "model.ffn_width=128", "model.vocab_size=250", "model.context_length=96",
    "train.global_batch_size=4", "train.micro_batch_size=4",
]  # fmt: skip


@pytest.fixture
def plain_head(monkeypatch: pytest.MonkeyPatch) -> LossConfig:
    """A loss whose head torch's counter sees, once: the z-loss avoids the fused head."""
    monkeypatch.setattr(loss, "checkpoint", lambda function, *args, **_: function(*args))
    return LossConfig(z_loss=1e-4)


def study(**settings: Any) -> Study:
    arguments: dict[str, Any] = {
        "configs": [str(TINY)], "overrides": SMALL, "budgets": [1e11, 2e11], "mean_loops": [1, 2, 4, 8],
        "constraint": "fixed_parameters", "min_steps": 50,
    }  # fmt: skip
    return Study(**arguments | settings)


def counted_row_flops(run: PlannedRun, loss_cfg: LossConfig, no_grad: int, grad: int) -> float:
    """FLOPs that torch counts for one row, with the keys that the causal mask hides left out.

    Under unfused attention its products are batched ones (bmm), all others plain (mm).
    """
    cfg = load_config(run.config, [*SMALL, *run.overrides])
    model = LoopedLM(cfg.model)
    model.checkpointing = "none"
    tokens, places = torch.zeros(1, cfg.model.context_length, dtype=torch.long), torch.arange(1)
    depths = Depths(np.array([no_grad]), np.array([grad]))
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with sdpa_kernel(SDPBackend.MATH), counter:
        loops = Loops.of(LoopPlan.from_depths(depths), depths)
        batch = MicroBatch(tokens, tokens, places)
        model.training_loss(batch, loops, StateKey(0, 0, places), loss_cfg, Totals(1.0, 1.0)).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    attention = sum(flops for op, flops in counts.items() if "bmm" in str(op))
    assert attention > 0
    return counter.get_total_flops() - attention / 2


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_flops_of_every_run_are_the_budget(constraint: Any, plain_head: LossConfig) -> None:
    """Torch counts single rows; a row's FLOPs are linear in its loops, whose law gives the mean over a run."""
    for run in study(constraint=constraint, mean_loops=[1, 4], budgets=[2e11]).runs():
        cfg = load_config(run.config, [*SMALL, *run.overrides])
        recurrence = cfg.model.recurrence
        one = counted_row_flops(run, plain_head, 0, 1)
        per_grad = counted_row_flops(run, plain_head, 0, 2) - one
        per_no_grad = counted_row_flops(run, plain_head, 2, 1) - counted_row_flops(run, plain_head, 1, 1)
        below = loop_thresholds(recurrence.distribution, recurrence.mean_loops, 0.5, None)
        chances = np.diff(np.concatenate([[0.0], below, [1.0]]))
        loops = np.arange(1, len(chances) + 1)
        grad = np.minimum(loops, backprop_loops(cfg))
        row = (chances * (one + (grad - 1) * per_grad + (loops - grad) * per_no_grad)).sum()
        assert row * cfg.train.global_batch_size * run.steps == pytest.approx(run.budget_flops, rel=TOLERANCE), run.name
        assert run.flops == pytest.approx(run.budget_flops, rel=TOLERANCE)


def test_fixed_parameters_and_fixed_layers() -> None:
    parameters = study(budgets=[2e11, 2.001e11]).runs()
    assert {run.core_layers for run in parameters} == {2}
    layers = study(constraint="fixed_layers", budgets=[2e11]).runs()
    assert {(run.mean_loops, run.core_layers) for run in layers} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert len({run.name for run in (*parameters, *layers)}) == 12
    for run in layers:
        model = load_config(run.config, [*SMALL, *run.overrides]).model
        assert model.effective_layers(run.mean_loops) == 10
        assert count_parameters(model).stored > 0 and model.core_layers == run.core_layers


def test_one_loop_is_exactly_one_and_gradients_follow_the_mean() -> None:
    one, _, four, _ = (load_config(run.config, [*SMALL, *run.overrides]) for run in study(budgets=[2e11]).runs())
    assert (one.model.recurrence.distribution, one.validation.num_loops) == ("fixed", [1])
    assert backprop_loops(four) == 2 and 4 in four.validation.num_loops
    full = [*SMALL, "model.recurrence.backprop_loops=16"]
    run = study(budgets=[2e11], overrides=full).runs()[2]
    assert load_config(run.config, [*full, *run.overrides]).model.recurrence.backprop_loops == 16


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"min_steps": 500}, r"fewer than 500 steps: tiny-1e11-mu1 \(\d+\), .*tiny-2e11-mu8"),
        ({"min_steps": 10}, "--min-steps=10: expected at least 50"),
        ({"mean_loops": [2, 2]}, "--mean-loops=.*each value once"),
        ({"budgets": [-1.0]}, "--flops=.*> 0"),
        ({"budgets": [float("inf")]}, "--flops=inf: .*at most six digits"),
        ({"mean_loops": [2.3456789]}, "--mean-loops=2.3456789: .*at most six digits"),
        ({"layers": 6}, "--layers=6: expected no such option"),
        ({"constraint": "fixed_layers", "mean_loops": [3]}, "tiny-layers10-1e11-mu3: --mean-loops=3: .* 1, 2, 4, 8"),
        ({"mean_loops": [0.5]}, "tiny-1e11-mu0.5: .*mean_loops=0.5: expected a number >= 1"),
        ({"overrides": [*SMALL, "schedule.warmup_steps=150"]}, "tiny-1e11-mu1: schedule.warmup_steps=150"),
        (
            {"overrides": [*SMALL, "model.recurrence.curriculum=linear", "model.recurrence.curriculum_steps=9"]},
            "curriculum='linear': expected none",
        ),
        ({"configs": ["a/x.yaml", "b/x.yaml"]}, "different file names"),
        ({"overrides": [*SMALL, "validation.rows=0"]}, "validation.rows=0: .*since `collect` compares"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study(**settings).runs()


def test_the_sweep_file_is_one_for_the_launcher(tmp_path: Path) -> None:
    runs = study(seeds=[0, 1], mean_loops=[1, 4], budgets=[1e11]).runs()
    assert len({run.name for run in runs}) == 4
    [(config, path)] = write_plan(runs, SMALL, tmp_path)
    assert config == str(TINY) and read_plan(tmp_path / "plan.json") == runs
    for run, overrides in zip(runs, read_sweep(path), strict=True):
        cfg = load_config(config, [*SMALL, *overrides])
        assert (cfg.run.name, cfg.total_steps, cfg.train.seed) == (run.name, run.steps, run.seed)
    more = study(mean_loops=[1, 2], budgets=[1e11], seeds=[0, 1]).runs()
    write_plan(more, SMALL, tmp_path / "more")
    plans = [tmp_path / "plan.json", tmp_path / "more" / "plan.json"]
    assert len(read_plans(plans)) == 6
    other = [replace(more[0], steps=1)]
    with pytest.raises(ConfigError, match=r"--out .*more: its plan.json plans other runs"):
        write_plan(other, SMALL, tmp_path / "more")
    write_plan(other, SMALL, tmp_path / "other")
    with pytest.raises(ConfigError, match="tiny-1e11-mu1-s0 is another run"):
        read_plans([*plans, tmp_path / "other" / "plan.json"])
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan.json: expected the plan.json of `plan`"):
        read_plan(tmp_path / "plan.json")
