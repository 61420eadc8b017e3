"""The Core score of DCLM (arXiv:2406.11794, section 3.5): mean centred accuracy over 22 tasks with few-shot prompts.

Read from a folder in the layout that nanochat distributes as `eval_bundle`:

    core.yaml               icl_tasks: label, dataset_uri, num_fewshot: [k], icl_task_type, continuation_delimiter
    eval_meta_data.csv      columns `Eval Task` and `Random baseline` (in percent)
    eval_data/URI           jsonl: query, choices, gold | context_options, continuation, gold | context, continuation

Centred accuracy = (accuracy - random) / (1 - random): 0 at chance, 1 if everything is right.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import OmegaConf
from yaml import YAMLError

from pretrain.errors import ConfigError
from pretrain.evaluation.requests import Encoder, Request, Scores, common_prefix, common_suffix
from pretrain.foreign import check_name, parse_json

ORDER_SEED, SHOTS_SEED = 1337, 1234
"""nanochat's: which items a limited run takes, and (plus the item's number) which examples precede an item."""
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}
"""The field of which `gold` says the right one."""


@dataclass(frozen=True)
class CoreTask:
    """One task of the bundle. Metrics: `acc`, and `centered`."""

    name: str
    kind: str
    """multiple_choice: by the mean over the choice's tokens. schema: the context after which the continuation is most
    likely. language_modeling: every token of the continuation is the most likely one."""
    items: list[dict[str, Any]]
    num_shots: int
    delimiter: str
    random_baseline: float
    headline: str = "centered"

    def requests(self, encoder: Encoder) -> list[Request]:
        """One for each choice, context or item."""
        return [request for number in range(len(self.items)) for request in self._requests_of(number, encoder)]

    def metrics(self, scores: Scores) -> dict[str, float]:
        """See the class."""
        if self.kind == "language_modeling":
            accuracy = float(scores.greedy.mean())
        else:
            ends = np.cumsum([len(item[OPTIONS[self.kind]]) for item in self.items])
            parts = np.split(scores.nats / scores.num_tokens, ends[:-1])
            hits = [int(np.argmin(part)) == item["gold"] for part, item in zip(parts, self.items, strict=True)]
            accuracy = float(np.mean(hits))
        return {"acc": accuracy, "centered": (accuracy - self.random_baseline) / (1 - self.random_baseline)}

    def _requests_of(self, number: int, encoder: Encoder) -> list[Request]:
        item, shots = self.items[number], "".join(self._example(shot) for shot in self._shots(number))
        if self.kind == "multiple_choice":
            ids = [encoder.ids(shots + item["query"] + self.delimiter + choice) for choice in item["choices"]]
            # Of a choice that another one begins with nothing would be left (two of PIQA's items): its last token is.
            start = min(common_prefix(ids), max(0, min(map(len, ids)) - 1))
            return [encoder.tail(own, start) for own in ids]
        if self.kind == "schema":
            end = self.delimiter + item["continuation"]
            ids = [encoder.ids(shots + context + end) for context in item["context_options"]]
            scored = common_suffix(ids)
            return [encoder.tail(own, len(own) - scored) for own in ids]
        # A prompt that ends with the delimiter's blank would split the continuation's first token.
        prompt = (shots + item["context"].strip() + self.delimiter).rstrip()
        whole = encoder.ids(shots + item["context"].strip() + self.delimiter + item["continuation"])
        return [encoder.tail(whole, common_prefix([encoder.ids(prompt), whole]))]

    def _shots(self, number: int) -> list[dict[str, Any]]:
        others = [item for i, item in enumerate(self.items) if i != number]
        return random.Random(SHOTS_SEED + number).sample(others, self.num_shots)

    def _example(self, item: dict[str, Any]) -> str:
        """A solved item before the one that is asked."""
        if self.kind == "multiple_choice":
            text = item["query"] + self.delimiter + item["choices"][item["gold"]]
        elif self.kind == "schema":
            text = item["context_options"][item["gold"]] + self.delimiter + item["continuation"]
        else:
            text = item["context"].strip() + self.delimiter + item["continuation"]
        return f"{text}\n\n"


def read_core(bundle: Path, limit: int | None = None) -> list[CoreTask]:
    """The bundle's tasks, `limit` items of each drawn by a fixed shuffle. Errors: ConfigError naming file and field."""
    for name in ("core.yaml", "eval_meta_data.csv", "eval_data"):
        if not (bundle / name).exists():
            raise ConfigError(f"{bundle / name}: not there; expected nanochat's eval_bundle with core.yaml, "
                              "eval_meta_data.csv and eval_data/")  # fmt: skip
    baselines = _read_baselines(bundle / "eval_meta_data.csv")
    return [_read_task(bundle, entry, baselines, limit) for entry in _read_entries(bundle / "core.yaml")]


