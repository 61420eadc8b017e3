"""The settings that a saved tokenizer needs to feed these models through transformers. Stdlib only."""

from __future__ import annotations

import json
from pathlib import Path

from pretrain.foreign import read_json

CONFIG_NAME = "tokenizer_config.json"


def fit_for_generation(folder: Path, context_length: int | None = None) -> None:
    """Rewrites the folder's tokenizer_config.json, so that `model.generate(**tokenizer(texts, padding=True))` works.

    Padding goes to the left, where generation does not see it; of what a tokenizer can return, the models take ids and
    mask alone. Errors: ConfigError where the file is no JSON object.
    """
    path = folder / CONFIG_NAME
    settings = read_json(path, mend="save the tokenizer again") if path.is_file() else {}
    settings |= {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if context_length is not None:
        settings["model_max_length"] = context_length
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
