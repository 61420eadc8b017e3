"""The model card (README.md) of an exported model: what it is, what it was trained on, how to use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretrain.accounting import count_parameters
from pretrain.config.model import ModelConfig
from pretrain.config.schema import Config
from pretrain.data.manifest import MANIFEST_NAME, read_manifest
from pretrain.foreign import read_json
from pretrain.train.metrics import METRICS_NAME, read_metrics
from pretrain.train.state import TrainState

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [looped-language-model, recurrent-depth, {family}]
---

# {title}

A looped language model of the family `{family}`: a block of layers is used many times in a forward pass, and each call
chooses how often.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(PATH, trust_remote_code=True)
inputs = tokenizer("The river", return_tensors="pt")
tokens = model.generate(**inputs, num_loops={loops}, max_new_tokens=64)                 # more loops, more compute
tokens = model.generate(**inputs, exit_rule="kl", exit_threshold=1e-3, max_new_tokens=64)   # fewer where they suffice
```

`num_loops` defaults to {loops}. Exit rules: `kl`, `state`, `margin` (exit_looped.py). The cache keeps keys and values
of every loop; `config.cache_mode="last"` keeps those of the last one only and is not exact (cache_looped.py).
"""


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _loops(count: str) -> str:
    return f"{count} loop" if count == "1" else f"{count} loops"


def sizes(cfg: ModelConfig) -> dict[str, Any]:
    """Rows about the architecture."""
    count, recurrence = count_parameters(cfg), cfg.recurrence
    return {
        "family": cfg.family,
        "parameters": f"{count.stored:,} ({round(count.effective(recurrence.default_loops)):,} effective at "
        f"{recurrence.default_loops} loops)",
        "layers before, in and after the loop": f"{cfg.prelude_layers} / {cfg.core_layers} / {cfg.coda_layers}",
        "width, heads, MLP width": f"{cfg.width}, {cfg.num_heads}, {cfg.ffn_width}",
        "vocabulary, context": f"{cfg.vocab_size:,}, {cfg.context_length:,}",
        "loops in training": f"mean {recurrence.mean_loops:g}, {recurrence.distribution}, per {recurrence.granularity}",
    }


def card(cfg: ModelConfig, title: str, sections: dict[str, str]) -> str:
    """The text of a card: usage, sizes, and more sections by their headings."""
    parts = [_HEAD.format(family=cfg.family, title=title, loops=cfg.recurrence.default_loops), _table(sizes(cfg))]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections.items()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def run_card(config: Config, step: int, state: TrainState, run_folder: Path | None) -> str:
    """The card of a run's checkpoint; `run_folder`, where known, gives validation losses and the command line."""
    training: dict[str, Any] = {
        "step, tokens": f"{step:,} of {config.total_steps:,}, {state.tokens:,}",
        "global batch": f"{config.train.global_batch_size} rows of {config.model.context_length} tokens",
        "objective, optimizer": f"{config.loss.objective}, {config.optimizer.name}",
        "precision": f"{config.train.precision} products, fp32 parameters",
    }
    sections = {"Training": _table(training)}
    if config.validation.rows == 0:
        sections["Validation loss"] = "None: the run trained without validation (validation.rows=0)."
    if run_folder is not None:
        rows = [row for row in read_metrics(run_folder / METRICS_NAME) if "val_loss" in row and row["step"] <= step]
        if rows:
            found = rows[-1]["val_loss"].items()
            losses = {_loops(n): "not finite" if loss is None else f"{loss:.4f}" for n, loss in found}
            sections["Validation loss"] = f"Nats per token at step {rows[-1]['step']:,}.\n\n{_table(losses)}"
        environment = run_folder / "environment.json"
        if environment.is_file():
            sections["Command"] = f"```\n{read_json(environment).get('command_line')}\n```"
    sections["Data"] = "\n\n".join(_data(source.path) for source in config.data.all_sources)
    return card(config.model, config.run.name, sections)


def _data(path: str) -> str:
    folder = Path(path)
    if not (folder / MANIFEST_NAME).is_file():
        return f"`{folder.name}` (its manifest was not at hand when the model was exported)"
    manifest = read_manifest(folder, shards_are_local=False)
    rows: dict[str, Any] = {"tokenizer, sha256": manifest.tokenizer.sha256}
    for name, split in manifest.splits.items():
        rows[name] = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.rows:,} rows"
    source = json.dumps(manifest.source, indent=1, default=str)
    return f"`{folder.name}`\n\n{_table(rows)}\n\n```json\n{source}\n```"
