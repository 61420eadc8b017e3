"""Damage, kills and full disks: the run goes on from a complete checkpoint, or ends with the file's name."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.config.schema import CheckpointConfig, RunConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.train.checkpoint import writer as writer_module
from pretrain.train.checkpoint.find import find_checkpoint, open_checkpoint
from pretrain.train.checkpoint.folders import check_disk, checkpoints_folder, list_steps, step_folder
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader
from tests.helpers import mounted_disk
from tests.train.checkpoints import assert_holds, save, slices, state, writer

FILES = ("manifest.json", "index.json", "state.json", "config.yaml", "tensors_00000_00000.safetensors")
AUTO = RunConfig(resume="auto")


def _flip(where: float) -> Callable[[bytes], bytes]:
    def flipped(content: bytes) -> bytes:
        i = int(where * (len(content) - 1))
        return content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]

    return flipped


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "truncated": lambda content: content[:-1],
    "halved": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "extended": lambda content: content + b"\n",
    "first byte": _flip(0.0),
    "middle byte": _flip(0.5),
    "last byte": _flip(1.0),
    "deleted": None,
}


def spoil(path: Path, damage: Callable[[bytes], bytes] | None) -> None:
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))


def _find(run: Path, settings: RunConfig = AUTO) -> CheckpointReader:
    found = find_checkpoint(run, settings, Ranks())
    assert found is not None
    return found


@pytest.mark.parametrize("name", FILES)
def test_damage_falls_back_to_the_one_before_and_names_the_file(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10, 20)
    path = step_folder(checkpoints_folder(tmp_path), 20) / name
    good = path.read_bytes()
    for damage in DAMAGES.values():
        caplog.clear()
        spoil(path, damage)
        assert_holds(_find(tmp_path), 10)
        (skipped, latest) = caplog.messages
        assert skipped.startswith(f"skipping checkpoint {path.parent}: ")
        assert str(path) in skipped
        assert "latest is step_00000020; the newest complete checkpoint is step_00000010" in latest
        path.write_bytes(good)
    caplog.clear()
    assert_holds(_find(tmp_path), 20)
    assert not caplog.messages


@pytest.mark.parametrize("name", FILES)
def test_with_none_left_it_is_an_error_and_never_step_0(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    path = step_folder(checkpoints_folder(tmp_path), 10) / name
    spoil(path, DAMAGES["middle byte"])
    with pytest.raises(CheckpointError, match="will not start over") as error:
        _find(tmp_path)
    assert str(path) in str(error.value)


def test_a_folder_under_another_steps_name_is_not_taken(tmp_path: Path) -> None:
    save(tmp_path, 10)
    folder = step_folder(checkpoints_folder(tmp_path), 10)
    shutil.copytree(folder, step_folder(folder.parent, 30))
    assert_holds(_find(tmp_path), 10)


@pytest.mark.parametrize("content", [None, "", "step_00000999\n", "\xff\x00"])
def test_latest_is_only_a_hint(tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 10, 20)
    latest = checkpoints_folder(tmp_path) / "latest"
    assert latest.read_text() == "step_00000020\n"
    latest.unlink() if content is None else latest.write_text(content, encoding="latin-1")
    assert_holds(_find(tmp_path), 20)
    (message,) = caplog.messages
    assert message.endswith("the newest complete checkpoint is step_00000020, and is used")


def test_resume_rules(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, AUTO, Ranks()) is None
    assert find_checkpoint(tmp_path, RunConfig(resume="never"), Ranks()) is None
    with pytest.raises(CheckpointError, match=r"resume_step=5: .*step_00000005 does not exist.*: none"):
        _find(tmp_path, RunConfig(resume="step", resume_step=5))
    save(tmp_path, 10, 20, 30)
    assert_holds(_find(tmp_path, RunConfig(resume="step", resume_step=20)), 20)
    with pytest.raises(CheckpointError, match=r"steps 10, 20, 30, and run\.resume=never"):
        find_checkpoint(tmp_path, RunConfig(resume="never"), Ranks())
    with pytest.raises(CheckpointError, match=r"resume_step=12345: .*does not exist.*: 10, 20, 30"):
        _find(tmp_path, RunConfig(resume="step", resume_step=12345))
    (step_folder(checkpoints_folder(tmp_path), 20) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"resume_step=20: .*state\.json: missing.*: 10, 30$"):
        _find(tmp_path, RunConfig(resume="step", resume_step=20))


def test_open_checkpoint_takes_a_run_or_a_step(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    assert open_checkpoint(tmp_path).step == 20
    assert open_checkpoint(step_folder(checkpoints_folder(tmp_path), 10)).step == 10
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        open_checkpoint(tmp_path / "elsewhere")


def test_steps_are_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 10)
    before = (step_folder(checkpoints_folder(tmp_path), 10) / "manifest.json").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"step_00000010 exists, and checkpoints are never overwritten"):
        save(tmp_path, 10)
    one = writer(tmp_path)
    one.start_from(10)
    one.save(iter(()), state(10))  # just loaded: nothing to save
    assert (step_folder(checkpoints_folder(tmp_path), 10) / "manifest.json").stat().st_mtime_ns == before
    assert_holds(_find(tmp_path), 10)


def test_going_back_sets_later_steps_aside(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    one = writer(tmp_path)
    for _ in range(2):
        one.start_from(10)
        checkpoints = checkpoints_folder(tmp_path)
        assert list_steps(checkpoints) == [10]
        assert (checkpoints / "latest").read_text() == "step_00000010\n"
        one.save(slices(20), state(20))
    assert_holds(_find(tmp_path), 20)
    assert sorted(p.name for p in (checkpoints / "abandoned").iterdir()) == [
        "step_00000020", "step_00000020.1", "step_00000030",
    ]  # fmt: skip
    assert open_checkpoint(checkpoints / "abandoned" / "step_00000030").step == 30
    one.start_from(0)
    assert find_checkpoint(tmp_path, AUTO, Ranks()) is None
    assert not (checkpoints / "latest").exists()


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"keep_last": 1}, [6]),
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 9}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every_steps": 2}, [2, 4, 6]),
        ({"keep_last": 2, "keep_every_steps": 4}, [4, 5, 6]),
    ],
)
def test_retention(tmp_path: Path, config: dict[str, int], kept: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, 6, **config)
    assert list_steps(checkpoints_folder(tmp_path)) == kept
    assert not list(checkpoints_folder(tmp_path).glob(".*"))


def test_retention_counts_complete_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (step_folder(checkpoints_folder(tmp_path), 3) / "index.json").unlink()
    one = writer(tmp_path, keep_last=2)
    one.save(slices(4), state(4))
    assert list_steps(checkpoints_folder(tmp_path)) == [2, 3, 4]
    assert_holds(_find(tmp_path), 4)


# --- kills ---

_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.scandir"}


def _before_file_operations(action: Callable[[int], None]) -> Callable[[], None]:
    """Calls action(n) before this process's n-th file operation from now on; returns what ends that."""
    count, active = 0, True

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal count, active
        if active and event in _EVENTS:
            count += 1
            active = False  # for what the action does
            action(count)
            active = True

    def end() -> None:
        nonlocal active
        active = False

    sys.addaudithook(hook)  # it cannot be taken away again
    return end


