"""A folder in Hugging Face form as a checkpoint that a training run starts from: the way back of convert_to_hf.

    python -m tools.convert_from_hf out/parcae_140m start/parcae_140m
    python pretrain/main.py --config mine.yaml checkpoint.initial_weights=start/parcae_140m

OUT holds the checkpoint, the tokenizer where the model has one, and model.yaml, whose model section fits the weights:
`base: start/parcae_140m/model.yaml` in mine.yaml. No code of the model's folder is run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf
from torch import Tensor

from pretrain.arguments import pathname
from pretrain.config.load import dump_config, load_config
from pretrain.config.model import ModelConfig
from pretrain.config.schema import CheckpointConfig, Config
from pretrain.errors import ConfigError, PretrainError
from pretrain.files import write_text
from pretrain.train.checkpoint.format import PARAMETER, TensorSlice
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.state import TrainState
from tools.hf_folder import TOKENIZER_FILES, read_folder, whole_folder


def convert(source: Path, out: Path) -> ModelConfig:
    """Writes `out` for the model in `source`, whole or not at all; returns its model section.

    Errors: ConfigError for a folder of another kind and where `out` exists; CheckpointError for
    tensors that do not fit.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: expected the folder of a model in Hugging Face form")
    cfg, tensors = read_folder(source)
    with whole_folder(out) as folder:
        model = OmegaConf.to_yaml(OmegaConf.create({"model": asdict(cfg)}))
        write_text(folder / "model.yaml", model)
        config = load_config(folder / "model.yaml")
        writer = CheckpointWriter(folder, CheckpointConfig(), dump_config(config), Ranks())
        writer.save(_slices(tensors), TrainState())
        files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
        if files:
            (folder / "tokenizer").mkdir()
        for path in files:
            shutil.copyfile(path, folder / "tokenizer" / path.name)
    assert config == Config(model=cfg), "model.yaml does not load back equal"
    return cfg


def _slices(tensors: Mapping[str, Tensor]) -> Iterator[TensorSlice]:
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        yield TensorSlice(name, PARAMETER, shape, (0,) * len(shape), tensor)


def main(argv: list[str]) -> int:
    """Converts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools.convert_from_hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("source", type=pathname, metavar="MODEL", help="folder in Hugging Face form")
    parser.add_argument("out", type=pathname, help="folder to make")
    args = parser.parse_args(argv)
    try:
        cfg = convert(args.source, args.out)
    except PretrainError as error:
        print(f"convert_from_hf: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.out}: {cfg.family}; start a run with checkpoint.initial_weights={args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
