"""Layouts train with loop counts of tokens as one process does. A pipeline refuses them (tests/config)."""

from __future__ import annotations

import pytest

from tests.helpers import run_ranks


@pytest.mark.layouts
def test_loop_counts_of_tokens_train_alike_in_all_layouts() -> None:
    for found in run_ranks(4, "tests.token_cases:run", timeout_sec=300):
        assert len(found) == 2 * 4
        assert {case: x for case, x in found.items() if not x <= 1e-5} == {}
