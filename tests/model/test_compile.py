"""The compiled step: graphs neither for depths nor for lengths, and the numbers of the eager model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import FailOnRecompileLimitHit

from pretrain.model.attention_mask import Segments
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.looped import LoopedLM
from pretrain.sampling import DepthSampler
from tests.model.helpers import make_batch, train_loss
from tests.model.tiny import FAMILIES, random_model, tiny_config

ROWS, LENGTH = 6, 16


class CountingBackend:
    """torch.compile's aot_eager, counting the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def rows_of_tokens(seed: int, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(29, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def with_documents(batch: MicroBatch) -> MicroBatch:
    """The batch with a document border in every row, at another place in each."""
    places = torch.arange(LENGTH)
    borders = torch.arange(len(batch.rows))[:, None] + 3
    ids = (places >= borders).long()
    return batch._replace(document_ids=ids, positions=places - ids * borders, segments=Segments.of(ids))


def compiled_copy(model: LoopedLM) -> tuple[LoopedLM, CountingBackend]:
    backend = CountingBackend()
    copy = LoopedLM(model.cfg).eval()
    copy.load_state_dict(model.state_dict())
    copy.compile_core(backend=backend)
    return copy, backend


def assert_equal_training(eager: LoopedLM, compiled: LoopedLM, batch: MicroBatch, loops: Loops) -> None:
    expected, actual = train_loss(eager, batch, loops), train_loss(compiled, batch, loops)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        scale = float(one.grad.abs().max()) + 1e-3
        torch.testing.assert_close(other.grad / scale, one.grad / scale, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "documents"),
    [("parcae", True), ("flt", False), *(pytest.param(f, False, marks=pytest.mark.slow) for f in ("parcae", "rdm"))],
)
def test_two_graphs_for_all_depths(family: str, documents: bool) -> None:
    eager = random_model(tiny_config(family, {"mean_loops": 4.0, "backprop_loops": 3}, core_layers=1))
    compiled, backend = compiled_copy(eager)
    sampler = DepthSampler.from_config(eager.cfg.recurrence, seed=5, global_batch_size=ROWS)
    graphs = []
    for step in range(30):
        depths = sampler.draw(step)
        batch, loops, _ = make_batch(*rows_of_tokens(step), depths.no_grad_loops, depths.grad_loops)
        batch = with_documents(batch) if documents else batch
        if step < 3:
            assert_equal_training(eager, compiled, batch, loops)
        else:
            train_loss(compiled, batch, loops)
        graphs.append(backend.graphs)
    assert graphs[2] == graphs[-1] == 2, graphs
    # Evaluation has no graph of its own, also with one row.
    marks = {"document_ids": batch.document_ids[-1:], "positions": batch.positions[-1:]} if documents else {}
    actual, expected = (model.logits(batch.tokens[-1:], 6, **marks) for model in (compiled, eager))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert backend.graphs == 2


