"""--cluster local, with a stand-in for pretrain/main.py that does as its arguments say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, end_processes

STAND_IN = """
import os, signal, sys, time, json, pathlib
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
starts = len(list(folder.glob(f"{rank}-*")))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
(folder / f"{rank}-{starts}").write_text(json.dumps({name: os.environ[name] for name in names} | {"pid": os.getpid()}))
if what == "done" or (what == "killed once" and starts == 1):
    sys.exit(0)
if what == "fails" and rank == "1":
    sys.exit(6)
if what.startswith("killed") and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
(folder / f"ready-{rank}").touch()
time.sleep(60)
"""
RUN = """
import sys
from pathlib import Path
from launchers import local
local.MAIN = Path(sys.argv[1])
say = lambda text: print(text, flush=True)
sys.exit(local.LocalRun(sys.argv[3:], 2, max_requeues=int(sys.argv[2]), port=None, say=say).run())
"""


def start(folder: Path, what: str, max_requeues: int = 0) -> subprocess.Popen[bytes]:
    script = folder / "main.py"
    script.write_text(STAND_IN)
    command = [sys.executable, "-c", RUN, str(script), str(max_requeues), str(folder), what]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=30)
        return process.returncode, output.decode()
    finally:
        end_processes([process])


def test_the_processes_form_one_world(tmp_path: Path) -> None:
    assert finish(start(tmp_path, "done")) == (0, "")
    first, second = (json.loads((tmp_path / f"{rank}-0").read_text()) for rank in range(2))
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"], second["LOCAL_RANK"]) == ("0", "1", "2", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.parametrize("what, code, words", [("fails", 6, "failed with exit code 6"), ("killed", 137, "SIGKILL")])
def test_one_dead_process_ends_the_run(tmp_path: Path, what: str, code: int, words: str) -> None:
    exit_code, said = finish(start(tmp_path, what))
    assert exit_code == code and "rank 1" in said and words in said
    for path in tmp_path.glob("0-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(path.read_text())["pid"], 0)


def test_a_killed_process_is_started_again_within_the_bound(tmp_path: Path) -> None:
    exit_code, said = finish(start(tmp_path, "killed once", max_requeues=3))
    assert exit_code == 0 and "started again (1 of 3)" in said
    assert len(list(tmp_path.glob("1-*"))) == 2


def test_an_error_that_would_come_again_is_final(tmp_path: Path) -> None:
    exit_code, said = finish(start(tmp_path, "fails", max_requeues=3))
    assert exit_code == 6 and "would meet the same error" in said
    assert len(list(tmp_path.glob("1-*"))) == 1


def test_the_bound_ends_the_starts(tmp_path: Path) -> None:
    exit_code, said = finish(start(tmp_path, "killed", max_requeues=1))
    assert exit_code == 137 and "--requeue 1 is used up" in said
    assert len(list(tmp_path.glob("1-*"))) == 2


def test_a_signal_reaches_every_process_and_no_start_follows(tmp_path: Path) -> None:
    process = start(tmp_path, "waits", max_requeues=3)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (85, "")
    assert len(list(tmp_path.glob("1-*"))) == 1
