"""Mutated configurations: each is refused with a message that names what was changed, or holds what was written.

FUZZ_SEED=7 tries other mutations; `python -m tests.config.fuzz` and `python -m tests.config.starts` try many.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path

import pytest

from pretrain.config.bounds import PathText, Range
from pretrain.config.check import all_keys, bounds_of, type_of, without_null
from tests.config import starts
from tests.config.fuzz import Workplace, cases, judge
from tests.config.test_main import start

SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.mark.parametrize("part", range(4))
def test_mutated_configurations(part: int, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "place")
    found: dict[str, int] = {}
    for case in cases(4 * SEED + part, 250):
        verdict, words = judge(case, place)
        assert verdict in ("refused", "accepted"), f"{verdict}: {case}\n{words}"
        found[verdict] = found.get(verdict, 0) + 1
    assert found["refused"] > 100 and found["accepted"] > 15


def test_every_number_and_every_folder_has_bounds() -> None:
    for key in all_keys():
        hint = type_of(key.replace("[]", "[0]"), "")
        items = typing.get_args(without_null(hint))
        hints = [hint] if without_null(hint) in (int, float) else [item for item in items if item is not str]
        if typing.get_origin(without_null(hint)) is not typing.Literal:
            assert all(isinstance(bounds_of(item), Range) for item in hints), key
        if key.rsplit(".", 1)[-1] in ("dir", "path", "task_data", "core_bundle", "initial_weights"):
            assert isinstance(bounds_of(hint), PathText), key


def test_a_sample_through_the_real_command(tmp_path: Path) -> None:
    """Refused mutations that a shell can pass on: code 2, or 0 where only the data are wrong; never a traceback."""
    place = Workplace(tmp_path / "place")
    tried = 0
    for case in cases(SEED, 200):
        words = "".join(case.overrides)
        if case.environment or "\0" in words or not words.isascii() or not case.overrides[:1] or tried == 8:
            continue
        path, overrides = place.write(case)
        verdict, _ = judge(case, place)
        if verdict == "refused":
            data = f"data.path={place.folder / 'file'}"  # --print-config does not look at it
            done = start("pretrain/main.py", "--config", str(path), data, *overrides, "--print-config")
            assert done.returncode in (0, 2) and "Traceback" not in done.stderr, (case, done)
            tried += 1
    assert tried == 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_a_dry_run_accepts_starts(part: int, config: Path, tmp_path: Path) -> None:
    values = list(dict.fromkeys(starts.ends(SEED, 0)))
    for i, (key, written) in enumerate(values[part::4]):
        verdict, words = starts.judge(config, tmp_path / f"r{i}", key, written)
        assert verdict in ("refused", "accepted"), f"{key}={written}: {words}"
