"""Train a byte-level BPE tokenizer with <|bos|>, <|eos|>, <|pad|>; saved for Hugging Face.

Sources are those of build_shards.py. Of a large corpus a sample is read: ranges of the files in
random order, until --sample-bytes of text. 32,768 ids from 50 MB took 85 s on 2 cores and 330 MB.

`AutoTokenizer.from_pretrained(OUT)` reads the result; `tokenizer(text)` puts <|bos|> before the
text, as in the data sets.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data_prep.encoding import GPT4_PATTERN, Encoder
from data_prep.sources import (
    KINDS,
    DocumentError,
    SourceFile,
    TextFormat,
    find_files,
    plan_units,
    read_unit,
)
from data_prep.tasks import command
from pretrain.arguments import integer, pathname
from pretrain.data.tokenizer_files import fit_for_generation
from pretrain.errors import ConfigError

SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
"""Ids 0, 1, 2."""
_LONG_RUN = re.compile(r"\s{5000}|[^\W\d_]{5000}|[^\w\s]{5000}")
"""Blanks, letters, marks: what the split pattern leaves in one piece. A piece of 1,000,000 characters
trains for over 100 s (stopped then), since every merge of it walks through all of it."""
RANGE_BYTES = 1 << 22
"""Source bytes of a sampled range."""


def train_tokenizer(
    inputs: list[str],
    out: Path,
    vocab_size: int = 32_768,
    sample_bytes: int = 200_000_000,
    seed: int = 0,
    text_format: TextFormat | None = None,
) -> None:
    """Writes the tokenizer's folder `out`, complete or not at all; its ids are exactly 0 ..
    vocab_size - 1.

    Errors: ConfigError if `out` exists, for sources that cannot be used, and if the text is too
    little for the vocabulary.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ConfigError(
            f"--vocab-size is {vocab_size}, expected at least {smallest} (special tokens and bytes)"
        )
    if out.exists():
        raise ConfigError(f"{out}: exists; choose another --out or remove it")
    text_format = text_format or TextFormat()
    files = find_files(inputs, text_format.column)
    started = time.perf_counter()
    sample = list(sample_documents(files, sample_bytes, seed, text_format))
    tokenizer = _new_tokenizer()
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stderr.isatty(),
        ),
        length=len(sample),
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"--vocab-size is {vocab_size}, the text gives only {tokenizer.get_vocab_size()} "
            "tokens; give more text or that size"
        )
    _save(tokenizer, out, check=sample[:100])
    size = sum(len(text.encode()) for text in sample)
    print(
        f"{out}: {vocab_size:,} tokens from {len(sample):,} documents, {size / 1e6:.1f} MB of "
        f"text, {time.perf_counter() - started:.0f} s"
    )


def sample_documents(
    files: list[SourceFile], sample_bytes: int, seed: int, text_format: TextFormat
) -> Iterator[str]:
    """Documents of ranges in random order, at most RANGE_BYTES of text from each, until
    `sample_bytes` of text.

    Documents that cannot be used are left out here (build_shards.py reports them), and so are those
    with a run of one kind of characters so long that merging it would take hours.
    """
    units = plan_units(files, RANGE_BYTES)
    random.Random(seed).shuffle(units)
    for unit in units:
        unit_bytes = 0
        for document in read_unit(unit, text_format):
            if sample_bytes <= 0:
                return
            if unit_bytes >= RANGE_BYTES and len(units) > 1:
                break
            if document.text and not _LONG_RUN.search(document.text):
                yield document.text
                unit_bytes += len(document.text.encode())
                sample_bytes -= len(document.text.encode())


def _new_tokenizer() -> Tokenizer:
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(GPT4_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)]
    )
    return tokenizer


def _save(tokenizer: Tokenizer, out: Path, check: list[str]) -> None:
    """Saves as PreTrainedTokenizerFast, reads it back as build_shards.py will, and only then gives
    it its name."""
    from transformers import PreTrainedTokenizerFast

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS
    )
    try:
        saved.save_pretrained(temporary)
        fit_for_generation(temporary)
        encoder = Encoder(temporary)
        for text in check:
            with contextlib.suppress(DocumentError):  # the builder reports it
                ids = encoder.encode(text)
                encoder.check(text, ids, "sample")
                if encoder.decode(ids.tolist()) != text:
                    raise AssertionError(f"byte-level BPE did not give back {text[:80]!r}")
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python data_prep/train_tokenizer.py data/fineweb_edu "
        "--out data/tokenizer",
    )
    add = parser.add_argument
    add("sources", nargs="+", help=f"demo, files or folders; {', '.join(KINDS)}")
    add("--out", type=pathname, required=True, help="folder of the tokenizer; must not exist")
    add(
        "--vocab-size", type=integer(most=2**24), default=32_768, help="with special tokens and bytes (%(default)s)"
    )
    add(
        "--sample-bytes",
        type=integer(1),
        default=200_000_000,
        help="UTF-8 bytes of text to train on (%(default)s)",
    )
    add("--seed", type=integer(0), default=0, help="of the sample (%(default)s)")
    add(
        "--text-column",
        default="text",
        help="key of jsonl objects, column of parquet (%(default)s)",
    )
    add("--text-separator", help="between documents of .txt files; default: a file is a document")
    values = vars(parser.parse_args())
    text_format = TextFormat(
        column=values.pop("text_column"), separator=values.pop("text_separator")
    )
    train_tokenizer(values.pop("sources"), text_format=text_format, **values)


if __name__ == "__main__":
    command(main)
