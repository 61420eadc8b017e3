"""What the key/value cache gains and costs: speed of the next token after a long text, memory per token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.hf.configuration_looped import LoopedConfig
from pretrain.hf.modeling_looped import LoopedForCausalLM
from tools.hf_format import hf_config

METHOD = """\
The model of tools/convert_to_hf.py, one row. `no cache` runs the whole text for each token. `full` keeps keys and
values of every loop, `last` of the last one only (not exact: docs/huggingface.md). Tokens per second are those of the
tokens after a text of 512; a figure is the median of the rounds, the three taking turns.
"""
TEXT_TOKENS = 512


@torch.no_grad()
def cache_section(cfg: ModelConfig, rounds: int, device: torch.device) -> list[str]:
    """A section as Markdown lines, for a model of the sizes of `cfg`; also printed."""
    config = LoopedConfig(**hf_config(cfg) | {"context_length": 2 * TEXT_TOKENS})
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = LoopedForCausalLM(config).to(device, dtype).eval()
    text = torch.randint(cfg.vocab_size, (1, TEXT_TOKENS), device=device)
    caches = {mode: model.new_cache(mode) for mode in ("full", "last")}
    for cache in caches.values():
        model(text, past_key_values=cache, logits_to_keep=1)
    token = text[:, -1:]
    calls: dict[str, Callable[[], object]] = {
        "no cache": lambda: model(torch.cat((text, token), 1), logits_to_keep=1),
        **{mode: _next_token(model, cache, token) for mode, cache in caches.items()},
    }
    sec: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                sec[name].append(time.perf_counter() - started)
    layers = f"P/R/C {cfg.prelude_layers}/{cfg.core_layers}/{cfg.coda_layers}"
    title = f"## Cache of generation: {config.num_loops} loops, {layers}, d {cfg.width}, vocabulary {cfg.vocab_size:,}"
    lines = [title, "", *METHOD.splitlines(), ""]
    lines += ["| cache | tokens/s after 512 tokens | KiB per token |", "|---|---|---|"]
    for name, values in sec.items():
        kib = caches[name].num_bytes / caches[name].length / 1024 if name in caches else 0
        lines.append(f"| {name} | {1 / statistics.median(values):.2f} | {kib:.1f} |")
    print("\n".join(lines), flush=True)
    return [*lines, ""]


def _next_token(model: LoopedForCausalLM, cache: object, token: Tensor) -> Callable[[], object]:
    return lambda: model(token, past_key_values=cache)
