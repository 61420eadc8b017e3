"""Tasks by name. No torch: a configuration is checked with it before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.evaluation.core import read_core
from pretrain.evaluation.requests import Task
from pretrain.evaluation.tasks import read_request_task, read_text_task

CORE = "core"
TEXT_PREFIX = "text:"


def open_tasks(names: Sequence[str], task_data: str | None, core_bundle: str | None, limit: int | None) -> list[Task]:
    """The tasks that `names` say: `core` (all of the bundle), `text:PATH`, or a folder of requests in `task_data`.

    Errors: ConfigError for a name that is unknown, or whose data is not given, missing or malformed.
    """
    tasks: list[Task] = []
    for name in names:
        if name == CORE:
            if core_bundle is None:
                raise ConfigError(f"task {CORE!r}: it needs the folder of DCLM's tasks (core_bundle)")
            tasks += read_core(Path(core_bundle), limit)
        elif name.startswith(TEXT_PREFIX):
            path = Path(name.removeprefix(TEXT_PREFIX))
            if not path.exists():
                raise ConfigError(f"task {name!r}: no such file or folder")
            tasks.append(read_text_task(path))
        elif task_data is None:
            raise ConfigError(f"task {name!r}: it needs the folder that holds the tasks' requests (task_data)")
        else:
            tasks.append(read_request_task(Path(task_data), name, limit))
    if len({task.name for task in tasks}) < len(tasks):
        raise ConfigError(f"tasks {', '.join(names)}: one of them comes twice")
    return tasks