def core_score(results: dict[str, dict[str, float]]) -> float:
    """Mean centred accuracy of the tasks that have one."""
    return float(np.mean([metrics["centered"] for metrics in results.values() if "centered" in metrics]))


class _Entry(NamedTuple):
    """What core.yaml says of a task."""

    label: str
    kind: str
    uri: str
    num_shots: int
    delimiter: str


def _read_entries(path: Path) -> list[_Entry]:
    try:
        data: Any = OmegaConf.to_container(OmegaConf.load(path))
        entries = [
            _Entry(
                str(entry["label"]), str(entry["icl_task_type"]), str(entry["dataset_uri"]),
                int(entry["num_fewshot"][0]), str(entry.get("continuation_delimiter", " ")),
            )
            for entry in data["icl_tasks"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError, YAMLError) as error:
        raise ConfigError(
            f"{path}: not a list of icl_tasks with all fields ({type(error).__name__}: {error})"
        ) from error
    if not entries:
        raise ConfigError(f"{path}: icl_tasks=[]: expected at least one task")
    return entries


def _read_baselines(path: Path) -> dict[str, float]:
    """Accuracy at chance by the task's label."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ConfigError(
            f"{path}: expected columns `Eval Task` and `Random baseline` with a number ({error!r})"
        ) from error
    for label, baseline in baselines.items():
        if not 0 <= baseline < 1:
            raise ConfigError(f"{path}: {label}: Random baseline {100 * baseline:g}: expected percent in [0, 100)")
    return baselines


def _read_items(path: Path, kind: str) -> list[dict[str, Any]]:
    items = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        item = parse_json(line, where, mend="mend the line")
        _check_item(item, kind, where)
        items.append(item)
    return items


def _check_item(item: Any, kind: str, where: str) -> None:
    """ConfigError unless `item` has the fields of its kind: texts, a list of texts, the place of one of them."""
    missing = [name for name in FIELDS[kind] if not isinstance(item, dict) or name not in item]
    if missing:
        raise ConfigError(f"{where}: no field {missing[0]!r}; {kind} needs {', '.join(FIELDS[kind])}")
    options = OPTIONS.get(kind)
    for name in FIELDS[kind]:
        value = item[name]
        if name == options:
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise ConfigError(f"{where}: {name}={value!r}: expected a list of texts")
        elif name != "gold" and not isinstance(value, str):
            raise ConfigError(f"{where}: {name}={value!r}: expected a text")
    if options is not None and (type(item["gold"]) is not int or item["gold"] not in range(len(item[options]))):
        raise ConfigError(f"{where}: gold={item['gold']!r}: expected the place of one of {options}, from 0")


def _read_task(bundle: Path, entry: _Entry, baselines: dict[str, float], limit: int | None) -> CoreTask:
    where, label, shots = bundle / "core.yaml", entry.label, entry.num_shots
    if entry.kind not in FIELDS:
        raise ConfigError(f"{where}: {label}: icl_task_type={entry.kind!r}: expected {', '.join(FIELDS)}")
    if label not in baselines:
        raise ConfigError(f"{bundle / 'eval_meta_data.csv'}: no line for the task {label!r}")
    path = bundle / "eval_data" / check_name(entry.uri, f"{where}: {label}: dataset_uri")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the task {label!r} of {where} reads it")
    items = _read_items(path, entry.kind)
    random.Random(ORDER_SEED).shuffle(items)
    items = items[:limit]
    if len(items) <= shots:
        raise ConfigError(f"{path}: {len(items)} items, but the task {label!r} shows {shots} others before each")
    return CoreTask(label, entry.kind, items, shots, entry.delimiter, baselines[label])