def _assert_goes_on(run: Path) -> int:
    """Whatever a kill has left in `run`, a complete checkpoint is found, the rest is cleaned up; the step found."""
    found = _find(run)
    assert_holds(found, found.step)
    writer(run).start_from(found.step)
    assert not list(checkpoints_folder(run).glob(".*"))
    assert not (checkpoints_folder(run) / "abandoned").exists()
    assert (checkpoints_folder(run) / "latest").read_text() == f"step_{found.step:08d}\n"
    return found.step


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_kill_before_any_file_operation_of_a_save_leaves_a_complete_checkpoint(
    keep_last: int, tmp_path: Path
) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    save(run, 10, 20)
    one = writer(run, max_file_bytes=600, keep_last=keep_last)
    # What a kill at that moment would leave: buffers that Python has not flushed are not in the copy either.
    end = _before_file_operations(lambda n: shutil.copytree(run, copies / f"{n:04d}"))
    one.save(slices(30, 2), state(30))
    end()
    steps = [_assert_goes_on(copy) for copy in sorted(copies.iterdir())]
    assert steps == sorted(steps)  # before the rename the old one, after it the new one
    assert set(steps) == {20, 30}
    assert steps.count(20) > 20
    assert steps.count(30) > 5


@pytest.mark.parametrize("kill_at", [3, 12, 24, 36, 48])
def test_sigkill_in_a_save_and_a_run_that_goes_on(tmp_path: Path, kill_at: int) -> None:
    save(tmp_path, 10, 20)
    pid = os.fork()
    if pid == 0:
        try:
            _before_file_operations(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == kill_at else None)
            writer(tmp_path, max_file_bytes=600, keep_last=2).save(slices(30, 2), state(30))
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    step = _assert_goes_on(tmp_path)
    one = writer(tmp_path, keep_last=2)
    one.start_from(step)
    one.save(slices(step + 10), state(step + 10))
    assert_holds(_find(tmp_path), step + 10)
    assert list_steps(checkpoints_folder(tmp_path)) == [step, step + 10]


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    with mounted_disk(tmp_path / "disk", "2m") as path:
        yield path


