"""A private SLURM for the session."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PrivateSlurm, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """Two idle nodes, n0 and n1. A failure where they cannot be had: these tests run when they are asked for."""
    if reason := why_not():
        pytest.fail(reason, pytrace=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit must not leave daemons behind
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = PrivateSlurm(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
