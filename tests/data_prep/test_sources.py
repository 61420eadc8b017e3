"""Every kind of file gives the same documents, however it is cut, or says what is wrong."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_prep.sources import (
    DEMO_PACKAGE,
    FETCH_INCOMPLETE,
    TextFormat,
    find_files,
    ignored_files,
    plan_units,
    read_unit,
)
from pretrain.errors import ConfigError, DataError
from tests.data_prep.conftest import SEPARATOR, make_documents, write_documents

NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"]
FORMAT = TextFormat(separator=SEPARATOR)


def read_all(inputs: list[str], unit_bytes: int = 1 << 20) -> list[tuple[int, int, str]]:
    units = plan_units(find_files(inputs), unit_bytes)
    found = [document for unit in units for document in read_unit(unit, FORMAT)]
    assert not any(document.problem for document in found)
    return [(document.file, document.position, document.text) for document in found]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit_bytes", [1, 100, 1_001, 1 << 20])
def test_cuts_cover_each_document_once(tmp_path: Path, name: str, unit_bytes: int) -> None:
    documents = make_documents(50)
    path = write_documents(tmp_path / name, documents)
    found = read_all([str(path)], unit_bytes)
    assert [text for _, _, text in found] == documents
    assert found == read_all([str(path)])
    assert len({position for _, position, _ in found}) == len(documents)


def test_units_split_large_files_and_join_small_ones(tmp_path: Path) -> None:
    write_documents(tmp_path / "large.jsonl", make_documents(200))
    for i in range(10):
        write_documents(tmp_path / f"small{i}.jsonl", make_documents(1))
    units = plan_units(find_files([str(tmp_path)]), 4_000)
    assert sum(piece.path.endswith("large.jsonl") for unit in units for piece in unit) > 5
    assert len(units) < sum(map(len, units)) - 5
    assert all(sum(piece.bytes for piece in unit) <= 4_000 for unit in units)


def test_text_file_without_separator_is_one_document(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.txt", ["one", "two"])
    unit = plan_units(find_files([str(path)]), 1)[0]
    assert [document.text for document in read_unit(unit, TextFormat())] == [f"one{SEPARATOR}two"]


def test_folder_is_searched_in_order_without_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ("b/z.jsonl", "a.jsonl", ".cache/x.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_documents(tmp_path / name, ["text"])
    assert [file.name for file in find_files([str(tmp_path)])] == ["a.jsonl", "b/z.jsonl"]
    assert ignored_files([str(tmp_path)]) == [str(tmp_path / "README.md")]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    path = write_documents(tmp_path / name, make_documents(50))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{name}: cannot be read"):
        read_all([str(path)])


def test_truncated_parquet_is_refused_before_the_build(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.parquet", make_documents(50))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet: not a complete parquet file"):
        find_files([str(path)])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "caf\xff"}', "not a JSON object"),
        (b'{"text": ', "not a JSON object"),
        (b'["text"]', "no key 'text'"),
        (b'{"body": "x"}', "no key 'text'"),
        (b'{"text": null}', "NoneType, expected a string"),
        (b'{"text": "\\ud83d"}', "no UTF-8 form"),
        (b"[" * 200_000 + b"]" * 200_000, "not a JSON object (maximum recursion depth"),
        (b'{"text": "x", "id": 1' + b"0" * 5_000 + b"}", "not a JSON object"),
    ],
)
def test_bad_document_carries_its_problem(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n\n{"text": "also good"}\n')
    unit = plan_units(find_files([str(path)]), 1 << 20)[0]
    first, bad, last = read_unit(unit, FORMAT)
    assert (first.text, last.text) == ("good", "also good")
    assert problem in bad.problem
    assert bad.position == 17


def test_lines_of_jsonl_end_with_newlines_alone(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    lines = [json.dumps({"text": f"{text}{i}"}, ensure_ascii=False) for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    # What a document cannot hold by the rules of JSON, a raw end of line, is that document's problem.
    assert [found for _, _, found in read_all([str(tmp_path)])] == [f"{text}{i}" for i in range(3)]


def test_parquet_strings_that_are_not_utf8(tmp_path: Path) -> None:
    texts = pyarrow.array([b"good", b"caf\xff", b"also good"], pyarrow.binary())
    table = pyarrow.table({"text": pyarrow.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, bad, last = read_unit(plan_units(find_files([str(tmp_path)]), 1 << 20)[0], FORMAT)
    assert (first.text, last.text) == ("good", "also good")
    assert bad.position == 1 and "not UTF-8 (invalid start byte at byte 3 of the document)" in bad.problem


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.json.zst", "a.parquet"])
def test_empty_files_that_cannot_be_empty(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match=rf"{name}: (empty, expected|not a complete parquet)"):
            find_files([str(source)])


def test_linked_folders_are_sources(tmp_path: Path) -> None:
    for name in ("set/a.jsonl", "elsewhere/deep/b.jsonl", "elsewhere/.hidden/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        write_documents(tmp_path / name, [name])
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere")
    assert [file.name for file in find_files([str(tmp_path / "set")])] == ["a.jsonl", "linked/deep/b.jsonl"]
    (tmp_path / "set" / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"gone\.jsonl: a link that leads nowhere \(to nowhere\)"):
        find_files([str(tmp_path / "set")])


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good" + SEPARATOR.encode() + b"\xff\xfe")
    good, bad = read_unit(plan_units(find_files([str(path)]), 1)[0], FORMAT)
    assert good.text == "good"
    assert "not UTF-8" in bad.problem


def test_inputs_that_cannot_be_used(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        find_files(["nowhere"])
    with pytest.raises(ConfigError, match=r"a\.jsonl: given twice"):
        find_files([str(text), str(tmp_path)])
    other = tmp_path / "a.csv"
    other.touch()
    with pytest.raises(ConfigError, match=r"a\.csv: unknown kind of file"):
        find_files([str(other)])
    text.unlink()
    with pytest.raises(ConfigError, match="no text in it"):
        find_files([str(tmp_path)])
    (tmp_path / FETCH_INCOMPLETE).touch()
    with pytest.raises(ConfigError, match="download has not ended"):
        find_files([str(tmp_path)])


def test_parquet_column_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "count": [1]}), path)
    with pytest.raises(ConfigError, match=r"no column 'text'; expected one of \['body', 'count'\]"):
        find_files([str(path)])
    with pytest.raises(ConfigError, match="'count' holds int64, expected strings"):
        find_files([str(path)], column="count")
    assert find_files([str(path)], column="body")


def test_demo_corpus() -> None:
    try:
        metadata.distribution(DEMO_PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{DEMO_PACKAGE} is not installed")
    found = read_all(["demo"])
    assert len(found) == 10_033
    assert any(text.startswith("2001: A Space Odyssey is a 1968 epic") for _, _, text in found)