@pytest.mark.parametrize("free_bytes", [0, 100, 5_000, 9_000])
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_in_a_save(small_disk: Path, free_bytes: int, background: bool) -> None:
    save(small_disk, 10)
    before = sorted(checkpoints_folder(small_disk).rglob("*"))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(0, file.tell() - free_bytes))
    one = writer(small_disk, background=background)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step 20 was not saved.*No space left on device") as error:
            one.save(slices(20, 2), state(20))
            one.wait()
        assert "MiB free" in str(error.value) or "cannot be made" in str(error.value)
        assert sorted(checkpoints_folder(small_disk).rglob("*")) == before
        assert_holds(_find(small_disk), 10)
        assert (checkpoints_folder(small_disk) / "latest").read_text() == "step_00000010\n"
    filler.unlink()
    one.save(slices(20), state(20))
    one.wait()
    assert_holds(_find(small_disk), 20)


@pytest.mark.parametrize("failing", ["write_tensors", "write_text"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    before = sorted(checkpoints_folder(tmp_path).rglob("*"))
    exhausted = []

    def fail(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def offered() -> Iterator[object]:
        yield from slices(20)
        exhausted.append(True)

    monkeypatch.setattr(writer_module, failing, fail)
    with pytest.raises(CheckpointError, match=r"step 20 was not saved.*Disk quota exceeded \(.* free\)"):
        writer(tmp_path, max_file_bytes=1).save(offered(), state(20))
    assert exhausted
    assert sorted(checkpoints_folder(tmp_path).rglob("*")) == before


def test_disk_space_is_checked_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 * gib, 65 * gib, 35 * gib))
    checkpoints = checkpoints_folder(tmp_path / "runs" / "new")

    def check(num_bytes: int, last_step: int = 10_000, start_step: int = 0, **config: int) -> None:
        check_disk(checkpoints, num_bytes, CheckpointConfig(**config), start_step, last_step)

    check(8 * gib, keep_last=3)
    with pytest.raises(ConfigError, match=r"35\.00 GiB free, but 4 more checkpoints of 9\.00 GiB need 36\.00 GiB"):
        check(9 * gib, keep_last=3)
    check(9 * gib, keep_last=2)
    check(17 * gib, last_step=1_500)  # two saves in all
    with pytest.raises(ConfigError, match="but 1 more checkpoints"):
        check(36 * gib, last_step=1_000)
    save(tmp_path / "runs" / "new", 1, 2, 3)
    check(35 * gib, start_step=3, keep_last=3)
    with pytest.raises(ConfigError, match="3 exist"):
        check(36 * gib, start_step=3, keep_last=3)
    # Back to step 1: those after it are set aside, and nothing deletes them. Nor does it one that is not complete.
    with pytest.raises(ConfigError, match=r"but 3 more checkpoints .* 1 exist"):
        check(12 * gib, start_step=1, keep_last=3)
    (step_folder(checkpoints, 3) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"but 2 more checkpoints .* 2 exist"):
        check(18 * gib, start_step=2, keep_last=3)


def test_checkpoints_kept_for_ever_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = shutil.disk_usage(tmp_path).free
    config = CheckpointConfig(every_steps=10, keep_last=1, keep_every_steps=100)
    check_disk(tmp_path, free // 5, config, 0, 200)
    assert not caplog.messages
    check_disk(tmp_path, free // 5, config, 0, 900)
    assert "keep_every_steps=100 will keep 9 checkpoints" in caplog.messages[0]


# --- writing behind training ---


def test_a_background_save_is_complete_only_after_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), writer_module.write_tensors

    def slow(*arguments: object) -> object:
        assert go.wait(20)
        return real(*arguments)

    monkeypatch.setattr(writer_module, "write_tensors", slow)
    one = writer(tmp_path, background=True)
    one.save(slices(10), state(10))
    assert list_steps(checkpoints_folder(tmp_path)) == []
    go.set()
    one.save(slices(20), state(20))  # waits for the one before
    assert 10 in list_steps(checkpoints_folder(tmp_path))
    one.wait()
    assert_holds(_find(tmp_path), 20)


def test_a_failed_background_save_surfaces_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10)
    one = writer(tmp_path, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        one.save(slices(20), state(20))
        one.join()
        assert one.failed
        with caplog.at_level(logging.ERROR):
            assert any("checkpoint of step 20 was not saved" in message for message in caplog.messages)
        with pytest.raises(CheckpointError, match="broken"):
            one.save(slices(30), state(30))
    assert not one.failed
    one.save(slices(30), state(30))
    one.wait()
    assert_holds(_find(tmp_path), 30)
