"""What another process's death looks like from here, told apart from this process's own errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from pretrain.errors import DistributedError, PretrainError


@contextlib.contextmanager
def naming_lost_contact() -> Iterator[None]:
    """Raises DistributedError in place of the error of a collective that another process does not take part in."""
    try:
        yield
    except Exception as error:
        # Of gloo's own errors torch makes RuntimeErrors, which name the file of gloo.
        is_of_gloo = "/gloo/" in str(error) and not isinstance(error, PretrainError)
        if not is_of_gloo and not isinstance(error, dist.DistError):
            raise
        failure = DistributedError(
            "another rank failed, or did not answer within parallel.timeout_sec; its own error tells why. Here: "
            f"{error}"
        )
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error
