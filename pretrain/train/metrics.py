"""metrics.jsonl: one JSON object per line, each with the `step` after which it was measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from pretrain.errors import CheckpointError
from pretrain.files import failure_text, write_text

METRICS_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends rows; a row that `write` has returned from survives a kill of the process. Made on the main rank only."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row. A number that is not finite becomes null: JSON has no NaN, and many readers refuse it.

        Errors: CheckpointError where the disk takes no more, since a resumed run would miss the row.
        """
        try:
            self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"a row was not written: {failure_text(self._path, error)}") from error

    def sync(self) -> None:
        """Makes the rows written so far durable: before the checkpoint that lets a resumed run count on them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"rows were not written: {failure_text(self._path, error)}") from error

    def close(self) -> None:
        """After the last row."""
        self.sync()
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; none if there is no file. A last line cut short by a kill is left out.

    Errors: CheckpointError naming the line that is not a row with a `step`.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_row(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def remove_rows_after(path: Path, step: int) -> int:
    """Removes the rows of later steps, which a run resumed at `step` measures again; returns how many they were.

    A last line cut short by a kill goes too, and counts. The file is replaced as a whole or not at all.
    Errors: CheckpointError naming a line that is not a row.
    """
    if not path.is_file():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    kept = [line for number, line in enumerate(lines[:-1], 1) if _row(path, number, line)["step"] <= step]
    removed = len(lines[:-1]) - len(kept) + bool(lines[-1])
    if removed:
        # Where it is a link, rows are appended to what it leads to; it must stay one.
        write_text(path.resolve(), "".join(line + "\n" for line in kept))
    return removed


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row["step"], int):
            return row
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(
        f"{path}, line {number}: {line[:80]!r} is no JSON object with a step; delete that line, or move the file away"
    )


def _finite(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
