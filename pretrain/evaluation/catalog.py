"""Tasks by name. No torch: a configuration is checked with it before anything starts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.evaluation.core import read_core
from pretrain.evaluation.depth_task import DEPTH_PREFIX, open_depth_task
from pretrain.evaluation.requests import Task
from pretrain.evaluation.tasks import read_request_task, read_text_task

CORE = "core"
TEXT_PREFIX = "text:"
LOSS, HARNESS_PREFIX = "loss", "lm_eval:"
"""Tasks of tools/evaluate.py alone."""


def open_tasks(
    names: Sequence[str],
    task_data: str | Path | None,
    core_bundle: str | Path | None,
    limit: int | None,
    depths: Sequence[int] = (),
) -> list[Task]:
    """The tasks that `names` say.

    `core` (all of the bundle), `text:PATH`, `depth:NAME` at `depths`, or a folder of requests in `task_data`. Errors:
    ConfigError for a name that is unknown, or whose data is not given, missing or malformed.
    """
    if depths and not any(name.startswith(DEPTH_PREFIX) for name in names):
        raise ConfigError(f"depths {','.join(map(str, depths))}: expected none, since no task is a depth task")
    tasks: list[Task] = []
    for name in names:
        if name == CORE:
            if core_bundle is None:
                raise ConfigError(f"task {CORE!r}: it needs the folder of DCLM's tasks (core_bundle)")
            tasks += read_core(Path(core_bundle), limit)
        elif name.startswith(TEXT_PREFIX):
            path = Path(os.path.expanduser(name.removeprefix(TEXT_PREFIX)))
            if not os.path.exists(path):
                raise ConfigError(f"task {name!r}: no such file or folder")
            tasks.append(read_text_task(path))
        elif name.startswith(DEPTH_PREFIX):
            tasks.append(open_depth_task(name, depths, limit))
        elif name == LOSS or name.startswith(HARNESS_PREFIX):
            raise ConfigError(f"task {name!r}: tools/evaluate.py has it; during training the validation gives the loss")
        elif task_data is None:
            raise ConfigError(f"task {name!r}: it needs the folder that holds the tasks' requests (task_data)")
        else:
            tasks.append(read_request_task(Path(task_data), name, limit))
    counts = Counter(task.name for task in tasks)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"tasks {', '.join(names)}: {twice[0]!r} comes twice, but results go by this name: leave one out, or "
            "rename its file or folder"
        )
    return tasks
