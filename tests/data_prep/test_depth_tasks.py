"""Data sets of depth tasks: whole, the same again, known to the evaluation by their folder."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep import depth_tasks
from data_prep.verify_shards import verify
from pretrain.data.manifest import read_manifest
from pretrain.errors import ConfigError
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.depth import PROBLEMS
from pretrain.evaluation.depth_task import DepthTask
from tests.data_prep.conftest import all_rows, save_tokenizer, tree

REPOSITORY = Path(__file__).resolve().parents[2]


def make(out: Path, task: str, tokenizer: Path | None = None, **arguments: object) -> Path:
    settings = {"rows": 30, "validation_rows": 10, "row_tokens": 65, "max_depth": 4} | arguments
    depth_tasks.build(out, depth_tasks.Arguments(task=task, **settings), tokenizer)  # type: ignore[arg-type]
    return out


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "data_prep/depth_tasks.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=False)


@pytest.mark.parametrize("task", list(PROBLEMS))
def test_rows_are_documents_of_the_task(task: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "set", task, max_depth=2 if task == "assign" else 4)
    assert verify(folder) == [] and not (tmp_path / "set.partial").exists()
    manifest = read_manifest(folder)
    assert manifest.tokenizer.vocab_size == len(PROBLEMS[task].words) + 4
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    words = tokenizer.get_vocab()
    assert tokenizer.encode("strange").ids == [0, words["<|unk|>"]]
    for split, rows in (("train", 30), ("validation", 10)):
        ids = all_rows(folder, split)
        assert ids.shape == (rows, 65) and (ids[:, 0] == 0).all()
        assert not {1, 2, words["<|unk|>"]} & set(ids.ravel().tolist())
        assert len({tuple(row) for row in ids.tolist()}) == rows
        info = manifest.splits[split]
        assert info.documents >= (ids == 0).sum() and info.rows * 65 == info.tokens - info.dropped_tokens
    text = tokenizer.decode(all_rows(folder, "train")[0].tolist(), skip_special_tokens=False)
    first = text.split("<|bos|>")[1].strip()
    if task.startswith("walk"):
        cell = first.split()[0]
        for walk in re.findall(r"[a-z ]+[A-Z]", first):  # up to where the row ends
            *moves, stop = walk.split()
            for move in moves:
                cell = chr(65 + PROBLEMS[task].generators["abcdefgh".index(move)][ord(cell) - 65])  # type: ignore[attr-defined]
            assert stop == cell
    else:
        draw = itertools.repeat(1).__next__
        pattern = re.sub(r"\w+", "w", PROBLEMS[task].document(PROBLEMS[task].rng(0), draw, 9)).replace(".", " .")
        assert re.sub(r"\w+", "w", first)[-2:] == pattern[-2:], "a document ends with its answer"


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    one, other, third = (make(tmp_path / name, "walk", seed=s) for name, s in (("a", 5), ("b", 5), ("c", 6)))
    assert tree(one) == tree(other)
    assert (all_rows(one, "train") != all_rows(third, "train")).any()
    assert not {tuple(row) for row in all_rows(one, "train")} & {tuple(row) for row in all_rows(one, "validation")}


def test_depths_are_drawn_by_the_ratio(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", "mano", rows=400, depth_ratio=0.5)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    counts = dict.fromkeys(range(1, 5), 0)
    for row in all_rows(folder, "train").tolist():
        for text in tokenizer.decode(row, skip_special_tokens=False).split("<|bos|>")[1:-1]:
            counts[sum(word in "+-*" for word in text.split())] += 1
    total = sum(counts.values())
    for depth, expected in zip(counts, (8 / 15, 4 / 15, 2 / 15, 1 / 15), strict=True):
        assert counts[depth] / total == pytest.approx(expected, abs=0.03)


def test_a_group_of_the_users_own_and_a_text_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    """The evaluation finds the group in the folder; a cyclic group of three cells, with byte-level BPE."""
    folder = make(tmp_path / "set", "walk", tokenizer, generators=((1, 2, 0),))
    (task,) = open_tasks([f"depth:{folder}"], None, None, 4, (1, 4))
    assert isinstance(task, DepthTask) and task.problems.words == ("A", "B", "C", "a")
    assert task.name == f"depth:{folder}" and task.problems.evaluation_problems(4, 1)[0].context.endswith(" a a a a")
    assert read_manifest(folder).tokenizer.vocab_size == 400
    plain = make(tmp_path / "plain", "walk")
    (shipped,) = open_tasks([f"depth:{plain}"], None, None, 4)
    assert isinstance(shipped, DepthTask) and shipped.problems is PROBLEMS["walk"]
    other = tmp_path / "text"
    shutil.copytree(plain, other)
    manifest = json.loads((other / "manifest.json").read_text())
    del manifest["source"]["arguments"]["task"]
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"the data set .*text was not made by data_prep/depth_tasks.py"):
        open_tasks([f"depth:{other}"], None, None, None)


def test_what_is_there_is_used_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "set", "add")
    before = tree(folder)
    make(folder, "add")
    assert "is complete" in capsys.readouterr().out and tree(folder) == before
    with pytest.raises(ConfigError, match=r"holds a data set built with seed=0 \(now 1\)"):
        make(folder, "add", seed=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not a data set"):
        make(tmp_path / "other", "add")
    # What a kill leaves is begun anew.
    (tmp_path / "new.partial" / "dataset" / "train" / "00000").mkdir(parents=True)
    assert verify(make(tmp_path / "new", "add")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "--rows is 0, expected an integer >= 1"),
        ({"depth_ratio": 1.5}, r"--depth-ratio is 1.5, expected a number in \(0, 1\]"),
        ({"row_tokens": 10, "max_depth": 9}, r"depth 9 have up to 11 tokens: expected at most the context's 9"),
        ({"task": "assign", "max_depth": 25}, "--max-depth is 25, expected at most 24 for assign"),
        ({"task": "add", "generators": ((1, 0),)}, "--generators: expected the task walk, not add"),
        ({"generators": ((1, 1),)}, "--generators 1,1: expected a permutation of 0 .. 1"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "set", **{"task": "walk"} | arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "set").exists()


def test_a_tokenizer_that_splits_answers_is_refused(tmp_path: Path) -> None:
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|bos|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = save_tokenizer(tmp_path / "bytes", tokenizer, bos_token="<|bos|>")
    with pytest.raises(ConfigError, match=r"'mano': the model's tokenizer makes 2 tokens of the answer '10'"):
        make(tmp_path / "set", "mano", folder)
    assert not (tmp_path / "set").exists()
    assert verify(make(tmp_path / "add", "add", folder)) == []


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "set"
    done = run("walk", "--out", out, "--rows", "20", "--validation-rows", "4", "--row-tokens", "33", "--max-depth", "5")
    assert done.returncode == 0, done.stderr
    assert "depth 3: training and evaluation share its 1,000 problems" in done.stdout
    assert "depth 4 and beyond: one problem in 8 is for evaluation alone" in done.stdout
    assert f"data.path={out} model.vocab_size=17 model.context_length=32" in done.stdout
    done = run("hops", "--requests", tmp_path / "requests", "--depths", "1,3", "--limit", "2")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "requests/hops/depth_03/requests.jsonl").read_text().splitlines()]
    assert [(line["doc_id"], line["idx"]) for line in lines] == [(i, j) for i in range(2) for j in range(4)]
    done = run("hops", "--out", out)
    assert done.returncode == 2 and "holds a data set built with" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wolk", "--out", "x"), "invalid choice: 'wolk'"),
        (("walk",), "one of the arguments --out --requests is required"),
        (("walk", "--out", "x", "--depths", "1"), "--depths has no meaning with --out"),
        (("walk", "--requests", "x", "--max-depth", "3"), "--max-depth has no meaning with --requests"),
        (("walk", "--out", "x", "--generators", "1,b"), "1,b: expected integers, with commas between"),
        (("walk", "--requests", "x", "--limit", "0"), "argument --limit: 0: expected an integer >= 1"),
    ],
)
def test_command_lines_that_cannot_be(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        depth_tasks.parse_arguments(list(arguments))
    assert message in capsys.readouterr().err
