"""Tasks of lm-evaluation-harness, from local files, where the package is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.evaluation.requests import Encoder
from pretrain.evaluation.run import evaluate
from pretrain.evaluation.tasks import ChoiceTask, Line
from pretrain.model.looped import LoopedLM
from tools.generate import generate
from tools.loading import Trained

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install lm-eval)")

CHOICES = [("The river runs", [" to the sea", " in the north"], i % 2) for i in range(5)] + [
    ("She was born", [" of the old land", " in the south", " and he"], 2)
]
TASKS = {
    "my_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "my_text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}{{choices[0]}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "my_answer": {
        "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture
def trained(model: LoopedLM, encoder: Encoder) -> Trained:
    return Trained(model, encoder.tokenizer, Config(model=model.cfg), 0, "")


@pytest.fixture
def task_files(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three tasks over CHOICES; the answer is what the model says at 3 loops."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    rows = [{"context": c, "choices": o, "label": label, "answer": said(trained, c, 3)} for c, o, label in CHOICES]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(json.dumps(source | {"test_split": "test"} | task))
    (tmp_path / "my_group.yaml").write_text(json.dumps({"group": "my_group", "task": list(TASKS)}))
    return tmp_path


def said(trained: Trained, context: str, num_loops: int) -> str:
    """The model's greedy continuation of six tokens, up to an end of document."""
    ids = torch.tensor([trained.tokenizer(context)["input_ids"]])
    new = generate(trained.model, ids, 6, temperature=0.0, num_loops=num_loops)[0, ids.shape[1] :]
    text: str = trained.tokenizer.decode(new)
    return text.split(trained.tokenizer.bos_token)[0].split("\n\n")[0]


def test_the_harness_sees_what_our_own_tasks_see(
    trained: Trained, encoder: Encoder, task_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools import harness

    calls, loop_scores = [0], trained.model.loop_scores

    def counted(*args: Any) -> torch.Tensor:
        calls[0] += 1
        return loop_scores(*args)

    common: dict[str, Any] = {"batch_tokens": 10_000, "device": torch.device("cpu"), "group": None}
    with monkeypatch.context() as patch:
        patch.setattr(trained.model, "loop_scores", counted)
        manager = harness.open_harness(list(TASKS), str(task_files))
        view = harness.LoopedHarnessModel(trained, encoder, [1, 3], **common)
        found = harness.run_harness(view, ["my_group"], manager, None)  # without a metric of its own
    results = {result.task: result.by_loops for result in found}
    assert {result.task: result.num_requests for result in found} == {
        "lm_eval:my_choice": 13, "lm_eval:my_text": 6, "lm_eval:my_answer": 6
    }  # fmt: skip
    assert calls[0] == 2, "one pass for choices, one for texts, whatever the number of loop counts"
    lines = [Line(i, context, option) for i, (context, options, _) in enumerate(CHOICES) for option in options]
    task = ChoiceTask("own", lines, [label for *_, label in CHOICES])
    (own,) = evaluate(trained.model.loop_scores, [task], encoder, [1, 3], **common)
    for loops in (1, 3):
        assert results["lm_eval:my_choice"][loops]["acc"] == pytest.approx(own.by_loops[loops]["acc"])
        texts = [context + options[0] for context, options, _ in CHOICES]
        nats = 0.0
        for text in texts:
            ids = torch.tensor([trained.tokenizer(text)["input_ids"]])
            nats += float(trained.model.loop_losses(ids[:, :-1], ids[:, 1:], [loops]).sum())
        bits = nats / math.log(2) / sum(map(len, texts))
        assert results["lm_eval:my_text"][loops]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert results["lm_eval:my_answer"][3]["exact_match"] == 1.0


def test_an_unknown_name_is_refused() -> None:
    from tools import harness

    with pytest.raises(ConfigError, match="task lm_eval:my_chioce: unknown to lm-evaluation-harness"):
        harness.open_harness(["my_chioce"], None)
