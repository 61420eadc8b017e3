"""Saved tokenizers as transformers reads them, which is imported where one is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.data.manifest import tokenizer_sha256
from pretrain.errors import ConfigError
from pretrain.foreign import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`. Errors: ConfigError where its files are missing or cannot be read."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_sha256(folder)
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{folder}: its tokenizer cannot be read ({error}); restore its files") from error
