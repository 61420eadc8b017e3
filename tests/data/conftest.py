"""The data set that most tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.sets import numbered_rows, write_set


@pytest.fixture(scope="session")
def set_101(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 numbered training rows in shards of 25, 13 validation rows numbered from 500. Not to be changed."""
    return write_set(tmp_path_factory.mktemp("set_101"), numbered_rows(101), numbered_rows(13, 500))
