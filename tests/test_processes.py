"""Children that end with their parent, signals that are handed on, and a console that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.processes import STOPPING
from tests.helpers import REPOSITORY, end_processes

CHILD = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def stop(number, frame):
    (folder / "got").write_text(str(number))
    sys.exit(85)
for name in ("TERM", "INT", "HUP", "USR1", "USR2", "XCPU"):
    number = getattr(signal, "SIG" + name)
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
(folder / "pid.part").write_text(str(os.getpid()))
(folder / "pid.part").rename(folder / "pid")
time.sleep(60)
"""
PARENTS = {
    "run": "from pretrain.processes import run; import sys; sys.exit(run([sys.executable, 'child.py', '.']))",
    "make demo": "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-m', 'pretrain.processes', sys.executable, 'child.py', '.'])",
    "demo": "import pathlib, subprocess, sys; from tools import demo; demo.ROOT = pathlib.Path('.')\n"
    "try: demo.run('child.py', '.')\n"
    "except subprocess.CalledProcessError as error: sys.exit(error.returncode)",
    "launcher": "import sys, pathlib; from launchers import local; local.MAIN = pathlib.Path('child.py')\n"
    "sys.exit(local.LocalRun(['.'], 1, max_requeues=2, port=None, say=print).run())",
}


def start(folder: Path, parent: str, before: Callable[[], object] | None = None) -> subprocess.Popen[bytes]:
    """A process that has started child.py; returns when that is ready."""
    (folder / "child.py").write_text(CHILD)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", PARENTS[parent]], cwd=folder, env=environment, start_new_session=True, preexec_fn=before
    )
    wait_for(lambda: (folder / "pid").exists())
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # nobody has waited for it here


@pytest.mark.parametrize("parent", PARENTS)
def test_the_child_of_a_killed_process_is_asked_to_stop(parent: str, tmp_path: Path) -> None:
    process = start(tmp_path, parent)
    try:
        child = int((tmp_path / "pid").read_text())
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: is_gone(child))
        assert (tmp_path / "got").read_text() == str(int(signal.SIGTERM))
    finally:
        end_processes([process])


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("parent", ["run", "launcher"])
def test_signals_are_handed_on_and_waited_for(parent: str, number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, parent)
    try:
        process.send_signal(number)
        assert process.wait(60) == 85
        assert (tmp_path / "got").read_text() == str(int(number))
    finally:
        end_processes([process])


def test_with_nohup_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "launcher", lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    try:
        process.send_signal(signal.SIGHUP)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(60) == 85 and (tmp_path / "got").read_text() == str(int(signal.SIGTERM))
    finally:
        end_processes([process])


TALKS = """
import ctypes, logging, os, pathlib, sys
from pretrain.main import leave
from pretrain.messages import add_log_file, keep_console, set_up_console
keep_console()
set_up_console()
add_log_file(pathlib.Path(sys.argv[1]) / "log.txt")
for line in range(200):
    print("a library prints", line)
    logging.getLogger("pretrain").info("step %d", line)
sys.stdout.write("no end of line")
with open(pathlib.Path(sys.argv[1]) / "data", "w") as file:
    assert file.fileno() > 2
    ctypes.CDLL(None).write(2, b"C code speaks", 13)
leave(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 85])
def test_a_console_that_goes_away_ends_nothing(code: int, tmp_path: Path) -> None:
    """As `2>&1 | head -1` does it."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", TALKS, str(tmp_path), str(code)], cwd=REPOSITORY, stdout=writer, stderr=writer
    )
    os.close(writer)
    assert os.read(reader, 16).startswith(b"a library prints")
    os.close(reader)
    assert process.wait(60) == code
    log = (tmp_path / "log.txt").read_text()
    assert "step 0\n" in log and "step 199\n" in log and log.count("\n") == 200


def test_a_full_disk_behind_the_console_ends_nothing(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", TALKS, str(tmp_path), "0"]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=full, stderr=full)
    assert done.returncode == 0 and (tmp_path / "log.txt").read_text().endswith("step 199\n")


def test_a_console_that_was_never_there_gives_no_file_its_number(tmp_path: Path) -> None:
    command = f'exec "$0" -c "$1" {tmp_path} 0 <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, TALKS], cwd=REPOSITORY)
    assert done.returncode == 0 and (tmp_path / "log.txt").read_text().endswith("step 199\n")
    assert (tmp_path / "data").read_text() == ""
