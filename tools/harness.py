"""Tasks of lm-evaluation-harness (the package lm-eval), scored at several loop counts.

The harness asks for the same likelihoods again for every loop count, so they are computed at all counts the first time
and looked up afterwards. Every process of a group runs the harness on all requests; the scoring is shared between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pretrain.errors import ConfigError
from pretrain.evaluation.requests import Encoder, Request, Scores
from pretrain.evaluation.run import TaskResult
from pretrain.evaluation.scoring import score
from tools.generate import generate
from tools.loading import Trained

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(
        f"tasks lm_eval:...: lm-evaluation-harness cannot be imported ({error}); pip install lm-eval"
    ) from error

DEFAULT_NEW_TOKENS = 256


class LoopedHarnessModel(LM):
    """The harness's view of a trained model at `loops` loops, one of `num_loops`."""

    def __init__(self, trained: Trained, encoder: Encoder, num_loops: Sequence[int], **scoring: Any) -> None:
        super().__init__()
        self.trained, self.encoder, self.num_loops, self.scoring = trained, encoder, list(num_loops), scoring
        self.loops = self.num_loops[0]
        self.asked: dict[str, dict[tuple[int, int], bool]] = {}
        """By task: whether the request of (document, number) lost its beginning."""
        self._known: dict[Request, tuple[list[float], list[bool]]] = {}

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is the greedy one) of each (context, continuation)."""
        asked = [self.encoder.request(*instance.args) for instance in requests]
        for instance, request in zip(requests, asked, strict=True):
            self._note(instance, request.cropped > 0)
        return self._scores(asked)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-probability of each whole text, in windows that do not overlap, each after <|bos|>."""
        windows = []
        for instance in requests:
            windows.append(self.encoder.windows(*instance.args))
            self._note(instance, False)
        found = iter(self._scores([window for own in windows for window in own]))
        return [sum(next(found)[0] for _ in own) for own in windows]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy continuations up to the first of the stop strings; a context too long loses its beginning."""
        tokenizer, texts = self.trained.tokenizer, []
        for instance in requests:
            context, settings = instance.args
            new = min(int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS)), self.encoder.context_length - 1)
            ids = [tokenizer.bos_token_id, *self.encoder.ids(context)]
            kept = ids[-(self.encoder.context_length - new) :]
            self._note(instance, len(kept) < len(ids))
            prompt = torch.tensor([kept], device=self.scoring["device"])
            out = generate(self.trained.model, prompt, new, temperature=0.0, num_loops=self.loops)[0, len(kept) :]
            text = tokenizer.decode(out.tolist(), skip_special_tokens=False)
            stops = [tokenizer.bos_token, *([u] if isinstance(u := settings.get("until", []), str) else u)]
            texts.append(text[: min(index if (index := text.find(stop)) >= 0 else len(text) for stop in stops)])
        return texts

    def _note(self, instance: Instance, cropped: bool) -> None:
        self.asked.setdefault(instance.task_name, {})[instance.doc_id, instance.idx] = cropped

    def _scores(self, asked: list[Request]) -> list[tuple[float, bool]]:
        new = [request for request in dict.fromkeys(asked) if request not in self._known]
        if new:
            found: list[Scores] = score(self.trained.model.loop_scores, new, self.num_loops, **self.scoring)
            for i, request in enumerate(new):
                self._known[request] = [-float(s.nats[i]) for s in found], [bool(s.greedy[i]) for s in found]
        at = self.num_loops.index(self.loops)
        return [(nats[at], greedy[at]) for nats, greedy in (self._known[request] for request in asked)]


def open_harness(names: Sequence[str], include_path: str | None) -> TaskManager:
    """The harness's tasks and those in the folder `include_path`. ConfigError for a name that is not among them."""
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(f"task lm_eval:{unknown[0]}: unknown to lm-evaluation-harness; its names: lm_eval ls tasks")
    return manager


def run_harness(
    model: LoopedHarnessModel, names: Sequence[str], manager: TaskManager, limit: int | None
) -> list[TaskResult]:
    """Results of the harness's tasks and groups at all of the model's loop counts."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for loops in model.num_loops:
        model.loops = loops
        output = simple_evaluate(model, tasks=list(names), limit=limit, task_manager=manager, log_samples=False)
        for task, values in output["results"].items():
            numbers = {k.removesuffix(",none"): v for k, v in values.items() if isinstance(v, float)}
            scores = {k: v for k, v in numbers.items() if "stderr" not in k}
            if scores:  # a group without a metric of its own has none
                found.setdefault(task, {})[loops] = scores
    results = []
    for task, by_loops in found.items():
        asked, headline = model.asked.get(task, {}), next(iter(by_loops[model.num_loops[0]]))
        results.append(TaskResult(f"lm_eval:{task}", headline, by_loops, len(asked), sum(asked.values())))
    return results
