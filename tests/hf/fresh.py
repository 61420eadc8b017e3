"""What a user of exported models relies on; a script for a process that knows nothing of this project.

    python -I tests/hf/fresh.py FOLDER [FOLDER ...]

For each model: greedy text of 64 tokens is the same with and without cache, a batch of three prompts padded on the left
is each of them alone, beams and exit rules run, a cache of another kind is refused, saving and loading keep every bit,
and a step of fine-tuning lowers the loss. Prints one JSON line per model; exit code 1 with a traceback where one fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PROMPTS = ["the loop", "the loop reads its state twice and", "halts"]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 2}


def load(folder: str) -> Any:
    """The model as a user loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()


@torch.no_grad()
def generate(model: Any, tokenizer: Any) -> None:
    """Greedy, batched, beams, exit rules."""
    model.generation_config.eos_token_id = None  # else rows end where the model says so
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"][0, 0] == 0, "the tokenizer pads on the left"
    length, settings = batch["input_ids"].shape[1], GREEDY | {"num_loops": 3, "max_new_tokens": 64}
    together = model.generate(**batch, **settings)
    assert together.shape == (3, length + 64)
    without = model.generate(**batch, use_cache=False, **settings)
    assert torch.equal(without, together), "cache on and off"
    for row, prompt in zip(together, PROMPTS, strict=True):
        one = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**one, **settings)
        assert torch.equal(alone[0, one["input_ids"].shape[1] :], row[length:]), "batch and alone"
    settings = {"max_new_tokens": 8, "pad_token_id": 2}
    assert model.generate(**batch, num_beams=3, do_sample=False, **settings).shape[0] == 3
    model.generate(**batch, do_sample=True, exit_rule="kl", exit_threshold=0.01, **settings)
    never = model.generate(**batch, do_sample=False, exit_rule="state", exit_threshold=0.0, **settings)
    assert torch.equal(never, model.generate(**batch, do_sample=False, **settings))
    try:
        model(batch["input_ids"], past_key_values=DynamicCache())
    except TypeError as error:
        assert "LoopedCache" in str(error)
    else:
        raise AssertionError("a DynamicCache was taken")


def reload(model: Any) -> None:
    """save_pretrained and from_pretrained keep every bit, and the modelling files come along."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = load(folder)
        own, other = model.state_dict(), again.state_dict()
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def fine_tune(model: Any, tokenizer: Any) -> None:
    """One step on a text."""
    ids = tokenizer(PROMPTS[1], return_tensors="pt")["input_ids"]
    optimizer = torch.optim.SGD(model.train().parameters(), 1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids, num_loops=2).loss
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0], losses


def main(folders: list[str]) -> int:
    """Runs all checks on each folder."""
    torch.set_num_threads(1)
    for folder in folders:
        model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        generate(model, tokenizer)
        reload(model)
        fine_tune(model, tokenizer)
        assert "pretrain" not in sys.modules
        print(json.dumps({"folder": folder, "transformers": transformers.__version__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
