"""Fast ids are those of the saved tokenizer; where they would not be, it is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep.encoding import Encoder
from pretrain.errors import ConfigError, DataError
from tests.data_prep.conftest import make_documents, save_tokenizer


def random_text(rng: random.Random) -> str:
    """Letters, digits, marks and blanks of many scripts in any order."""
    ranges = [
        (32, 127),
        (9, 14),
        (128, 768),
        (0x300, 0x370),
        (0x600, 0x700),
        (0x4E00, 0x4F00),
        (0x1F600, 0x1F640),
    ]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 80)))


def test_fast_ids_are_the_tokenizers(tokenizer: Path) -> None:
    encoder, rng = Encoder(tokenizer), random.Random(0)
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    reference.encode_special_tokens = True
    for text in [*make_documents(50, seed=1), *(random_text(rng) for _ in range(500))]:
        ids = encoder.encode(text)
        assert ids.dtype == np.uint32
        assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids
        assert encoder.decode(ids.tolist()) == text


def test_text_never_gives_special_ids(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer)
    assert (encoder.info.bos_id, encoder.info.eos_id, encoder.info.pad_id) == (0, 1, 2)
    assert encoder.info.vocab_size == 400
    ids = encoder.encode("a<|bos|>b<|eos|><|pad|>")
    assert ids.min() > 2
    encoder.check("a<|bos|>b<|eos|><|pad|>", ids, "here")


def test_other_ids_are_an_error(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer)
    ids = encoder.encode("the loop reads")
    ids = np.concatenate([ids[:1], ids[:1], ids[2:]])
    with pytest.raises(DataError, match=r"document 7: fast ids differ .* from token 1 on"):
        encoder.check("the loop reads", ids, "document 7")


def swap_two_ids(saved: dict[str, Any]) -> None:
    vocab = saved["model"]["vocab"]
    first, second = ("".join(saved["model"]["merges"][i]) for i in (0, 1))
    vocab[first], vocab[second] = vocab[second], vocab[first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_two_ids, "ids that do not follow the merges"),
        (lambda saved: saved["model"]["merges"].pop(), "tokens that no merge makes"),
        (
            lambda saved: saved["added_tokens"][1].update(special=False),
            "added tokens that are not special",
        ),
        (lambda saved: saved.update(normalizer={"type": "NFC"}), "normalizer {'type': 'NFC'}"),
        (
            lambda saved: saved["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
            "pre-tokenizer",
        ),
        (
            lambda saved: saved["pre_tokenizer"]["pretokenizers"][0].update(
                pattern={"Regex": r"\X"}
            ),
            r"tokenizer\.json: tiktoken cannot take its pattern or vocabulary \(",
        ),
    ],
)
def test_tokenizers_with_other_ids_are_refused(
    tokenizer: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    saved = json.loads((tokenizer / "tokenizer.json").read_text())
    change(saved)
    folder = save_tokenizer(tmp_path / "changed", Tokenizer.from_str(json.dumps(saved)))
    with pytest.raises(ConfigError, match=message):
        Encoder(folder)


def test_tokenizers_of_other_kinds_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<|bos|>": 0, "a": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens(["<|bos|>"])
    folder = save_tokenizer(tmp_path / "words", words, bos_token="<|bos|>")
    with pytest.raises(ConfigError, match="model WordLevel instead of BPE"):
        Encoder(folder)
    with pytest.raises(ConfigError, match=r"absent.*tokenizer\.json: missing"):
        Encoder(tmp_path / "absent")
    (folder / "tokenizer_config.json").write_text('{"bos_token": null}')
    with pytest.raises(ConfigError, match="no bos_token"):
        Encoder(folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    with pytest.raises(ConfigError, match="bos_token '<s>' is not in the vocabulary"):
        Encoder(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a saved tokenizer"):
        Encoder(folder)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
@pytest.mark.parametrize("token", ["e", {"content": "e"}])
def test_special_tokens_that_are_ordinary_ones_are_refused(
    tokenizer: Path, tmp_path: Path, name: str, token: object
) -> None:
    folder = save_tokenizer(tmp_path / "x", Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {name: token}))
    with pytest.raises(ConfigError, match=rf"{name} 'e' is an ordinary token of the vocabulary"):
        Encoder(folder)
    path.write_text(json.dumps(config | {name: ["e"]}))
    with pytest.raises(ConfigError, match=rf"{name} is \['e'\], expected a string or null"):
        Encoder(folder)
    path.write_bytes(b'{"bos_token": "\xff"}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not valid JSON"):
        Encoder(folder)


def test_gpt2_pre_tokenizer_is_understood(tokenizer: Path, tmp_path: Path) -> None:
    saved = json.loads((tokenizer / "tokenizer.json").read_text())
    saved["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    folder = save_tokenizer(tmp_path / "gpt2", Tokenizer.from_str(json.dumps(saved)))
    encoder, rng = Encoder(folder), random.Random(1)
    for text in [*make_documents(20, seed=2), *(random_text(rng) for _ in range(200))]:
        encoder.check(text, encoder.encode(text), "here")
