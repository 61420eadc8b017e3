"""The run's folder: configuration and environment. Written by the main rank."""

from __future__ import annotations

import json
import platform
import shlex
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from pretrain.config.load import save_resolved
from pretrain.config.schema import Config
from pretrain.files import write_text

PACKAGES = (
    "torch", "deepspeed", "megatron-core", "mosaicml-streaming", "omegaconf", "wandb", "submitit", "numpy",
    "transformers", "tokenizers", "safetensors",
)  # fmt: skip


def run_folder(cfg: Config) -> Path:
    """RUN.dir/RUN.name."""
    return Path(cfg.run.dir) / cfg.run.name


def environment() -> dict[str, object]:
    """Versions, git revision, command line and host: kept beside the configuration, not inside it."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command_line": shlex.join(sys.argv),
        "host": socket.gethostname(),
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_run_folder(folder: Path, cfg: Config) -> None:
    """config.yaml (loaded back and compared at once) and environment.json."""
    save_resolved(cfg, folder / "config.yaml")
    write_text(folder / "environment.json", json.dumps(environment(), indent=2) + "\n")
