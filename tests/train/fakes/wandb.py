"""Stands in for wandb: says on stdout what it is told. FAKE_WANDB=init or log: that call fails."""

from __future__ import annotations

import json
import os
from typing import Any

print("wandb imported")
_FAILS = os.environ.get("FAKE_WANDB")


class Settings(dict[str, Any]):
    """Settings by name."""


class Run:
    """A run that prints what it is given."""

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, row: dict[str, Any]) -> None:
        if _FAILS == "log" and row["step"] == 2:
            raise RuntimeError("the service died")
        print("wandb row", json.dumps(row))

    def finish(self) -> None:
        print("wandb finished")


def init(*, id: str, resume: str, settings: Settings, mode: str, **_: Any) -> Run:
    assert settings["init_timeout"] <= 10 and resume == "allow"
    if _FAILS == "init":
        raise TimeoutError("no route to the server")
    print(f"wandb run {id} {mode}")
    return Run()
