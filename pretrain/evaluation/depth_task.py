"""Depth tasks as benchmarks: accuracy at each depth, and how deep a model solves, at every number of loops. No torch.

A problem is one request whose answer is sought among the ids that answers of the task are made of, so that one pass
over it tells which answer the model takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from pretrain.data.manifest import MANIFEST_NAME, read_manifest
from pretrain.errors import ConfigError
from pretrain.evaluation.depth import PROBLEMS, DepthProblems, Problem, Walk
from pretrain.evaluation.requests import Encoder, Request, Scores, Task, common_prefix

DEPTH_PREFIX = "depth:"
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
"""Where none are asked for: those of them that fit the model's context."""
NUM_PROBLEMS = 128
"""At each depth."""
SOLVED = 0.95
"""Accuracy from which on a depth counts as solved."""
SOLVED_DEPTH, ACCURACY = "solved_depth", "acc_depth_{}"
"""Names of the metrics."""

Encode = Callable[[str], Sequence[int]]
"""Ids of a text without special tokens."""


@dataclass(frozen=True)
class DepthTask:
    """One task at several depths.

    Metrics: `acc_depth_K`, the share of the problems of depth K whose whole answer is the most likely one among the
    task's answers, token by token; `solved_depth`, the largest depth at which, and at all smaller ones measured, it is
    at least SOLVED (0: none).
    """

    name: str
    problems: DepthProblems
    depths: tuple[int, ...]
    """Rising."""
    may_leave_out: bool
    """Whether depths that do not fit the context are left out, rather than an error."""
    num_problems: int = NUM_PROBLEMS
    headline: str = SOLVED_DEPTH

    def requests(self, encoder: Encoder) -> list[Request]:
        """`num_problems` requests of each depth, which must fit (`fit_depths`). ConfigError as `at_depths`."""
        tokenizer = encoder.tokenizer
        by_depth = self.at_depths(encoder.ids, tokenizer.unk_token_id, encoder.context_length)
        encoded = [item for items in by_depth.values() for item in items]
        candidates = {*self._choice_ids(encoder.ids)[1], *(i for ids, start in encoded for i in ids[start:])}
        return [encoder.tail(ids, start)._replace(candidates=tuple(sorted(candidates))) for ids, start in encoded]

    def metrics(self, scores: Scores) -> dict[str, float]:
        """See the class."""
        accuracies = scores.greedy.reshape(-1, self.num_problems).mean(1).tolist()
        by_depth = dict(zip(self.depths, accuracies, strict=True))
        solved = 0
        for depth, accuracy in by_depth.items():
            if accuracy < SOLVED:
                break
            solved = depth
        return {SOLVED_DEPTH: float(solved)} | {ACCURACY.format(depth): value for depth, value in by_depth.items()}

    def at_depths(
        self, encode: Encode, unknown_id: int | None, context_length: int
    ) -> dict[int, list[tuple[list[int], int]]]:
        """(ids, where the answer starts) of the problems of each depth that fits.

        Errors: ConfigError for a tokenizer that does not know the task's words or has no single token for an answer,
        and for depths beyond the context: of one that was asked for, or of the first.
        """
        unknown = [word for word in self.problems.words if unknown_id is not None and unknown_id in encode(word)]
        if unknown:
            raise ConfigError(
                f"task {self.name!r}: the model's tokenizer does not know {unknown[0]!r}, one of the task's words: "
                "expected a model trained on the task's data set (data_prep/depth_tasks.py), or one of ordinary text"
            )
        blanks, _ = self._choice_ids(encode)
        by_depth: dict[int, list[tuple[list[int], int]]] = {}
        for depth in self.depths:
            problems = self.problems.evaluation_problems(depth, self.num_problems)
            items = [_encoded(encode, problem, blanks) for problem in problems]
            # After <|bos|> all but the last token are read.
            needed = max(len(ids) for ids, _ in items)
            if needed > context_length:
                if not self.may_leave_out or not by_depth:
                    raise ConfigError(
                        f"task {self.name!r}: problems of depth {depth} have up to {needed} tokens: expected at most "
                        f"the context's {context_length}; ask for smaller depths (evaluation.depths, --depths; of a "
                        "data set --max-depth) or give it longer rows (--row-tokens)"
                    )
                break
            by_depth[depth] = items
        return by_depth

    def _choice_ids(self, encode: Encode) -> tuple[int, list[int]]:
        """(tokens between a context and the first of an answer's own, such as a blank; the id of each choice)."""
        context = self.problems.evaluation_problems(1, 1)[0].context
        texts = [list(encode(f"{context} {choice}")) for choice in self.problems.choices]
        start = common_prefix(texts)
        for choice, ids in zip(self.problems.choices, texts, strict=True):
            if len(ids) != start + 1:
                raise ConfigError(
                    f"task {self.name!r}: the model's tokenizer makes {len(ids) - start} tokens of the answer "
                    f"{choice!r}: expected one of its own for each answer; use a data set of data_prep/depth_tasks.py "
                    "or a tokenizer with a larger vocabulary"
                )
        return start - common_prefix([list(encode(context)), texts[0]]), [ids[-1] for ids in texts]


