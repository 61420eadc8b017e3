"""The ZeRO engine against plain torch training, in worlds of 1, 2 and 4 processes (one process group each)."""

from __future__ import annotations

from typing import Any

import pytest

from pretrain.config.schema import ZeroConfig
from tests.helpers import free_port, run_ranks

TOLERANCE = 1e-5


def _assert_holds(reports: list[dict[str, Any]], num_cases: int) -> None:
    """Every case on every rank: numbers below the tolerance, booleans true."""
    assert all(len(report) == num_cases for report in reports)
    broken = [
        f"rank {rank}: {case}: {what} = {value}"
        for rank, report in enumerate(reports)
        for case, values in report.items()
        for what, value in values.items()
        if not (value if isinstance(value, bool) else value < TOLERANCE)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_data_parallel(world: int) -> None:
    """Losses, norms, weights, accumulation, bit-exact resume, non-finite steps, at stages 1, 2, 3, AdamW and Muon."""
    _assert_holds(run_ranks(world, "tests.parallel.zero_cases:data_parallel_cases"), num_cases=33)


@pytest.mark.layouts
def test_tensor_parallel() -> None:
    """tensor 2 x data 2: norms count each parameter once, Muon orthogonalises whole matrices, sequence parallelism."""
    target = "tests.parallel.zero_cases:tensor_parallel_cases"
    _assert_holds(run_ranks(4, target, second_port=free_port()), num_cases=11)


def test_stage_0_is_run_as_stage_1_and_clipping_is_never_deepspeeds() -> None:
    from pretrain.parallel.zero import deepspeed_config

    config = deepspeed_config(ZeroConfig(stage=0, bucket_elements=701), 10_000)
    assert config["zero_optimization"]["stage"] == 1
    assert config["zero_optimization"]["allgather_bucket_size"] == 700
    assert config["gradient_clipping"] == 0.0
