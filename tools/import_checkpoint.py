"""A published checkpoint as a folder in Hugging Face form, which convert_from_hf also turns into a start of training.

    python -m tools.import_checkpoint --family parcae SRC OUT

SRC is a folder in the authors' form: config.json, and model.safetensors, model.pt or pytorch_model.bin with their
names.

    parcae      config.json with _class_name (sandyresearch/parcae)
    huginn      seal-rg/recurrent-pretraining
    flt         FuRuF-11/FullyLoopedTransformer and its baselines
    blindspot   Rituraj003/readout-blind-spot

Every tensor must be known and none may be missing; what their code never reads is listed. Pickles are read by torch's
restricted reader (weights_only). A tokenizer.json in SRC comes along.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from pretrain.arguments import pathname
from pretrain.errors import CheckpointError, ConfigError, PretrainError
from pretrain.model.imports import Imported, Source, import_checkpoint
from tools.hf_folder import Export, export, read_config, read_safetensors
from tools.hf_format import DTYPES
from tools.model_card import card

PICKLES = ("model.pt", "pytorch_model.bin")
CLASS_NAMES = {"parcae": "ParcaeConfig"}
"""What `_class_name` of a family's config.json says, where it has one."""


def read_published(family: Source, source: Path) -> Imported:
    """The model in `source`, in this model's terms.

    Errors: ConfigError for a folder or configuration of another kind; CheckpointError for a file that cannot be read
    and for tensors that are missing, unknown or misshapen.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: expected the folder of a {family} checkpoint")
    path = source / "config.json"
    config = read_config(source)
    found = config.get("_class_name")
    if found != CLASS_NAMES.get(family):
        raise ConfigError(
            f"{path}: _class_name={found!r}: expected {CLASS_NAMES.get(family)!r} of family {family}; is it another "
            "family's (--family)?"
        )
    return import_checkpoint(family, config, read_weights(source))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors (or its shards), else of model.pt or pytorch_model.bin."""
    if any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        return read_safetensors(folder)
    path = next((folder / name for name in PICKLES if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder}: no weights; expected model.safetensors, {' or '.join(PICKLES)}")
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged pickle raises may be anything
        raise CheckpointError(f"{path}: cannot be read as tensors alone ({error})") from error
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CheckpointError(f"{path}: expected a dictionary of tensors by their names")
    return data


def main(argv: list[str]) -> int:
    """Imports; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools.import_checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--family", choices=get_args(Source), required=True)
    parser.add_argument("source", type=pathname, metavar="SRC")
    parser.add_argument("out", type=pathname, help="folder to make")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of the stored weights (%(default)s)")
    args = parser.parse_args(argv)
    try:
        imported = read_published(args.family, args.source)
        has_tokenizer = (args.source / "tokenizer.json").is_file()
        model = Export(
            cfg=imported.config,
            tensors=imported.tensors,
            dtype=DTYPES[args.dtype],
            card=card(imported.config, f"{args.family}: {args.source.absolute().name}", {}),
            tokenizer=args.source if has_tokenizer else None,
        )
        differences = export(model, args.out)
    except PretrainError as error:
        print(f"import_checkpoint: error: {error}", file=sys.stderr)
        return error.exit_code
    for what, names in (("never read by the authors' code, left out", imported.unused), ("zero", imported.zeroed)):
        if names:
            print(f"{what}: {', '.join(names)}")
    shown = ", ".join(f"{value:.1e} at {loops}" for loops, value in differences.items())
    print(f"{args.out}: {imported.config.family}; logits differ from the native model's by (loops) {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