class Feature(NamedTuple):
    """What a compiled model may meet in training."""

    documents: bool = False
    tokens: bool = False
    """Loop counts of tokens."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    policy: str = "none"


FEATURES = {
    "plain": Feature(),
    "documents": Feature(documents=True, policy="loop"),
    "tokens": Feature(tokens=True, policy="every_k_loops"),
    "tokens, documents": Feature(tokens=True, documents=True),
    "window": Feature(settings={"sliding_window": 4}),
    "window, documents": Feature(settings={"sliding_window": 4}, documents=True, tokens=True),
}
EVERYDAY = (("parcae", "window, documents"), ("flt", "tokens"), ("blindspot", "plain"))


def everything() -> list[pytest.ParameterSet]:
    """Families by features; those that are not for every day are slow."""
    cases = []
    for family, feature in product((name for name in FAMILIES if name != "gpt"), FEATURES):
        marks = () if (family, feature) in EVERYDAY else pytest.mark.slow
        cases.append(pytest.param(family, feature, marks=marks, id=f"{family}-{feature}"))
    return cases


def counts_of(feature: Feature, seed: int, rows: int) -> tuple[Any, Any]:
    """n and k of rows, or of their tokens."""
    shape = (rows, LENGTH) if feature.tokens else (rows,)
    total = torch.randint(1, 7, shape, generator=torch.Generator().manual_seed(seed))
    grad = total.clamp(max=3)
    return (total - grad).numpy(), grad.numpy()


@pytest.mark.parametrize(("family", "name"), everything())
def test_a_graph_for_each_class_of_lengths(family: str, name: str) -> None:
    """Training and validation of whole rows, then tasks: rows of other lengths, without documents, in any number."""
    feature = FEATURES[name]
    eager = random_model(tiny_config(family, core_layers=1, **feature.settings)).train()
    compiled, backend = compiled_copy(eager)
    compiled.train()
    for model in (eager, compiled):
        model.checkpointing, model.loops_per_checkpoint = feature.policy, 2
    for step, rows in enumerate((4, 1, 5)):
        batch, loops, _ = make_batch(*rows_of_tokens(step, rows), *counts_of(feature, step, rows))
        assert_equal_training(eager, compiled, with_documents(batch) if feature.documents else batch, loops)
    assert backend.graphs == 2
    for model in (eager, compiled):
        model.eval()
    if feature.documents:
        batch = with_documents(make_batch(*rows_of_tokens(8, 3), [0] * 3, [1] * 3)[0])
        marks = {"document_ids": batch.document_ids, "positions": batch.positions}
        found, expected = (m.loop_losses(batch.tokens, batch.labels, [2, 4], **marks) for m in (compiled, eager))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    validated = backend.graphs
    graphs = []
    for lengths in ((LENGTH,), (7, 2, 13, 9), (1,), (20, 40)):
        if lengths[0] > LENGTH and eager.cfg.positions == "learned":
            continue
        for number, length in enumerate(lengths):
            tokens, labels = rows_of_tokens(9, 1 + 3 * (number % 2), length)
            for loops_asked in ([1, 3], [5]):
                found, expected = (model.loop_scores(tokens, labels, loops_asked) for model in (compiled, eager))
                torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)
        graphs.append(backend.graphs)
    # A mode that the layers look at, and masks or none, are graphs of their own; a length is not.
    assert validated <= 3 and graphs[0] - validated <= 1
    assert [b - a for a, b in pairwise(graphs)] == [1] * (len(graphs) - 1)
    batch, loops, _ = make_batch(*rows_of_tokens(3), *counts_of(feature, 3, ROWS))
    for model in (eager, compiled):
        model.train()
    assert_equal_training(eager, compiled, with_documents(batch) if feature.documents else batch, loops)
    assert backend.graphs == graphs[-1], "training has left its graphs for those of other lengths"


@pytest.mark.parametrize("policy", ["loop", pytest.param("every_k_loops", marks=pytest.mark.slow)])
def test_checkpointing_keeps_graphs_and_gradients(policy: str) -> None:
    eager = random_model(tiny_config("parcae_flt", {"mean_loops": 4.0}, core_layers=1))
    compiled, backend = compiled_copy(eager)
    compiled.checkpointing, compiled.loops_per_checkpoint = policy, 2
    batch, loops, _ = make_batch(*rows_of_tokens(1), [0, 0, 0, 1, 3, 2], [1, 2, 3, 4, 4, 4])
    assert_equal_training(eager, compiled, batch, loops)
    assert backend.graphs == 2


def test_recompilation_limit_is_an_error() -> None:
    """Past the limit nothing runs uncompiled: here for a second class of lengths."""
    model = random_model(tiny_config("parcae", core_layers=1))
    model.compile_core(backend=CountingBackend())
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
        for length in (4, 5, 16, 1):
            model.logits(torch.zeros(2, length, dtype=torch.int64), 2)
