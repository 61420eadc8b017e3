"""Generation with a cache equals generation without: greedy, beams, batches, cropping, exit rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from pretrain.hf.cache_looped import LoopedCache
from pretrain.hf.modeling_looped import CACHE_NAME, LoopedForCausalLM
from tests.hf.models import model, pair, tokens
from tests.model.tiny import FAMILIES

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def decode(exported: LoopedForCausalLM, ids: Tensor, pieces: list[int], cache: LoopedCache, **settings: Any) -> Tensor:
    """Logits of ids [B, S], fed in pieces of the given lengths."""
    parts = [exported(part, past_key_values=cache, **settings).logits for part in ids.split(pieces, dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_forward(family: str) -> None:
    exported, ids = model(family, torch.float64), tokens(2, 11)
    for loops in (1, 2, 4):
        cache = exported.new_cache()
        decoded = decode(exported, ids, [5, 3, 1, 1, 1], cache, num_loops=loops)
        torch.testing.assert_close(decoded, exported(ids, num_loops=loops).logits)
        config = exported.config
        assert len(cache) == config.prelude_layers + loops * config.core_layers + config.coda_layers
        assert cache.get_seq_length() == 11


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_batch_is_each_alone_with_cache_and_without(family: str) -> None:
    """Three prompts of different lengths, padded on the left. fresh.py does the same with trained models."""
    exported, prompts = model(family), [tokens(1, n, seed=n) for n in (3, 9, 6)]
    padded = torch.cat([torch.nn.functional.pad(p, (9 - p.shape[1], 0), value=2) for p in prompts])
    mask = torch.stack([torch.arange(9) >= 9 - p.shape[1] for p in prompts]).long()
    settings = GREEDY | {"max_new_tokens": 24, "num_loops": 2}
    together = exported.generate(padded, attention_mask=mask, **settings)
    for row, prompt in zip(together, prompts, strict=True):
        alone = exported.generate(prompt, **settings)
        assert torch.equal(row[9:], alone[0, prompt.shape[1] :])
    without = exported.generate(padded, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(without, together)


@pytest.mark.parametrize("family", ["parcae", "flt", "blindspot"])
@torch.no_grad()
def test_beams_and_sampling(family: str) -> None:
    exported, ids = model(family), tokens(2, 5)
    settings = {"max_new_tokens": 8, "num_loops": 3, "eos_token_id": None}
    beams = exported.generate(ids, num_beams=4, num_return_sequences=2, do_sample=False, **settings)
    slow = exported.generate(ids, num_beams=4, num_return_sequences=2, do_sample=False, use_cache=False, **settings)
    assert beams.shape == (4, 13) and torch.equal(beams, slow)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        drawn.append(exported.generate(ids, do_sample=True, use_cache=use_cache, **settings))
    assert torch.equal(*drawn)


@torch.no_grad()
def test_generation_keeps_a_cache_by_itself() -> None:
    exported, ids = model("parcae"), tokens(1, 4)
    result = exported.generate(ids, max_new_tokens=3, num_loops=2, return_dict_in_generate=True, **GREEDY)
    cache = result[CACHE_NAME]
    assert isinstance(cache, LoopedCache) and (cache.get_seq_length(), len(cache)) == (6, 2 + 2 * 2)
    assert exported(ids).get(CACHE_NAME) is None


@pytest.mark.parametrize("family", ["parcae", "parcae_flt", "flt", "rdm", "blindspot"])
@torch.no_grad()
def test_an_assistant_changes_nothing(family: str) -> None:
    """A model of another size, of another family, and the model itself; and candidates from the prompt."""
    exported, ids = model(family), tokens(1, 5)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 1}
    for loops in ({"num_loops": 3}, {"num_loops": 4, "exit_rule": "state", "exit_threshold": 0.3}):
        alone = exported.generate(ids, **loops, **settings)
        for assistant in (pair("parcae", prelude_layers=2)[1], model("blindspot"), exported):
            for _ in range(2):  # the second call finds the assistant as the first left it
                assert torch.equal(exported.generate(ids, assistant_model=assistant, **loops, **settings), alone)
        assert torch.equal(exported.generate(ids, prompt_lookup_num_tokens=3, **loops, **settings), alone)


@torch.no_grad()
def test_more_loops_than_in_training_and_the_default() -> None:
    exported, ids = model("parcae"), tokens(1, 4)
    by_default = exported.generate(ids, max_new_tokens=4, **GREEDY)
    assert torch.equal(by_default, exported.generate(ids, max_new_tokens=4, num_loops=8, **GREEDY))
    assert exported.generate(ids, max_new_tokens=4, num_loops=40, **GREEDY).shape == (1, 8)


@torch.no_grad()
def test_foreign_caches_and_settings_are_refused() -> None:
    exported, ids = model("parcae"), tokens(1, 4)
    with pytest.raises(TypeError, match=r"transformers\.cache_utils\.DynamicCache, expected a LoopedCache"):
        exported(ids, past_key_values=DynamicCache())
    with pytest.raises(TypeError, match="DynamicCache, expected a LoopedCache"):
        exported.generate(ids, max_new_tokens=2, **{CACHE_NAME: DynamicCache()})
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        exported.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="num_lops"):
        exported.generate(ids, max_new_tokens=2, num_lops=3)
    with pytest.raises(ValueError, match="cache mode 'half': expected one of full, last"):
        exported.new_cache("half")


@pytest.mark.parametrize("mode", ["full", "last"])
@torch.no_grad()
def test_cropping_and_reordering(mode: str) -> None:
    exported, ids = model("parcae_flt", torch.float64), tokens(2, 8)
    cache = exported.new_cache(mode)
    exported(ids, past_key_values=cache, num_loops=3)
    for length in (6, -1):  # keep 6; then remove 1
        cache.crop(length)
    assert cache.get_seq_length() == 5
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    new = tokens(3, 2, seed=3)
    continued = exported(new, past_key_values=cache, num_loops=3).logits
    straight = exported.new_cache(mode)
    rows = ids[torch.tensor([1, 0, 0]), :5]
    exported(rows, past_key_values=straight, num_loops=3)
    torch.testing.assert_close(continued, exported(new, past_key_values=straight, num_loops=3).logits)


@torch.no_grad()
def test_the_shared_cache_holds_one_loop() -> None:
    exported, ids = model("parcae", torch.float64), tokens(2, 8)
    caches = {mode: exported.new_cache(mode) for mode in ("full", "last")}
    prompt = {mode: exported(ids, past_key_values=cache, num_loops=5).logits for mode, cache in caches.items()}
    assert torch.equal(prompt["full"], prompt["last"]), "a prompt sees its own loops"
    layers = exported.config.num_hidden_layers
    assert len(caches["last"]) == layers and caches["last"].num_bytes == 2 * 2 * 8 * layers * 16 * 8
    assert caches["full"].num_bytes == caches["last"].num_bytes * (2 + 5 * 2) // layers
    one = [decode(exported, ids, [4, 1, 3], exported.new_cache(mode), num_loops=1) for mode in ("full", "last")]
    assert torch.equal(*one), "one loop has nothing to share"
    more = tokens(2, 1, seed=5)
    after = [exported(more, past_key_values=cache, num_loops=5).logits for cache in caches.values()]
    assert not torch.allclose(*after)


# ---------------------------------------------------------------------------------------------------------- exit rules

NEVER = {"kl": 0.0, "state": 0.0, "margin": 1.0}
AT_ONCE = {"kl": (1e9, 2), "state": (1e9, 2), "margin": (0.0, 1)}
"""(threshold that is met at once, the loop where)"""
SOMETIMES = {"kl": 0.2, "state": 0.6, "margin": 0.3}


@pytest.mark.parametrize("rule", NEVER)
@pytest.mark.parametrize("family", ["parcae", "parcae_flt", "flt", "blindspot"])
@torch.no_grad()
def test_thresholds_that_are_never_or_at_once_met(family: str, rule: str) -> None:
    exported, ids = model(family), tokens(2, 9)
    full, settings = exported(ids, num_loops=5).logits, {"num_loops": 5, "exit_rule": rule}
    never = exported(ids, exit_threshold=NEVER[rule], **settings)
    assert torch.equal(never.logits, full) and (never.exit_loops == 5).all()
    assert torch.equal(exported(ids, exit_threshold="never", **settings).logits, full)
    threshold, loops = AT_ONCE[rule]
    forced = exported(ids, exit_threshold=threshold, **settings)
    assert (forced.exit_loops == loops).all()
    assert torch.equal(forced.logits, exported(ids, num_loops=loops).logits)
    text = exported.generate(ids, max_new_tokens=6, exit_threshold=threshold, **settings, **GREEDY)
    assert torch.equal(text, exported.generate(ids, max_new_tokens=6, num_loops=loops, **GREEDY))


@pytest.mark.parametrize("rule", SOMETIMES)
@pytest.mark.parametrize("family", ["parcae", "parcae_flt", "flt", "rdm"])
@torch.no_grad()
def test_tokens_exit_by_themselves(family: str, rule: str) -> None:
    """The same loops and logits in one pass, token by token, alone, in a batch and behind padding."""
    exported, ids = model(family, torch.float64), tokens(3, 12)
    settings = {"num_loops": 6, "exit_rule": rule, "exit_threshold": SOMETIMES[rule]}
    whole = exported(ids, **settings)
    assert whole.exit_loops.unique().numel() > 1, "the threshold decides nothing"
    torch.testing.assert_close(decode(exported, ids, [4] + [1] * 8, exported.new_cache(), **settings), whole.logits)
    for row in range(3):
        alone = exported(ids[row : row + 1], **settings)
        assert torch.equal(alone.exit_loops[0], whole.exit_loops[row])
        torch.testing.assert_close(alone.logits[0], whole.logits[row])
    mask = torch.cat((torch.zeros(3, 4), torch.ones(3, 12)), 1)
    padded = exported(torch.cat((torch.full((3, 4), 2), ids), 1), mask, **settings)
    assert torch.equal(padded.exit_loops[:, 4:], whole.exit_loops)
    torch.testing.assert_close(padded.logits[:, 4:], whole.logits)


@torch.no_grad()
def test_entries_of_loops_that_a_token_did_not_run_are_those_of_its_last() -> None:
    """Four tokens after two loops, then one that runs four: by hand, in the cache's own slots."""
    exported, ids = model("lt", torch.float64), tokens(1, 5)
    cache = exported.new_cache()
    exported(ids[:, :4], past_key_values=cache, num_loops=2)
    logits = exported(ids[:, 4:], past_key_values=cache, num_loops=4).logits
    filled = exported.new_cache()
    exported(ids[:, :4], past_key_values=filled, num_loops=2)
    for loop in (2, 3):
        for slot in [s for s in filled.slots if s.loop == 1]:
            filled.slots[slot._replace(loop=loop)] = filled.slots[slot]
    assert torch.equal(exported(ids[:, 4:], past_key_values=filled, num_loops=4).logits, logits)
    again = exported(ids[:, :1], past_key_values=cache, num_loops=1).logits
    assert torch.isfinite(again).all() and cache.get_seq_length() == 6


@torch.no_grad()
def test_a_cache_without_readouts_cannot_serve_an_exit_rule() -> None:
    exported, ids, cache = model("parcae"), tokens(1, 5), model("parcae").new_cache()
    exported(ids[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match="no readout entries for 4 of 4 tokens"):
        exported(ids[:, 4:], past_key_values=cache, exit_rule="kl", exit_threshold=0.1)
    assert cache.get_seq_length() == 4
    exported(ids[:, 4:], past_key_values=cache, exit_rule="state", exit_threshold=0.1)
