"""What a run says: to stderr on every rank, to log.txt on the main one. Standard library only.

The project's own loggers speak from INFO on (the main rank) or from WARNING on (the others), libraries from WARNING on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What libraries warn about at import that is no news to a user: the start-up summary names the device, and nothing of
# Transformer Engine or Apex is used.
_NO_NEWS = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "DeepSpeed": "Setting accelerator to CPU",
}
_NO_NEWS_WARNING = "Transformer Engine and Apex are not installed"


def error_prefix() -> str:
    """What every error begins with: the rank, and the host that it runs on."""
    return f"error on rank {os.environ.get('RANK', '0')} ({socket.gethostname()})"


class _RankFormatter(logging.Formatter):
    """Main rank: the bare message. Other ranks, and every error: rank and host first."""

    def format(self, record: logging.LogRecord) -> str:
        rank, text = os.environ.get("RANK", "0"), super().format(record)
        if record.levelno >= logging.ERROR:
            return f"{error_prefix()}: {text}"
        return text if rank == "0" else f"[rank {rank} {socket.gethostname()}] {text}"


def _is_news(record: logging.LogRecord) -> bool:
    return _NO_NEWS[record.name] not in record.getMessage()


class _Console(io.FileIO):
    """A stream that drops what it cannot write: its terminal or pipe is closed, or the disk of its file is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def keep_console() -> None:
    """Makes stdout and stderr last as long as the process: without it, the next line after `| head -1` ends a run.

    Descriptors that were closed at the start lead nowhere from here on, so that no file of the run takes their numbers.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError, AttributeError):  # None where it was closed
            getattr(sys, name).flush()
        stream = io.BufferedWriter(_Console(descriptor, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(stream, "utf-8", errors="backslashreplace", line_buffering=True))


def set_up_console() -> None:
    """Sends messages and Python's warnings to stderr; one write each, so that those of several ranks do not mix."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    is_main = os.environ.get("RANK", "0") == "0"
    logging.getLogger("pretrain").setLevel(logging.INFO if is_main else logging.WARNING)
    for name in _NO_NEWS:
        logging.getLogger(name).addFilter(_is_news)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message=_NO_NEWS_WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)  # addressed to the authors of libraries


def add_log_file(path: Path) -> None:
    """Also appends what the console shows to `path`, with times. Main rank only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)


@contextlib.contextmanager
def without_wandb() -> Iterator[None]:
    """Hides wandb from imports: megatron-core takes it wherever it is installed, which costs every rank a second."""
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        if hidden:
            del sys.modules["wandb"]
