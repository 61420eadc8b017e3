"""Tasks from files: what they ask, their metrics by hand, and what they refuse."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.core import CoreTask, core_score, read_core
from pretrain.evaluation.requests import Encoder, Scores
from pretrain.evaluation.run import core_by_loops, evaluate
from pretrain.evaluation.tasks import ChoiceTask, ContinuationTask, TextTask, read_request_task
from pretrain.model.looped import LoopedLM


def scores(nats: list[float], greedy: list[bool] | None = None, num_tokens: list[int] | None = None) -> Scores:
    size = len(nats)
    return Scores(np.array(nats), np.array(greedy or [False] * size), np.array(num_tokens or [1] * size))


def request(document: int, index: int, continuation: str, label: Any = 0) -> dict[str, Any]:
    text = {"context": "She was", "continuation": continuation}
    return {"doc_id": document, "idx": index, "label": label, "request": text}


def write_requests(folder: Path, rows: list[dict[str, Any]], compressed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if compressed:
        (folder / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / "requests.jsonl").write_text(text)


def test_multiple_choice(tmp_path: Path) -> None:
    rows = [request(d, i, c, 1) for d in (4, 7) for i, c in ((1, " north"), (0, " a"))]
    rows += [request(1_000_004, i, " x", 1) for i in (0, 1)]  # without the context: another metric's
    write_requests(tmp_path / "piqa" / "rc", rows, compressed=True)
    task = read_request_task(tmp_path, "piqa/rc")
    assert isinstance(task, ChoiceTask) and task.labels == [1, 1]
    assert [line.continuation for line in task.lines] == [" a", " north"] * 2
    # By sums " a" wins in the first document; per character " north" does, of six characters.
    found = task.metrics(scores([2.0, 3.0, 2.0, 1.0]))
    assert found["acc"] == 0.5 and found["acc_per_char"] == 1.0
    assert found["bpb"] == pytest.approx((3.0 + 1.0) / math.log(2) / 12)
    assert len(read_request_task(tmp_path, "piqa/rc", limit=1).lines) == 2


def test_continuations(tmp_path: Path) -> None:
    write_requests(tmp_path / "lambada", [request(d, 0, " born", ["born"]) for d in range(2)])
    task = read_request_task(tmp_path, "lambada")
    assert isinstance(task, ContinuationTask)
    found = task.metrics(scores([1.0, 3.0], [True, False]))
    assert found == {"acc": 0.5, "ppl": pytest.approx(math.exp(2)), "bpb": pytest.approx(4 / math.log(2) / 10)}


def test_texts_are_scored_token_by_token(encoder: Encoder, model: LoopedLM, tmp_path: Path) -> None:
    text = "The river runs to the sea, and she was born in the north. " * 4
    (tmp_path / "a.txt").write_text(text)
    (task,) = open_tasks([f"text:{tmp_path}"], None, None, None)
    assert isinstance(task, TextTask)
    (result,) = evaluate(model.loop_scores, [task], encoder, [2], batch_tokens=256, device=torch.device("cpu"))
    ids, bos = encoder.ids(text), encoder.tokenizer.bos_token_id
    assert result.num_requests == -(-len(ids) // 48) > 1
    nats = 0.0
    for start in range(0, len(ids), 48):
        window = torch.tensor([[bos, *ids[start : start + 48]]])
        nats += float(model.loop_losses(window[:, :-1], window[:, 1:], [2]).double().sum())
    assert result.by_loops[2]["bpb"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-6)
    assert result.by_loops[2]["loss"] == pytest.approx(nats / len(ids), rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"doc_id": 1}], "line 1: not a request"),
        ([request(0, 0, "")], "line 1: not a request .*expected texts, the second not empty"),
        ([request(0, 0, [" a"])], "line 1: not a request .*expected texts"),  # type: ignore[arg-type]
        ([request(0, 0, " a"), request(0, 2, " b")], r"choices \[0, 2\]"),
        ([request(0, 0, " a", 5), request(0, 1, " b", 5)], "label 5"),
        ([request(1_000_000, 0, " a")], "no request with a context"),
    ],
)
def test_malformed_requests(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    write_requests(tmp_path / "task", rows)
    with pytest.raises(ConfigError, match=message):
        read_request_task(tmp_path, "task")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "requests.jsonl.gz").write_bytes(gzip.compress(b"{}" * 999)[:-9])
    with pytest.raises(ConfigError, match=r"requests.jsonl.gz: cannot be read after line 0"):
        read_request_task(tmp_path, "task")
    (tmp_path / "text.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"text.txt: not a text in UTF-8"):
        open_tasks([f"text:{tmp_path / 'text.txt'}"], None, None, None)


LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1eg"
"""What str.splitlines takes for ends of lines, and JSON for text."""


def test_line_ends_of_unicode_are_text(bundle: Path, tmp_path: Path) -> None:
    path = bundle / "eval_data" / "some" / "language_modeling.jsonl"
    items = [{"context": LINE_ENDS, "continuation": f"x{i}"} for i in range(3)]
    path.write_text("\r\n".join(json.dumps(item, ensure_ascii=False) for item in items), encoding="utf-8", newline="")
    assert sorted(item["continuation"] for item in read_core(bundle)[2].items) == ["x0", "x1", "x2"]
    assert read_core(bundle)[2].items[0]["context"] == LINE_ENDS
    row = json.dumps(request(0, 0, LINE_ENDS), ensure_ascii=False)
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "requests.jsonl").write_text(row.replace("{", "{\r", 1) + "\n", encoding="utf-8", newline="")
    assert read_request_task(tmp_path, "task").lines[0].continuation == LINE_ENDS
    (tmp_path / "text.txt").write_bytes(b"one\r\ntwo\rthree\x0c")
    (task,) = open_tasks([f"text:{tmp_path / 'text.txt'}"], None, None, None)
    assert isinstance(task, TextTask) and task.texts == ["one\r\ntwo\rthree\x0c"]


@pytest.mark.parametrize("uri", ["../../secret.jsonl", "/etc/passwd", "some/../../../secret.jsonl", "C:\\x"])
def test_a_bundle_reads_its_own_files(bundle: Path, uri: str) -> None:
    text = (bundle / "core.yaml").read_text()
    (bundle / "core.yaml").write_text(text.replace("some/schema.jsonl", f"'{uri}'"))
    with pytest.raises(ConfigError, match=r"core\.yaml: my_schema: dataset_uri is .*, expected a relative path below"):
        read_core(bundle)


def test_texts_in_linked_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("linked")
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "other")
    (task,) = open_tasks([f"text:{tmp_path / 'texts'}"], None, None, None)
    assert isinstance(task, TextTask) and task.texts == ["linked"]
    (tmp_path / "texts" / "gone.txt").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"gone\.txt: a link that leads nowhere"):
        open_tasks([f"text:{tmp_path / 'texts'}"], None, None, None)


def test_unknown_names(tmp_path: Path) -> None:
    write_requests(tmp_path / "piqa" / "rc", [request(0, 0, " a")])
    write_requests(tmp_path / "sciq" / "rc", [request(0, 0, " a")])
    with pytest.raises(ConfigError, match=r"unknown task 'pica': .* has piqa/rc, sciq/rc"):
        read_request_task(tmp_path, "pica")
    with pytest.raises(ConfigError, match=r"unknown task 'piqa': .* has piqa/rc$"):
        read_request_task(tmp_path, "piqa")
    for names, message in (
        (["piqa/rc"], "task_data"), (["core"], "core_bundle"), (["text:/nowhere"], "no such file"),
        (["loss"], "tools/evaluate.py has it"), (["lm_eval:piqa"], "tools/evaluate.py has it"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            open_tasks(names, None, None, None)
    with pytest.raises(ConfigError, match="'piqa/rc' comes twice"):
        open_tasks(["piqa/rc", "piqa/rc"], str(tmp_path), None, None)


# ------------------------------------------------------------------------------------------------ DCLM's Core score

ITEMS = {
    "multiple_choice": [
        {"query": f"Where was she born, {i}?", "choices": ["in the north", "in the old south"], "gold": i % 2}
        for i in range(6)
    ],
    "schema": [
        {"context_options": ["The river", "The old land"], "continuation": f"runs {i}", "gold": 1} for i in range(5)
    ],
    "language_modeling": [{"context": f"The river {i} runs ", "continuation": "to the sea"} for i in range(4)],
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of three tasks, one of each kind, with one shot."""
    (tmp_path / "eval_data" / "some").mkdir(parents=True)
    lines = ["icl_tasks:"]
    for kind, items in ITEMS.items():
        (tmp_path / "eval_data" / "some" / f"{kind}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
        lines += [f"- label: my_{kind}", f"  dataset_uri: some/{kind}.jsonl", "  num_fewshot: [1]"]
        lines += [f"  icl_task_type: {kind}"]
    (tmp_path / "core.yaml").write_text("\n".join(lines))
    (tmp_path / "eval_meta_data.csv").write_text(
        "Eval Task,Task Category,Random baseline\nmy_multiple_choice,x,50\nmy_schema,x,50\nmy_language_modeling,x,0\n"
    )
    return tmp_path


def test_the_prompts_of_each_kind(bundle: Path, encoder: Encoder) -> None:
    choice, schema, language = read_core(bundle)
    wide = Encoder(encoder.tokenizer, 1_000)

    def texts(task: CoreTask) -> list[tuple[str, str]]:
        decode = encoder.tokenizer.decode
        return [(decode(r.tokens[1 : r.start]), decode(r.tokens[r.start :])) for r in task.requests(wide)]

    first = choice.items[0]
    shots, asked = texts(choice)[0][0].split("\n\n")
    assert shots.startswith("Where was she born, ") and shots.endswith(("in the north", "in the old south"))
    assert asked.startswith(first["query"]) and first["query"] not in shots
    # Both choices share "in the", which no choice is judged by.
    assert [(c + s).endswith(t) for (c, s), t in zip(texts(choice)[:2], first["choices"], strict=True)] == [True] * 2
    assert [s.strip() for _, s in texts(choice)[:2]] == ["north", "old south"]
    contexts = texts(schema)[:2]
    assert contexts[0][0].endswith("The river") and contexts[1][0].endswith("The old land")
    assert contexts[0][1] == contexts[1][1] == f" {schema.items[0]['continuation']}"
    context, continuation = texts(language)[0]
    assert context.endswith("runs") and continuation == " to the sea"


def test_a_choice_that_another_one_begins_with_keeps_its_last_token(encoder: Encoder) -> None:
    """As in two items of PIQA."""
    item = {"query": "Where?", "choices": ["in the north and south", "in the north"], "gold": 0}
    task = CoreTask("prefix", "multiple_choice", [item], 0, " ", 0.5)
    whole, beginning = task.requests(encoder)
    assert whole.start == beginning.start == len(beginning.tokens) - 1
    assert whole.tokens[: len(beginning.tokens)] == beginning.tokens


def test_core_metrics(bundle: Path) -> None:
    choice, schema, language = read_core(bundle)
    golds = [item["gold"] for item in choice.items]
    nats = [value for gold in golds for value in ((4.0, 9.0) if gold == 0 else (9.0, 4.0))]
    assert choice.metrics(scores(nats)) == {"acc": 1.0, "centered": 1.0}
    # The mean over tokens decides, not the sum.
    assert choice.metrics(scores(nats, num_tokens=[1, 9] * 6))["acc"] == pytest.approx(golds.count(1) / 6)
    assert schema.metrics(scores([1.0, 2.0] * 5)) == {"acc": 0.0, "centered": -1.0}
    assert language.metrics(scores([1.0] * 4, [True, False, True, False])) == {"acc": 0.5, "centered": 0.5}
    assert core_score({"a": {"centered": 1.0}, "b": {"centered": -0.5}, "c": {"acc": 1.0}}) == 0.25


def test_core_of_a_model(bundle: Path, encoder: Encoder, model: LoopedLM) -> None:
    tasks = open_tasks(["core"], None, str(bundle), None)
    wide = Encoder(encoder.tokenizer, 100)
    results = evaluate(model.loop_scores, tasks, wide, [1, 3], batch_tokens=512, device=torch.device("cpu"))
    core = core_by_loops(results)
    assert set(core) == {1, 3}
    assert core[3] == pytest.approx(np.mean([result.by_loops[3]["centered"] for result in results]))
    assert [len(task.items) for task in read_core(bundle, limit=3)] == [3, 3, 3]


def test_a_broken_bundle(bundle: Path) -> None:
    path = bundle / "eval_data" / "some" / "schema.jsonl"
    for text, message in (
        ('{"continuation": "x", "gold": 0}', "line 1: no field 'context_options'"),
        ('{"context_options": ["a", "b"], "continuation": "x", "gold": 2}', "line 1: gold=2: expected the place"),
        ('\n{"context_options":', "line 2: not valid JSON"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ('{"context_options": ["\\ud800", "b"], "continuation": "x", "gold": 0}', "line 1: not valid JSON"),
        ('{"context_options": ["a", "b"], "continuation": "x", "gold": 1.0}', "line 1: gold=1.0: expected the place"),
        ("5", "line 1: no field 'context_options'"),
        ('{"context_options": "ab", "continuation": "x", "gold": 0}', "line 1: context_options='ab': expected a list"),
        ('{"context_options": ["a"], "continuation": null, "gold": 0}', "line 1: continuation=None: expected a text"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(ConfigError, match=rf"schema.jsonl, {message}"):
            read_core(bundle)
    path.unlink()
    with pytest.raises(ConfigError, match=r"schema.jsonl: no such file; the task 'my_schema'"):
        read_core(bundle)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    with pytest.raises(ConfigError, match="no line for the task 'my_multiple_choice'"):
        read_core(bundle)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nmy_schema,100\n")
    with pytest.raises(ConfigError, match=r"my_schema: Random baseline 100: expected percent in \[0, 100\)"):
        read_core(bundle)
    (bundle / "eval_meta_data.csv").write_text("Task,Chance\nmy_schema,50\n")
    with pytest.raises(ConfigError, match=r"eval_meta_data.csv: expected columns `Eval Task`"):
        read_core(bundle)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    for text in ("- 1", "icl_tasks: [{label: x}]", "icl_tasks: {"):
        (bundle / "core.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"core.yaml: not a list of icl_tasks"):
            read_core(bundle)
    (bundle / "core.yaml").write_text("icl_tasks: []")
    with pytest.raises(ConfigError, match="expected at least one task"):
        read_core(bundle)
    (bundle / "core.yaml").unlink()
    with pytest.raises(ConfigError, match=r"core.yaml: not there"):
        read_core(bundle)
