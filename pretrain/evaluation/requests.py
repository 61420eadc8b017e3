"""What a task asks of a model: the log-probability of a continuation, as token ids; and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Request(NamedTuple):
    """Tokens of which those from `start` on are scored, given all before them."""

    tokens: tuple[int, ...]
    start: int
    """>= 1."""
    cropped: int = 0
    """Tokens that were taken from the beginning, since the context is too short."""
    candidates: tuple[int, ...] = ()
    """Ids among which the most likely token is sought. Empty: all."""


class Scores(NamedTuple):
    """Of R requests at one loop count."""

    nats: NDArray[np.float64]
    """[R] negative log-likelihood of the scored tokens, summed."""
    greedy: NDArray[np.bool_]
    """[R] whether each scored token is the most likely one of the request's candidates."""
    num_tokens: NDArray[np.int64]
    """[R] scored tokens."""


class Task(Protocol):
    """One benchmark."""

    @property
    def name(self) -> str:
        """As the user asked for it."""

    @property
    def headline(self) -> str:
        """The metric of the table and the plot."""

    def requests(self, encoder: Encoder) -> list[Request]:
        """All requests, in the order of the scores that `metrics` takes."""

    def metrics(self, scores: Scores) -> dict[str, float]:
        """Metrics at one loop count."""


@dataclass(frozen=True)
class Encoder:
    """Text to requests: <|bos|> first, and cropped on the left to the model's context."""

    tokenizer: PreTrainedTokenizerFast
    context_length: int

    def ids(self, text: str) -> list[int]:
        """Ids of `text` without special tokens."""
        # verbose: texts longer than the context are no mistake here.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def windows(self, text: str) -> list[Request]:
        """All of `text`, in windows of `context_length` tokens that do not overlap, each after <|bos|>."""
        ids, size = self.ids(text), self.context_length
        return [self.tail(ids[i : i + size], 0) for i in range(0, len(ids), size)]

    def request(self, context: str, continuation: str) -> Request:
        """Scores `continuation` after `context`.

        Both are encoded as one text. Where a token reaches over their border it is scored as a whole.
        """
        ids = self.ids(context + continuation)
        return self.tail(ids, common_prefix([self.ids(context), ids]))

    def tail(self, ids: Sequence[int], start: int, stop: int | None = None) -> Request:
        """Scores ids[start:stop]; what follows is left out. ConfigError where there is nothing to score.

        Of a continuation that alone is longer than the context, the end is scored.
        """
        stop = len(ids) if stop is None else stop
        if start >= stop:
            raise ConfigError(f"{self.tokenizer.decode(ids)[-80:]!r}: a continuation without a token of its own")
        tokens = (self.tokenizer.bos_token_id, *ids[:stop])
        # The last token is only predicted, so that context_length + 1 fit.
        cropped = max(0, len(tokens) - self.context_length - 1)
        return Request(tokens[cropped:], max(1, start + 1 - cropped), cropped)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of what all sequences begin with."""
    shortest = min(map(len, sequences))
    return next((i for i in range(shortest) if len({s[i] for s in sequences}) > 1), shortest)


def common_suffix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of what all sequences end with."""
    return common_prefix([s[::-1] for s in sequences])
