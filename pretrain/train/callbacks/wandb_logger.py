"""Rows to Weights & Biases; whatever goes wrong there, training goes on."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from pretrain.config.schema import LoggingConfig

log = logging.getLogger(__name__)


class WandbLogger:
    """An observer that writes to a wandb run, offline unless told otherwise. Made on the main rank only.

    The run has its own step axis ("step"), so that rows may be written again after a resume. The first failure is
    logged once, and later rows go to metrics.jsonl alone.
    """

    def __init__(self, cfg: LoggingConfig, run_name: str, folder: Path, config: dict[str, Any]) -> None:
        self._run: Any = None
        mode: Any = cfg.wandb or os.environ.get("WANDB_MODE", "offline")
        if mode == "disabled":
            return
        try:
            import wandb

            os.environ.setdefault("WANDB_SILENT", "true")
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=cfg.wandb_project, name=run_name, dir=str(folder), mode=mode, config=config,
                settings=wandb.Settings(init_timeout=10, console="off"),
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