def fit_depths(tasks: Sequence[Task], encoder: Encoder) -> tuple[list[Task], list[str]]:
    """(the tasks, depth tasks without the depths that do not fit the context; a note for each where some do not).

    To be called before anything is scored. ConfigError as `at_depths`.
    """
    fitting: list[Task] = []
    notes = []
    for task in tasks:
        if isinstance(task, DepthTask):
            by_depth = task.at_depths(encoder.ids, encoder.tokenizer.unk_token_id, encoder.context_length)
            if left_out := [str(depth) for depth in task.depths if depth not in by_depth]:
                notes.append(
                    f"{task.name}: depths {', '.join(left_out)} are left out: their problems do not fit into the "
                    f"context of {encoder.context_length} tokens"
                )
            task = replace(task, depths=tuple(by_depth))
        fitting.append(task)
    return fitting, notes


def open_depth_task(name: str, depths: Sequence[int], limit: int | None) -> DepthTask:
    """`depth:NAME`: a task of this package, or the one that the data set in the folder NAME was made for.

    `depths` empty: DEPTHS. Errors: ConfigError for an unknown name, and for depths that the task does not have.
    """
    problems = find_problems(name.removeprefix(DEPTH_PREFIX), name)
    largest = problems.max_depth
    if largest is not None and (absent := [depth for depth in depths if depth > largest]):
        raise ConfigError(f"task {name!r}: depth {absent[0]}: expected at most {largest}, where its names end")
    chosen = depths or [depth for depth in DEPTHS if largest is None or depth <= largest]
    return DepthTask(name, problems, tuple(sorted(set(chosen))), not depths, limit or NUM_PROBLEMS)


def find_problems(name: str, asked: str) -> DepthProblems:
    """The problems called `name`, or those of the data set in that folder; `asked` is what the user wrote."""
    if name in PROBLEMS:
        return PROBLEMS[name]
    if not (Path(name) / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"unknown task {asked!r}: expected {', '.join(DEPTH_PREFIX + known for known in PROBLEMS)}, or "
            f"{DEPTH_PREFIX}FOLDER with a data set of data_prep/depth_tasks.py"
        )
    made_with = read_manifest(name, shards_are_local=False).source.get("arguments", {})
    if made_with.get("task") not in PROBLEMS:
        raise ConfigError(f"task {asked!r}: the data set {name} was not made by data_prep/depth_tasks.py")
    if made_with.get("generators"):
        return Walk(made_with["task"], made_with["generators"])
    return PROBLEMS[made_with["task"]]


def plain_encoder(folder: Path) -> tuple[Encode, int | None]:
    """(ids of a text without special tokens, id of unknown words) of the tokenizer saved in `folder`; without torch.

    Errors: ConfigError where there is none.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path}: not a saved tokenizer ({error}); save it again") from error
    unknown_id = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, unknown_id


def _encoded(encode: Encode, problem: Problem, blanks: int) -> tuple[list[int], int]:
    """(ids, where the answer starts), of context and answer encoded as one text."""
    ids = list(encode(f"{problem.context} {problem.answer}"))
    return ids, common_prefix([list(encode(problem.context)), ids]) + blanks
