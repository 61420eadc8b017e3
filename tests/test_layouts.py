"""Every layout of four processes trains as one process does."""

from __future__ import annotations

from typing import Any

from tests.helpers import run_ranks


def compare_layouts(families: list[str], optimizers: list[str], num_steps: int) -> list[dict[str, Any]]:
    """Runs in each of four processes: the differences of every layout, judged by the tool's own tolerances."""
    from pretrain.parallel import megatron
    from tools.check_layouts import CASES, differences, within

    names = [case.name for case in CASES]
    found = [
        {"case": f"{family} {optimizer} {name}", "good": within("fp32", difference), "difference": repr(difference)}
        for family, optimizer, name, difference in differences(families, names, optimizers, "fp32", num_steps)
    ]
    megatron.shutdown()
    return found


def test_every_layout_trains_as_one_process_does() -> None:
    ranks = run_ranks(
        4, "tests.test_layouts:compare_layouts", timeout_sec=500,
        families=["parcae_flt"], optimizers=["adamw"], num_steps=4,
    )  # fmt: skip
    assert len(ranks[0]) == 12
    for rank in ranks:
        assert [case for case in rank if not case["good"]] == []
