"""Text to ids with the vocabulary of a saved tokenizer, at the speed of tiktoken and checked
against the tokenizer itself.

A Hugging Face tokenizer encodes 0.1-0.3M tokens/s per core, tiktoken 1.8-3.7M. Both merge by rank,
so the ids are equal if the vocabulary lists the merged tokens in the order of their merges and
nothing else; that is checked on construction, and `check` compares the ids of a sample.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.sources import one_document
from pretrain.data.manifest import TokenizerInfo, tokenizer_sha256
from pretrain.errors import ConfigError, DataError
from pretrain.foreign import read_json

GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Words, numbers of up to three digits, punctuation, white space (cl100k_base)."""
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the ByteLevel pre-tokenizer does by itself (GPT-2)."""


class Encoder:
    """Ids of documents under the byte-level BPE tokenizer saved in `folder`.

    Text never gives special ids: "<|bos|>" inside a document is encoded as plain characters.
    Errors: ConfigError for a tokenizer that is missing, has no <|bos|>, or is not a plain
    byte-level BPE.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info = read_tokenizer(self.folder)
        self._slow = _load(self.folder)
        self._slow.encode_special_tokens = True
        self._slow.no_truncation()
        self._slow.no_padding()
        saved = json.loads(self._slow.to_str())
        # Never matched (`encode` disallows none and allows none), yet needed: without any, tiktoken
        # looks for the empty pattern at every position, which halves the speed.
        special_tokens = {token["content"]: token["id"] for token in saved["added_tokens"]}
        pattern, ranks = _split_pattern(saved, self.folder), _ranks(saved, self.folder)
        try:
            self._fast = tiktoken.Encoding(
                "saved", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except Exception as error:  # of its own kinds: a pattern that is not of Rust's
            raise ConfigError(
                f"{self.folder}/tokenizer.json: tiktoken cannot take its pattern or vocabulary "
                f"({error}); train one with data_prep/train_tokenizer.py"
            ) from error

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of `text` without <|bos|>; uint32 [tokens].

        Errors: DocumentError for a text that the libraries cannot take, such as 1,000,000 blanks in a row.
        """
        with one_document("encoded"):
            ids: NDArray[np.uint32] = self._fast.encode_to_numpy(text, disallowed_special=())
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, with the special tokens spelt out."""
        text: str = self._slow.decode(ids, skip_special_tokens=False)
        return text

    def check(self, text: str, ids: NDArray[Any], where: str) -> None:
        """Raises DataError, naming `where`, if the saved tokenizer gives other ids for `text`;
        DocumentError if it cannot take the text."""
        with one_document("encoded by the saved tokenizer"):
            expected = self._slow.encode(text, add_special_tokens=False).ids
        if expected != ids.tolist():
            pairs = zip(expected, ids.tolist(), strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(ids)))
            raise DataError(
                f"{where}: fast ids differ from those of {self.folder} from token {at} "
                f"on: {ids[at : at + 4].tolist()} instead of {expected[at : at + 4]}; "
                "train a tokenizer with data_prep/train_tokenizer.py and use it"
            )


def read_tokenizer(folder: Path) -> TokenizerInfo:
    """Hash, vocabulary size and special ids of the tokenizer in `folder`, for a manifest."""
    sha256 = tokenizer_sha256(folder)
    slow = _load(folder)
    vocab = slow.get_vocab(with_added_tokens=True)
    config_path = folder / "tokenizer_config.json"
    if not config_path.is_file():
        raise ConfigError(
            f"{config_path}: missing; it names the special tokens; save the tokenizer again"
        )
    config = read_json(config_path, mend="save the tokenizer again")
    added = {token.content for token in slow.get_added_tokens_decoder().values()}
    ids = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise ConfigError(
                f"{config_path}: {name} is {token!r}, expected a string or null; save it again"
            )
        if token is not None and token not in vocab:
            raise ConfigError(
                f"{config_path}: {name} {token!r} is not in the vocabulary; save it again"
            )
        if token is not None and token not in added:  # text would hold it like any other
            raise ConfigError(
                f"{config_path}: {name} {token!r} is an ordinary token of the vocabulary, expected "
                "a special one that was added to it (added_tokens in tokenizer.json, special: "
                "true); add one and save the tokenizer again"
            )
        ids[name] = None if token is None else vocab[token]
    if ids["bos_token"] is None:
        raise ConfigError(
            f"{config_path}: no bos_token, with which every document begins; set one and save again"
        )
    return TokenizerInfo(
        path="tokenizer",
        sha256=sha256,
        vocab_size=max(vocab.values()) + 1,
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        pad_id=ids["pad_token"],
    )


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path}: not a saved tokenizer ({error}); save it again") from error


def _split_pattern(saved: dict[str, Any], folder: Path) -> str:
    """The pre-tokenizer's regular expression for words; ConfigError for other kinds."""
    pre = saved["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    *splits, last = steps
    byte_level = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if saved["normalizer"] is None and byte_level and len(splits) <= 1:
        if not splits and last.get("use_regex", True):
            return GPT2_PATTERN
        if splits and not last.get("use_regex", True) and _is_plain_split(splits[0]):
            pattern: str = splits[0]["pattern"]["Regex"]
            return pattern
    raise ConfigError(
        f"{folder}/tokenizer.json: normalizer {saved['normalizer']} and pre-tokenizer "
        f"{pre.get('type')} are not those of a plain byte-level BPE (no normalizer; a regular "
        "expression and ByteLevel without prefix space); "
        "train one with data_prep/train_tokenizer.py"
    )


def _is_plain_split(step: dict[str, Any]) -> bool:
    isolated = step.get("behavior") == "Isolated" and not step.get("invert")
    return step.get("type") == "Split" and isolated and "Regex" in step["pattern"]


def _ranks(saved: dict[str, Any], folder: Path) -> dict[bytes, int]:
    """Bytes -> id, which serves as merge rank; ConfigError where ids do not follow the merges."""
    model = saved["model"]
    added = {token["content"]: token["special"] for token in saved["added_tokens"]}
    byte_of = {char: byte for byte, char in _byte_chars().items()}
    vocab = {token: id_ for token, id_ in model.get("vocab", {}).items() if token not in added}
    merged: list[Any] = [vocab.get("".join(pair)) for pair in map(_pair, model.get("merges", []))]
    reasons = {
        f"model {model.get('type')} instead of BPE": model.get("type") != "BPE",
        "bytes missing from the vocabulary": not byte_of.keys() <= vocab.keys(),
        "added tokens that are not special": not all(added.values()),
        "dropout, byte fallback or affixes": any(
            model.get(key)
            for key in (
                "dropout",
                "byte_fallback",
                "continuing_subword_prefix",
                "end_of_word_suffix",
            )
        ),
        "merges into tokens that the vocabulary lacks": None in merged,
        "ids that do not follow the merges": None not in merged and merged != sorted(set(merged)),
        "tokens that no merge makes": len(vocab) != len(byte_of) + len(merged),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(
            f"{folder}/tokenizer.json: not a plain byte-level BPE: {'; '.join(found)}; "
            "train one with data_prep/train_tokenizer.py"
        )
    return {bytes(byte_of[char] for char in token): id_ for token, id_ in vocab.items()}


def _pair(merge: str | list[str]) -> list[str]:
    """The parts of a merge: tokenizer.json has a list or, in older files, one string."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _byte_chars() -> dict[int, str]:
    """GPT-2's stand-in for every byte: itself where printable, else a code point from 256 on."""
    plain = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
