"""What a run says: to stderr on every rank, to log.txt on the main one. Standard library only.

The project's own loggers speak from INFO on (the main rank) or from WARNING on (the others), libraries from WARNING on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

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
