"""A trained model as a folder that transformers loads, generates with and fine-tunes.

    python -m tools.convert_to_hf runs/parcae_140m out/parcae_140m [--dtype bf16]

Reads the newest complete checkpoint of a run, or one checkpoint's folder, whatever layout saved it. The folder is
loaded in a fresh process and compared with the native model before it gets its name (tools/hf_check.py); after any
difference there is none, and the exit code is not 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from pretrain.arguments import pathname
from pretrain.config.load import load_config
from pretrain.data.sources import tokenizer_folder
from pretrain.errors import ConfigError, PretrainError
from pretrain.train.checkpoint.find import open_checkpoint
from tools.hf_folder import Export, export, is_hf_folder
from tools.hf_format import DTYPES, exported_config, exported_tensors
from tools.loading import read_parameters
from tools.model_card import run_card

SIZE = re.compile(r"[1-9][0-9]*(KB|MB|GB|TB)")


def load_export(path: Path, dtype: str, tokenizer: Path | None, max_shard_size: str) -> Export:
    """What is to be written for the run or checkpoint in `path`. Errors: as tools.loading.load_model."""
    if not path.is_dir() or is_hf_folder(path):
        raise ConfigError(f"{path}: expected the folder of a run or of a checkpoint, found {_kind(path)}")
    if SIZE.fullmatch(max_shard_size) is None:
        raise ConfigError(f"--max-shard-size {max_shard_size}: expected a size such as 5GB or 500MB")
    with open_checkpoint(path) as reader:
        config, checkpoints = load_config(reader.config_path), reader.folder.parent
        run_folder = checkpoints.parent if checkpoints.name == "checkpoints" else None
        return Export(
            cfg=exported_config(config.model),
            tensors=read_parameters(config, reader),
            dtype=DTYPES[dtype],
            card=run_card(config, reader.step, reader.state(), run_folder),
            tokenizer=tokenizer or tokenizer_folder(config),
            max_shard_size=max_shard_size,
        )


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a model in Hugging Face form (config.json)"
    return "a file" if path.exists() else "nothing"


def main(argv: list[str]) -> int:
    """Exports; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools.convert_to_hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("path", type=pathname, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=pathname, help="folder to make")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of the stored weights (%(default)s)")
    parser.add_argument("--tokenizer", type=pathname, help="its folder (default: that of the run's first data set)")
    parser.add_argument("--max-shard-size", default="5GB", help="size of a weights file (%(default)s)")
    args = parser.parse_args(argv)
    try:
        model = load_export(args.path, args.dtype, args.tokenizer, args.max_shard_size)
        differences = export(model, args.out)
    except PretrainError as error:
        print(f"convert_to_hf: error: {error}", file=sys.stderr)
        return error.exit_code
    if left_out := sorted(model.tensors.keys() - exported_tensors(model.tensors).keys()):
        print(f"left out, since only auxiliary losses use them: {', '.join(left_out)}")
    shown = ", ".join(f"{value:.1e} at {loops}" for loops, value in differences.items())
    print(f"{args.out}: loads as exported; logits differ from the native model's by (loops) {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
