"""Rows to Weights & Biases; whatever goes wrong there, training goes on."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from pretrain.config.schema import LoggingConfig
from pretrain.files import write_text

log = logging.getLogger(__name__)

START_SEC = 10.0
"""How long wandb may hold up the start of a run, as where there is no route to its server."""
END_SEC = 60.0
"""How long it may hold up the end. What was not uploaded stays on disk, for `wandb sync`."""


class WandbLogger:
    """An observer that writes to a wandb run, offline unless told otherwise. Made on the main rank only.

    A resumed run goes on in the same wandb run. Rows have their own step axis ("step"), so that those after the
    checkpoint may be written again. The first failure is logged once, and later rows go to metrics.jsonl alone.
    """

    def __init__(self, cfg: LoggingConfig, run_name: str, folder: Path, config: dict[str, Any]) -> None:
        self._run: Any = None
        mode: Any = cfg.wandb or os.environ.get("WANDB_MODE", "offline")
        if mode == "disabled":
            return
        try:
            import wandb

            os.environ.setdefault("WANDB_SILENT", "true")
            self._run = wandb.init(
                project=cfg.wandb_project, name=run_name, dir=str(folder), mode=mode, config=config,
                id=_run_id(folder), resume="allow",
                settings=wandb.Settings(init_timeout=START_SEC, finish_timeout=END_SEC, console="off"),
            )  # fmt: skip
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # any failure of an optional service
            self._give_up(error)

    def write(self, row: dict[str, Any]) -> None:
        """Logs one row; nested values become `val_loss/4`."""
        if self._run is None:
            return
        flat: dict[str, Any] = {}
        for name, value in row.items():
            flat |= {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        try:
            self._run.log({name: value for name, value in flat.items() if value is not None})
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Ends the wandb run."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        kind = type(error).__name__
        log.warning("wandb is off for the rest of this run (%s: %s); metrics.jsonl has every row", kind, error)
        self._run = None


def _run_id(folder: Path) -> str:
    """The id of the wandb run that belongs to this folder, made at the first start."""
    path = folder / "run_id"
    if not path.is_file():
        write_text(path, secrets.token_hex(8))
    return path.read_text(encoding="utf-8")
