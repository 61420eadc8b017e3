"""What a run needs from its surroundings, checked before torch is imported: data that fits the model, folders."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from pretrain.config.bounds import require
from pretrain.config.schema import Config, SourceConfig
from pretrain.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from pretrain.errors import ConfigError
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.depth_task import DepthTask, plain_encoder
from pretrain.files import require_writable

RUN_FILES = ("log.txt", "metrics.jsonl", "config.yaml", "environment.json")


def preflight(cfg: Config) -> None:
    """Raises ConfigError where data, tasks, initial weights or the run's folder cannot be what `cfg` says."""
    preflight_data(cfg)
    _check_tasks(cfg)
    weights = cfg.checkpoint.initial_weights
    if weights is not None and not os.path.isdir(weights):
        raise ConfigError(f"checkpoint.initial_weights={weights!r}: expected the folder of a checkpoint; it is missing")
    require_writable(Path(cfg.run.dir), f"run.dir={cfg.run.dir!r}")
    _check_run_folder(cfg)


def _check_run_folder(cfg: Config) -> None:
    """What the run will write must not have the name of something else."""
    folder, setting = Path(cfg.run.dir) / cfg.run.name, f"run.name={cfg.run.name!r}"
    require_writable(folder, setting)
    for name in RUN_FILES:
        path = folder / name
        if os.path.lexists(path) and not (os.path.isfile(path) and os.access(path, os.W_OK)):
            raise ConfigError(f"{setting}: expected {path} to be a file that can be written, or absent")
    if os.path.lexists(folder / "wandb"):
        require_writable(folder / "wandb", setting)
    # What is no folder, such as a link to a disk that is not mounted, is an error of the search for checkpoints.
    if os.path.isdir(folder / "checkpoints"):
        require_writable(folder / "checkpoints", setting)


def preflight_data(cfg: Config) -> None:
    """Raises ConfigError unless every local data set exists, fits the model's shapes and shares one tokenizer.

    A remote source whose manifest is not in its cache folder yet is checked by the loader, once it is fetched.
    """
    manifests: dict[str, Manifest] = {}
    for source in cfg.data.all_sources:
        if source.remote is None or (Path(source.path) / MANIFEST_NAME).is_file():
            try:
                manifests[source.path] = _check_source(cfg, source)
            except (ConfigError, OSError, UnicodeDecodeError) as error:
                text = str(error) if str(error).startswith("model.") else f"{_key_of(cfg, source)}: {error}"
                raise ConfigError(text) from error
    hashes = {path: manifest.tokenizer.sha256 for path, manifest in manifests.items()}
    if len(set(hashes.values())) > 1:
        found = ", ".join(f"{path} (sha256 {digest[:12]})" for path, digest in hashes.items())
        raise ConfigError(f"data.sources: expected data sets made by one tokenizer, found {found}")
    _check_rows(cfg, manifests)


def _check_tasks(cfg: Config) -> None:
    """Opens the tasks of the evaluation; depth tasks are tried with the tokenizer, where the data set is here."""
    settings = cfg.evaluation
    tasks = open_tasks(settings.tasks, settings.task_data, settings.core_bundle, settings.limit, settings.depths)
    depth_tasks = [task for task in tasks if isinstance(task, DepthTask)]
    data = Path(cfg.data.all_sources[0].path) if cfg.data.all_sources else None
    if depth_tasks and data is not None and (data / MANIFEST_NAME).is_file():
        folder = data / read_manifest(data, shards_are_local=False).tokenizer.path
        for task in depth_tasks:
            task.at_depths(*plain_encoder(folder), cfg.model.context_length)


def _key_of(cfg: Config, source: SourceConfig) -> str:
    sources = cfg.data.sources
    return f"data.sources[{sources.index(source)}].path" if source in sources else "data.path"


def _check_source(cfg: Config, source: SourceConfig) -> Manifest:
    manifest = read_manifest(source.path, shards_are_local=source.remote is None)
    model = cfg.model
    if manifest.row_tokens != model.context_length + 1:
        raise ConfigError(
            f"model.context_length={model.context_length}: expected {manifest.context_length}, since {source.path} "
            f"has rows of {manifest.row_tokens} = {manifest.context_length} + 1 tokens"
        )
    largest_id = max(split.max_id for split in manifest.splits.values())
    needed = max(largest_id + 1, manifest.tokenizer.vocab_size)
    if model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: expected at least {needed}, since {source.path} holds ids up to "
            f"{largest_id} and its tokenizer has {manifest.tokenizer.vocab_size}"
        )
    return manifest


def _check_rows(cfg: Config, manifests: dict[str, Manifest]) -> None:
    """An epoch must hold a global batch and rows of every source; validation reads `validation.rows`, shared out."""
    sources, batch = cfg.data.all_sources, cfg.train.global_batch_size
    if any(source.path not in manifests for source in sources):
        return
    names, weights = ", ".join(manifests), [source.weight for source in sources]
    rows = sum(manifests[source.path].splits["train"].rows for source in sources)
    require(rows >= batch, "train.global_batch_size", batch, f"at most the {rows} training rows of {names}")
    nodes = cfg.data.canonical_nodes
    require(nodes <= rows, "data.canonical_nodes", nodes, f"at most the {rows} rows of an epoch")
    for i, source in enumerate(sources):
        require(
            source.weight / sum(weights) * rows >= 1, f"data.sources[{i}].weight", source.weight,
            f"a weight that gives {source.path} at least one of the {rows} rows of an epoch",
        )  # fmt: skip
    validated = [(source, manifests[source.path]) for source in sources]
    validated = [pair for pair in validated if "validation" in pair[1].splits]
    _check_validation_rows(cfg, validated, names)


def _check_validation_rows(cfg: Config, pairs: Sequence[tuple[SourceConfig, Manifest]], names: str) -> None:
    wanted, held = cfg.validation.rows, [manifest.splits["validation"].rows for _, manifest in pairs]
    require(
        sum(held) >= wanted, "validation.rows", wanted,
        f"at most the {sum(held)} validation rows of {names}, or 0 to train without validation",
    )  # fmt: skip
    counts = apportion(wanted, [source.weight for source, _ in pairs])
    for (source, _), count, rows in zip(pairs, counts, held, strict=True):
        require(
            rows >= count, "validation.rows", wanted,
            f"fewer, since {count} of them fall to {source.path} by its weight {source.weight}, and it has {rows}",
        )  # fmt: skip


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts proportional to `weights`, by largest remainder (ties: the first)."""
    exact = [weight / sum(weights) * total for weight in weights]
    parts = [math.floor(part) for part in exact]
    largest_first = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in largest_first[: total - sum(parts)]:
        parts[i] += 1
    return parts
