"""Evaluation is deterministic, row by row, at any loop count, and equal to decoding with a cache.

In fp64 where two ways of computing are compared, so that a difference is the model's and not the rounding's.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from pretrain.model.cache import LoopCache
from pretrain.model.looped import LoopedLM
from tests.model.tiny import FAMILIES, random_model, tiny_config

LENGTH = 16


@cache
def _model(family: str, dtype: torch.dtype = torch.float64) -> LoopedLM:
    return random_model(tiny_config(family), dtype=dtype)


def _assert_close(own: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    """Within `tolerance` of the largest value."""
    torch.testing.assert_close(own, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


def _tokens(rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(29, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_are_equal_and_leave_the_global_generator_alone(family: str) -> None:
    model, tokens = _model(family), _tokens()
    generator = torch.get_rng_state()
    first = model.logits(tokens, 3)
    torch.manual_seed(99)
    moved = torch.get_rng_state()
    assert torch.equal(model.logits(tokens, 3), first)
    assert torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_is_the_row_in_a_batch(family: str) -> None:
    tokens = _tokens()
    for dtype in (torch.float64, torch.float32):
        model = _model(family, dtype)
        together = model.logits(tokens, 3)
        alone = torch.cat([model.logits(row[None], 3) for row in tokens])
        if dtype == torch.float64:
            # 16 tokens are whole blocks of a matrix product's rows, of 4 or 8 by the CPU: none rounds in another way.
            assert torch.equal(together, alone)
        else:
            _assert_close(together, alone, 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_loop_counts_above_the_trained_mean(family: str) -> None:
    model, tokens = _model(family), _tokens()
    labels = tokens.roll(-1, 1)
    loops = [1, 2, 4, 30]
    losses = model.loop_losses(tokens, labels, loops)
    assert losses.shape == (4, 3, LENGTH) and losses.isfinite().all()
    for count, loss in zip(loops, losses, strict=True):
        logits = model.logits(tokens, count)
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)


def test_the_default_loop_count_is_the_mean() -> None:
    model = random_model(tiny_config("parcae", {"mean_loops": 2.6}))
    assert torch.equal(model.logits(_tokens()), model.logits(_tokens(), 3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 4])
def test_decoding_with_a_cache_is_the_full_forward(family: str, loops: int) -> None:
    model, tokens = _model(family), _tokens()
    full, cache = model.logits(tokens, loops), LoopCache()
    # A prompt, then a piece of several tokens, then one by one.
    pieces = [tokens[:, :5], tokens[:, 5:8], *tokens[:, 8:].split(1, dim=1)]
    decoded = torch.cat([model.logits(piece, loops, cache=cache) for piece in pieces], dim=1)
    _assert_close(decoded, full)
    assert cache.length == LENGTH


@pytest.mark.parametrize("family", ["parcae", "flt"])
def test_decoding_with_a_cache_under_a_sliding_window(family: str) -> None:
    model = random_model(tiny_config(family, sliding_window=4, window_pattern="SL"), dtype=torch.float64)
    tokens, cache = _tokens(), LoopCache()
    full = model.logits(tokens, 2)
    pieces = [tokens[:, :7], *tokens[:, 7:].split(1, dim=1)]
    decoded = torch.cat([model.logits(piece, 2, cache=cache) for piece in pieces], dim=1)
    _assert_close(decoded, full)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_the_one_before_it(family: str) -> None:
    model, tokens = _model(family), _tokens()
    documents = (torch.arange(LENGTH) >= 5).long().expand(3, -1)
    positions = torch.cat((torch.arange(5), torch.arange(LENGTH - 5))).expand(3, -1)
    changed = tokens.clone()
    changed[:, :5] = (changed[:, :5] + 7) % 29
    masked = [model.logits(x, 3, document_ids=documents, positions=positions) for x in (tokens, changed)]
    assert torch.equal(masked[0][:, 5:], masked[1][:, 5:])
    assert not torch.equal(masked[0][:, :5], masked[1][:, :5])
    alone = model.logits(tokens[:, 5:], 3)
    _assert_close(masked[0][:, 5:], alone)
    mixed = [model.logits(x, 3) for x in (tokens, changed)]
    assert not torch.equal(mixed[0][:, 5:], mixed[1][:, 5:])


@pytest.mark.parametrize("family", ["parcae", "flt", "blindspot"])
def test_padding_on_the_left_changes_nothing(family: str) -> None:
    model, tokens = _model(family), _tokens()
    padding = 4
    padded = torch.cat((torch.zeros(3, padding, dtype=torch.int64), tokens), 1)
    positions = (torch.arange(LENGTH + padding) - padding).clamp(min=0).expand(3, -1)
    valid = (torch.arange(LENGTH + padding) >= padding).expand(3, -1)
    logits = model.logits(padded, 2, key_valid=valid, positions=positions)[:, padding:]
    expected = model.logits(tokens, 2)
    _assert_close(logits, expected)


def test_a_sliding_window_hides_what_lies_behind_it() -> None:
    cfg = tiny_config("parcae", prelude_layers=0, core_layers=1, coda_layers=1, sliding_window=3, window_pattern="S")
    model, tokens = random_model(cfg), _tokens()
    assert cfg.window_of("core", 0) == 3 and cfg.window_of("coda", 0) is None
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 29

    def states(x: Tensor, loops: int) -> Tensor:
        *_, (h, _) = model.states(x, loops)
        return h

    for loops, reach in ((1, 2), (2, 4), (3, 6)):
        differs = (states(tokens, loops) != states(changed, loops)).any(-1).any(0)
        assert differs[: reach + 1].all() and not differs[reach + 1 :].any(), (loops, differs)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_a_later_one(family: str) -> None:
    model, tokens = _model(family), _tokens()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 3) % 29
    a, b = model.logits(tokens, 3), model.logits(changed, 3)
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7:], b[:, 7:])
