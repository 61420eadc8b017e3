"""The doctor names what is wrong, mends the worst first, and works without the project's packages."""

from __future__ import annotations

import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tools import doctor
from tools.doctor import GIB, Finding


def test_this_environment_has_the_pins() -> None:
    assert [finding for finding in doctor.check_packages() if finding.state == "wrong"] == []
    assert [finding.state for finding in doctor.check_python()] == ["ok"]


def test_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", {"a": "1.0", "b": "2.1+cu130"}.__getitem__)
    assert doctor.compare_pin("a==1.0") == ""
    assert doctor.compare_pin("a==1.1") == "a 1.0 (pin 1.1)"
    assert doctor.compare_pin("b==2.1") == "", "the build of a CUDA version is the same release"
    monkeypatch.undo()
    assert doctor.compare_pin("no-such-package==3") == "no-such-package is absent (pin 3)"


def test_the_worst_is_mended_first() -> None:
    ok, note = Finding("a", "fine"), Finding("b", "so so", "note", "do b")
    wrong = Finding("c", "bad", "wrong", "do c")
    assert doctor.render([ok, note, wrong])[-1] == "Mend first: c: do c."
    assert doctor.render([ok, note])[-1] == "Mend first: b: do b."
    assert doctor.render([ok])[-1] == "Nothing to mend."


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 4))
    (finding,) = doctor.check_python()
    assert finding.state == "wrong" and "3.11" in finding.mend


def test_little_room_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: usage(64 * 2**20 if path == Path("/dev/shm") else GIB)
    )
    found = {finding.topic: finding for finding in doctor.check_machine(Path("/"))}
    assert found["/dev/shm"].state == "note" and "--shm-size" in found["/dev/shm"].mend
    assert found["disk"].state == "note" and found["disk"].text.startswith("1.0 GiB free")


def fake_torch(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, int]], driver: str) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        get_device_properties=lambda i: types.SimpleNamespace(
            name=gpus[i][0], total_memory=80 * GIB, major=gpus[i][1], minor=0
        ),
        nccl=types.SimpleNamespace(version=lambda: (2, 30, 7)),
    )
    version = types.SimpleNamespace(cuda="13.0")
    torch = types.SimpleNamespace(cuda=cuda, version=version, __version__="2.14.1")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor, "_first_line", lambda *command: driver)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, [("H100", 9), ("V100", 7)], "590.1")
    new, old, cuda = doctor.check_torch()
    assert (new.text, new.state) == ("H100, 80 GiB, compute capability 9.0", "ok")
    assert old.state == "note" and "fp32" in old.mend
    assert cuda.text == "CUDA 13.0, NCCL 2.30.7, driver 590.1"


def test_a_driver_that_torch_cannot_use_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, [], "470.0")
    (finding,) = doctor.check_torch()
    assert finding.state == "wrong" and "470.0" in finding.mend
    fake_torch(monkeypatch, [], "")
    (finding,) = doctor.check_torch()
    assert finding.state == "note" and finding.mend == ""


def test_it_runs_without_any_package() -> None:
    """-I -S: no site-packages, so that torch and everything else is absent."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "tools/doctor.py"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert done.returncode == 1, done.stderr
    assert "torch is absent (pin" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Mend first: packages: run `make install`")
