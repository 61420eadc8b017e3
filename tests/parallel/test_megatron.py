from __future__ import annotations

import re

import pytest

from pretrain.errors import ConfigError
from pretrain.parallel import megatron
from tests.helpers import REPOSITORY

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_the_libraries_are_known_to_their_adapters_alone() -> None:
    users: dict[str, set[str]] = {"megatron": set(), "deepspeed": set()}
    for path in (REPOSITORY / "pretrain").rglob("*.py"):
        for library in re.findall(r"^\s*(?:import|from) (megatron|deepspeed)\b", path.read_text(), re.MULTILINE):
            users[library].add(str(path.relative_to(REPOSITORY / "pretrain")))
    adapters = {f"parallel/{name}.py" for name in ("megatron", "tensor_ops", "cpu_shim")}
    assert users == {"megatron": adapters, "deepspeed": {"parallel/zero.py"}}


def test_local_rank_of_the_deepspeed_launcher_is_dropped() -> None:
    arguments = ["--local_rank=3", "--config", "x.yaml", "optimizer.lr=1e-3"]
    assert megatron.without_local_rank(arguments) == arguments[1:]


def test_without_a_launcher_the_world_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {"SLURM_STEP_NUM_TASKS": "1"}
    monkeypatch.setattr(megatron.os, "environ", environment)
    megatron.ensure_environment()
    assert all(name in environment for name in names)
    assert environment["WORLD_SIZE"] == "1" and int(environment["MASTER_PORT"]) > 0


def test_the_launchers_world_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"} | ADDRESS
    monkeypatch.setattr(megatron.os, "environ", environment)
    megatron.ensure_environment()
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_SIZE"]) == ("5", "8", "4")


def test_tasks_of_srun_that_would_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.os, "environ", {"SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(ConfigError, match="4 tasks"):
        megatron.ensure_environment()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 is set, but not MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4", **ADDRESS}, "WORLD_SIZE=4 is set, but not RANK"),
    ],
)
def test_half_of_a_launchers_variables_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.os, "environ", environment)
    with pytest.raises(ConfigError, match=message):
        megatron.ensure_environment()


def test_a_world_that_does_not_fit_is_refused_before_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.os, "environ", {"RANK": "0", "WORLD_SIZE": "6"} | ADDRESS)
    with pytest.raises(ConfigError, match=r"6 processes .* parallel.tensor=2 x parallel.pipeline=2"):
        megatron.initialize(2, 2, sequence_parallel=False, timeout_sec=10)
