"""Models in Hugging Face form on disk: read, and written so that a folder is there whole and checked, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import pretrain.hf
from pretrain.config.model import ModelConfig
from pretrain.data.manifest import tokenizer_sha256
from pretrain.data.tokenizer_files import fit_for_generation, load_tokenizer
from pretrain.errors import CheckpointError, ConfigError
from pretrain.files import require_writable
from pretrain.foreign import check_name, read_json
from pretrain.model.cache import LoopCache
from pretrain.model.looped import LoopedLM
from pretrain.processes import Children
from tools import hf_check
from tools.hf_format import MODEL_TYPE, hf_config, hf_tensors, model_config, model_tensors

CODE = Path(pretrain.hf.__file__).parent
CLASSES = {
    "AutoConfig": "configuration_looped.LoopedConfig",
    "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
CHECKED_TOKENS = 128
GREEDY_TOKENS = 32
TEXT = """\
The river rises in the hills north of the town and runs for forty miles to the sea. In the nineteenth century its water
drove eleven mills, of which two are left; one grinds flour for visitors on Sundays, and the other is a private house.
A railway followed the valley from 1874 until 1966. Today a path for walkers and cyclists uses most of its length,
including three bridges and a short tunnel, and the old station at the upper end of the line is a small museum.
"""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model to be written in Hugging Face form."""

    cfg: ModelConfig
    tensors: Mapping[str, Tensor]
    """Parameters of LoopedLM(cfg)."""
    dtype: torch.dtype
    card: str
    """README.md"""
    tokenizer: Path | None
    """Folder of its tokenizer. None: the model has none."""
    max_shard_size: str = "5GB"


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` that gets its name at the end; after an exception nothing is left.

    Errors: ConfigError where `out` exists or cannot be made; CheckpointError where the disk takes no more.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: exists; choose another output folder or move it away")
    require_writable(out.absolute().parent, str(out))
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    new_parents = [folder for folder in out.absolute().parents if not folder.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        os.rename(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in new_parents:
            with contextlib.suppress(OSError):  # another process has put something there
                folder.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{out}: not written ({error})") from error
        raise


def export(model: Export, out: Path) -> dict[str, float]:
    """Writes `out` and checks it in a fresh process; returns the largest difference of logits by loop count.

    Errors: ConfigError where `out` exists; CheckpointError where the folder does not load as what was exported. Nothing
    is left of it then.
    """
    with whole_folder(out) as partial:
        write_folder(model, partial)
        with tempfile.TemporaryDirectory() as scratch:
            case = Path(scratch) / "case.safetensors"
            write_case(model, case)
            return run_check({partial: case})[partial]


def write_folder(model: Export, folder: Path) -> None:
    """Weights, configurations, modelling files, tokenizer and card, into an empty folder."""
    cfg, names = model.cfg, {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    config: dict[str, Any] = {
        "architectures": ["LoopedForCausalLM"], "auto_map": CLASSES, "model_type": MODEL_TYPE,
        "dtype": names[model.dtype], **hf_config(cfg),
    }  # fmt: skip
    generation: dict[str, Any] = {"use_cache": True}
    if model.tokenizer is not None:
        ids = _copy_tokenizer(model.tokenizer, folder, cfg)
        config |= ids
        # Documents follow one another with <|bos|> before each, so it also is what ends a text.
        ends = [i for i in (ids["bos_token_id"], ids["eos_token_id"]) if i is not None]
        generation |= ids | {"eos_token_id": ends or None}
        config["tokenizer_sha256"] = tokenizer_sha256(model.tokenizer)
    for path in sorted(CODE.glob("*_looped.py")):
        shutil.copyfile(path, folder / path.name)
    for name, data in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model.card, encoding="utf-8")
    tensors = hf_tensors(cfg, model.tensors, model.dtype)
    # One entry: safetensors writes several in an order that varies, and equal weights are to give equal bytes.
    save_torch_state_dict(tensors, folder, max_shard_size=model.max_shard_size, metadata={"format": "pt"})
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes files that only their owner may read


def _copy_tokenizer(source: Path, folder: Path, cfg: ModelConfig) -> dict[str, int | None]:
    """Copies the tokenizer, with padding on the left as generation needs it; returns the ids of its special tokens."""
    tokenizer = load_tokenizer(source)
    if len(tokenizer) > cfg.vocab_size:
        raise ConfigError(
            f"{source}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {cfg.vocab_size}: expected "
            "the tokenizer that the model was trained with (--tokenizer)"
        )
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    fit_for_generation(folder, cfg.context_length)
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


@torch.no_grad()
def write_case(model: Export, path: Path, more_loops: tuple[int, ...] = ()) -> None:
    """What tools/hf_check.py compares a folder with: computed by this project's model from the exported weights.

    Logits are those of 1, 2 and the mean number of loops, and of `more_loops`.
    """
    cfg = model.cfg
    exported = hf_tensors(cfg, model.tensors, model.dtype)
    native = LoopedLM(cfg).eval()
    native.load_state_dict(model_tensors(cfg, exported, "exported tensors"))
    length = min(CHECKED_TOKENS, cfg.context_length)
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        text, tokens = None, torch.randint(cfg.vocab_size, (1, length), generator=generator)
    else:
        text = TEXT
        tokens = torch.tensor([load_tokenizer(model.tokenizer)(text)["input_ids"][:length]])
    num_loops = cfg.recurrence.default_loops
    case = {f"logits.{loops}": native.logits(tokens, loops) for loops in sorted({1, 2, num_loops, *more_loops})}
    case["prompt"] = tokens[:, : max(1, length // 4)].clone()
    new_tokens = min(GREEDY_TOKENS, cfg.context_length - case["prompt"].shape[1])
    case["greedy"] = _greedy(native, case["prompt"], new_tokens, num_loops)
    checksums = {name: hf_check.checksum(tensor) for name, tensor in exported.items()}
    facts = {"checksums": checksums, "num_loops": num_loops, "text": text}
    save_file({**case, "tokens": tokens}, path, metadata={"case": json.dumps(facts)})


def _greedy(native: LoopedLM, prompt: Tensor, new_tokens: int, num_loops: int) -> Tensor:
    cache, tokens, fed = LoopCache(), prompt, prompt
    for _ in range(new_tokens):
        fed = native.logits(fed, num_loops, cache=cache)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, fed), 1)
    return tokens


def run_check(cases: Mapping[Path, Path]) -> dict[Path, dict[str, float]]:
    """Loads each folder in one fresh process and compares it with its case; the differences of logits by loop count.

    Errors: CheckpointError that lists what is missing or differs.
    """
    with tempfile.TemporaryDirectory() as modules:
        environment = os.environ | {
            "HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }  # fmt: skip
        pairs = [str(path.absolute()) for pair in cases.items() for path in pair]
        with Children() as children:
            check = children.start(
                [sys.executable, "-I", hf_check.__file__, *pairs], env=environment, cwd=modules, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            output, errors = check.communicate()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    problems = [f"{line['folder']}: {problem}" for line in lines for problem in line["problems"]]
    if problems or check.returncode or len(lines) != len(cases):
        end = errors.strip()[-2_000:]
        raise CheckpointError("the exported model is not the one to export:\n  " + "\n  ".join(problems or [end]))
    return {folder: line["logits_difference"] for folder, line in zip(cases, lines, strict=True)}


def is_hf_folder(path: Path) -> bool:
    """Whether `path` is a folder with a config.json."""
    return (path / "config.json").is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """What the folder's config.json holds; ConfigError that names the file where there is none."""
    if not is_hf_folder(folder):
        raise ConfigError(f"{folder / 'config.json'}: missing; expected the folder of a model, with its config.json")
    return read_json(folder / "config.json")


def read_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """(model section, fp32 parameters of LoopedLM) of a folder in this form. No code of the folder is run.

    Errors: ConfigError for a folder of another kind; CheckpointError for files or tensors missing, unknown, misshapen.
    """
    cfg = model_config(read_config(path), str(path / "config.json"))
    return cfg, model_tensors(cfg, read_safetensors(path), str(path))


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    index = folder / "model.safetensors.index.json"
    names, listed = ["model.safetensors"], None
    if index.is_file():
        listed = read_json(index, CheckpointError).get("weight_map")
        if not isinstance(listed, dict):
            raise CheckpointError(f"{index}: weight_map: expected names of tensors with names of files beside it")
        names = sorted({check_name(name, f"{index}: weight_map: a file", CheckpointError) for name in listed.values()})
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name}: cannot be read ({error})") from error
    if listed is not None and tensors.keys() != listed.keys():
        differing = sorted(tensors.keys() ^ listed.keys())
        raise CheckpointError(f"{index}: the files beside it hold other tensors than it lists: {', '.join(differing)}")
    return tensors
