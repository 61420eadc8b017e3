"""The entry point as a user starts it: exit codes, messages, and that errors come before torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pretrain.config.cli import parse_arguments
from pretrain.config.load import load_config
from tests.config.test_preflight import write_data_set
from tests.helpers import REPOSITORY

# Runs pretrain/main.py as a file in a process that then tells whether torch was imported.
_WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = {folder!r}  # what `python pretrain/main.py` puts there
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    heavy = sorted({{"torch", "deepspeed", "streaming", "transformers"}} & sys.modules.keys())
    print("exit", end.code, "imported", heavy, "path", sys.path[0])
"""


def start(*arguments: str, cwd: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, env=clean | environment
    )


def watched(*arguments: str) -> subprocess.CompletedProcess[str]:
    return start("-c", _WATCHED.format(folder=str(REPOSITORY / "pretrain")), "pretrain/main.py", *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "configs/tinny.yaml"], "configs/tinny.yaml: no such file; nearest: configs/tiny.yaml"),
        (
            ["--config", "configs/tiny.yaml", "optmizer.lr=3"],
            "command line: optmizer.lr='3': unknown key; nearest: optimizer.lr",
        ),
        (
            ["--config", "configs/tiny.yaml", "--optimizer.lr=abc"],
            "command line: optimizer.lr='abc': expected a number",
        ),
        (["--config", "configs/tiny.yaml", "train.max_steps=1e4"], "write 10000"),
        (
            ["--config", "configs/tiny.yaml", "data.path=nowhere"],
            "configs/tiny.yaml: data.path: nowhere: no such folder",
        ),
        (["--config", "configs/tiny_tp2_pp2.yaml"], "configs/tiny_tp2_pp2.yaml: world size=1: expected a multiple"),
        (["--config", "configs/tiny.yaml", "train.activation_checkpointing=reentrant"], "all non-reentrant"),
    ],
)
def test_configuration_errors_end_with_2_before_torch(arguments: list[str], expected: str) -> None:
    begin = time.monotonic()
    done = watched("--local_rank=0", *arguments)
    assert done.stdout.startswith("exit 2 imported []"), done
    assert expected in done.stderr and done.stderr.startswith("error on rank 0 (") and done.stderr.count("\n") == 1
    assert time.monotonic() - begin < 10


def test_the_number_of_processes_comes_from_the_launcher() -> None:
    done = start("pretrain/main.py", "--config", "configs/tiny.yaml", WORLD_SIZE="3", RANK="2")
    assert done.returncode == 2
    assert done.stderr.startswith("error on rank 2 (")
    assert "train.global_batch_size=16: expected a multiple of the 3 data-parallel ranks" in done.stderr
    done = start("pretrain/main.py", "--config", "configs/tiny.yaml", WORLD_SIZE="x")
    assert done.returncode == 2 and "WORLD_SIZE='x'" in done.stderr


@pytest.mark.parametrize("how", ["file", "module"])
def test_print_config_from_any_folder_and_without_data(how: str, tmp_path: Path) -> None:
    file, config = str(REPOSITORY / "pretrain/main.py"), str(REPOSITORY / "configs/parcae_1b3_tp2.yaml")
    where = {"file": ([file], tmp_path), "module": (["-m", "pretrain.main"], REPOSITORY)}
    program, cwd = where[how]
    done = start(*program, "--config", config, "--print-config", "--optimizer.lr", "1e-3", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["optimizer"]["lr"] == 1e-3
    (tmp_path / "printed.yaml").write_text(done.stdout)
    assert load_config(tmp_path / "printed.yaml") == load_config(config, ["optimizer.lr=1e-3"])


def test_the_folder_of_the_entry_file_does_not_hide_packages() -> None:
    done = watched("--config", "configs/tiny.yaml", "--print-config")
    assert f"path {REPOSITORY}\n" in done.stdout


def test_an_error_of_the_program_shows_its_traceback_and_ends_with_1(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", row_tokens=129, vocab_size=4_096, max_id=4_095)
    program = (
        "import sys, types; build = types.ModuleType('build'); sys.modules['pretrain.train.build'] = build\n"
        "build.dry_run = None; build.run_training = lambda cfg, started_at: 1 / 0\n"
        "from pretrain.main import main; sys.exit(main(sys.argv[1:]))"
    )
    overrides = (f"data.path={tmp_path / 'data'}", f"run.dir={tmp_path}")
    done = start("-c", program, "--config", "configs/tiny.yaml", *overrides)
    assert done.returncode == 1
    assert "error on rank 0" in done.stderr and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_the_exit_code_is_that_of_the_error(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", row_tokens=129, vocab_size=4_096, max_id=4_095)
    program = (
        "import sys, types; build = types.ModuleType('build'); sys.modules['pretrain.train.build'] = build\n"
        "from pretrain.errors import DataError; from pretrain.main import main\n"
        "def fail(cfg, started_at): raise DataError('shard.00001.mds is missing')\n"
        "build.dry_run = build.run_training = fail; sys.exit(main(sys.argv[1:]))"
    )
    overrides = (f"data.path={tmp_path / 'data'}", f"run.dir={tmp_path}")
    done = start("-c", program, "--config", "configs/tiny.yaml", *overrides)
    assert done.returncode == 3
    assert done.stderr.rstrip().endswith("shard.00001.mds is missing") and "Traceback" not in done.stderr


def test_arguments() -> None:
    args = parse_arguments(["--local_rank=1", "--config", "x", "--a.b", "1", "c.d=2", "--dry-run", "--e.f=3"])
    assert (args.config, args.dry_run, args.print_config) == ("x", True, False)
    assert args.overrides == ["--a.b", "1", "c.d=2", "--e.f=3"]
    for wrong in ([], ["--config"], ["--config", "x", "--dry-run", "--print-config"]):
        with pytest.raises(SystemExit) as end:
            parse_arguments(wrong)
        assert end.value.code == 2
