"""Every test here has a temporary directory, and so a node folder, of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.data.sets import numbered_rows, write_set


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of this test and of the processes it starts."""
    folder = tmp_path / "tmpdir"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def set_101(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 numbered training rows in shards of 25, 13 validation rows numbered from 500. Not to be changed."""
    return write_set(tmp_path_factory.mktemp("set_101"), numbered_rows(101), numbered_rows(13, 500))
