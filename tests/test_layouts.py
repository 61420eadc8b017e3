"""Every layout of four processes trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import run_ranks

ONE_OF_A_KIND = ["dp4 ZeRO-3", "tp2xdp2 sequence parallel", "pp2xdp2", "tp2xpp2 sequence parallel"]


def compare_layouts(
    families: list[str], layouts: list[str] | None, optimizers: list[str], num_steps: int
) -> list[dict[str, Any]]:
    """Runs in each of four processes: the differences of every layout, judged by the tool's own tolerances."""
    from pretrain.parallel import megatron
    from tools.check_layouts import CASES, differences, within

    names = layouts or [case.name for case in CASES]
    found = [
        {"case": f"{family} {optimizer} {name}", "good": within("fp32", difference), "difference": repr(difference)}
        for family, optimizer, name, difference in differences(families, names, optimizers, "fp32", num_steps)
    ]
    megatron.shutdown()
    return found


def _compare(layouts: list[str] | None, num_cases: int) -> None:
    ranks = run_ranks(
        4, "tests.test_layouts:compare_layouts", timeout_sec=900,
        families=["parcae_flt"], layouts=layouts, optimizers=["adamw"], num_steps=3,
    )  # fmt: skip
    for rank in ranks:
        assert len(rank) == num_cases
        assert [case for case in rank if not case["good"]] == []


def test_one_layout_of_a_kind_trains_as_one_process_does() -> None:
    _compare(ONE_OF_A_KIND, 4)


@pytest.mark.slow
def test_every_layout_trains_as_one_process_does() -> None:
    _compare(None, 12)
