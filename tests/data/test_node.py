"""The folder in /dev/shm, whose name and surroundings anybody on the machine may use."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.config.schema import SourceConfig
from pretrain.data import node
from pretrain.data.loader import TrainLoader
from pretrain.errors import ConfigError, DataError
from tests.data.sets import alone, make_config

DEAD = 7_654_321


def own_root() -> Path:
    return node.SHARED_MEMORY / f"looped-pretrain-{os.getuid()}"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm, where the folders of runs are concerned."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(node, "SHARED_MEMORY", folder)
    return folder


def as_link(root: Path) -> None:
    victim = root.parent / "victim"
    for number in range(3):
        (victim / str(number)).mkdir(parents=True)
        (victim / str(number) / node.ALIVE).write_text("precious")
    root.symlink_to(victim)


def as_dangling_link(root: Path) -> None:
    root.symlink_to(root.parent / "nowhere")


def as_open_folder(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (as_link, "is a link, expected a folder of this user's; remove it"),
        (as_dangling_link, "is a link"),
        (as_open_folder, r"has mode 0770, expected 0700.*chmod 700"),
        (Path.touch, "is a file, expected a folder"),
    ],
)
def test_a_folder_that_others_could_write_to_is_refused(
    set_101: Path, shared: Path, make: Callable[[Path], None], words: str
) -> None:
    make(own_root())
    before = sorted(shared.rglob("*"))
    with pytest.raises(DataError, match=rf"^{own_root()}: {words}"):
        TrainLoader(make_config(set_101), alone())
    assert sorted(shared.rglob("*")) == before


def test_a_folder_of_another_user_is_refused(set_101: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared / "looped-pretrain-12345").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(DataError, match="belongs to another user, who must remove it"):
        TrainLoader(make_config(set_101), alone())


def test_no_shared_memory_at_all(set_101: Path, shared: Path) -> None:
    shared.rmdir()
    with pytest.raises(ConfigError, match=rf"{shared}: expected the shared memory of this machine"):
        TrainLoader(make_config(set_101), alone())


def test_the_folder_is_for_its_user_alone(set_101: Path, shared: Path) -> None:
    before = os.umask(0)
    try:
        with TrainLoader(make_config(set_101), alone()) as loader:
            for folder in (own_root(), loader._folder.path):
                assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_only_what_a_dead_run_has_left_is_removed(set_101: Path, shared: Path) -> None:
    root = own_root()
    root.mkdir(0o700)
    dead, linked, foreign = root / str(DEAD), root / "4", root / "5"
    for folder in (dead, shared / "elsewhere", foreign):
        folder.mkdir()
        (folder / "data").write_text("precious")
    linked.symlink_to(shared / "elsewhere")
    for folder in (dead, shared / "elsewhere"):
        (folder / node.ALIVE).touch()
    (foreign / node.ALIVE).symlink_to(shared / "elsewhere" / "data")
    segments = [shared / f"{DEAD}_{name}" for name in ("locals", "shard_states", "of_another_program")]
    for segment in segments:
        segment.touch()
    link = shared / f"{DEAD}_barrier"
    link.symlink_to(segments[2])
    TrainLoader(make_config(set_101), alone()).close()
    assert not dead.exists() and [segment.exists() for segment in segments] == [False, False, True]
    assert link.is_symlink()
    assert [(folder / "data").read_text() for folder in (linked, foreign)] == ["precious"] * 2


def test_a_link_in_place_of_the_lock_of_a_cache_is_refused(set_101: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / node.CACHE_LOCK).symlink_to(tmp_path / "made")
    source = SourceConfig(path=str(cache), remote=str(set_101))
    with pytest.raises(DataError, match=r"\.looped-pretrain\.lock: is a link"):
        TrainLoader(make_config(None, sources=[source]), alone())
    assert not (tmp_path / "made").exists()


def test_runs_that_start_at_once(set_101: Path, shared: Path) -> None:
    """The first of them makes the folder; each removes what it takes for dead while others come and go."""
    fork = multiprocessing.get_context("fork")
    begin = fork.Event()

    def run() -> None:
        begin.wait(60)
        for _ in range(5):
            with TrainLoader(make_config(set_101), alone()) as loader:
                assert loader._folder.path.is_dir()
                next(loader)

    runs = [fork.Process(target=run) for _ in range(6)]
    for process in runs:
        process.start()
    begin.set()
    for process in runs:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in runs] == [0] * 6
    assert sorted(path.name for path in own_root().iterdir()) == ["lock"]
