"""Errors of collectives without a peer are told apart from all others."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pretrain.errors import CheckpointError, DistributedError
from pretrain.parallel.lost_contact import naming_lost_contact

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), dist.DistNetworkError("x"), dist.DistBackendError("x")])
def test_the_error_of_a_collective(error: Exception) -> None:
    error.add_note("after step 7")
    with pytest.raises(DistributedError, match="another rank failed") as caught, naming_lost_contact():
        raise error
    assert caught.value.__cause__ is error and caught.value.__notes__ == ["after step 7"]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), CheckpointError(f"a save failed: {GLOO}"), ValueError(1)])
def test_any_other_error(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_lost_contact():
        raise error
    assert caught.value is error
