"""Checks exported models against what their exporter computed. A script for a fresh process, by itself:

    python -I tools/hf_check.py FOLDER CASE.safetensors [FOLDER CASE.safetensors ...]

It imports nothing of this project, loads each FOLDER as a user does (AutoModelForCausalLM, trust_remote_code) and
compares: every tensor's checksum, fp32 logits at several loop counts, greedy continuation, token ids of the text.
CASE holds `tokens` and `logits.T` for each loop count T, `prompt` and `greedy`, and in its metadata the checksums and
the text. Prints one JSON line of the largest differences per model; exit code 1 where anything is missing or differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

TOLERANCE = 1e-4
"""Of fp32 logits, absolute; relative to the largest logit (1e-6) where logits are above 100."""


def checksum(tensor: torch.Tensor) -> str:
    """sha256 of type, shape and bytes."""
    head = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(head + content.tobytes()).hexdigest()


def read_case(path: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, metadata) of a case."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["case"])  # noqa: SIM118


def check(folder: str, case: str, report: dict[str, float]) -> Iterator[str]:
    """What is wrong with the model in `folder`; nothing for a sound one. `report` gets the largest differences."""
    from transformers import AutoModelForCausalLM

    tensors, expected = read_case(case)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
    found = {name: checksum(tensor) for name, tensor in model.state_dict().items()}
    for name in sorted(found.keys() | expected["checksums"].keys()):
        if found.get(name) != expected["checksums"].get(name):
            yield f"tensor {name} is not the one that was exported"
    model = model.float()
    yield from _check_logits(model, tensors, report)
    yield from _check_greedy(model, tensors, expected["num_loops"])
    if expected["text"] is not None:
        yield from _check_tokenizer(folder, tensors["tokens"], expected["text"])


@torch.no_grad()
def _check_logits(model: Any, tensors: dict[str, torch.Tensor], report: dict[str, float]) -> Iterator[str]:
    for name, reference in tensors.items():
        if name.startswith("logits."):
            loops = int(name.removeprefix("logits."))
            difference = float((model(tensors["tokens"], num_loops=loops).logits - reference).abs().max())
            report[str(loops)] = difference
            allowed = max(TOLERANCE, 1e-6 * float(reference.abs().max()))
            if not difference <= allowed:
                yield f"logits at {loops} loops differ by {difference:.2e}, at most {allowed:.0e} expected"


@torch.no_grad()
def _check_greedy(model: Any, tensors: dict[str, torch.Tensor], num_loops: int) -> Iterator[str]:
    prompt, greedy = tensors["prompt"], tensors["greedy"]
    model.generation_config.eos_token_id = None
    settings = {"do_sample": False, "num_loops": num_loops, "pad_token_id": 0}
    own = model.generate(prompt, max_new_tokens=greedy.shape[1] - prompt.shape[1], **settings)
    if torch.equal(own, greedy):
        return
    place = int((own != greedy).int().argmax())
    logits = model(greedy[:, :place], num_loops=num_loops).logits[0, -1]
    gap = float(logits.max() - logits[greedy[0, place]])
    if gap > TOLERANCE:  # else a tie, which rounding decides
        yield f"greedy text differs from token {place} on, by {gap:.2e} in the logits"


def _check_tokenizer(folder: str, tokens: torch.Tensor, text: str) -> Iterator[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer(text)["input_ids"][: tokens.shape[1]]
    if ids != tokens[0].tolist():
        yield f"the exported tokenizer gives other ids: {ids[:8]}..., expected {tokens[0, :8].tolist()}..."


def main(arguments: list[str]) -> int:
    """Checks the pairs of folder and case; returns the exit code."""
    failed = False
    for folder, case in zip(arguments[::2], arguments[1::2], strict=True):
        report: dict[str, float] = {}
        problems = list(check(folder, case, report))
        if "pretrain" in sys.modules:
            problems.append("the model needs this project's package")
        print(json.dumps({"folder": folder, "logits_difference": report, "problems": problems}), flush=True)
        failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
