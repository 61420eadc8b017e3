"""What a run needs from its surroundings, checked before torch is imported: data that fits the model, folders."""

from __future__ import annotations

import os
from pathlib import Path

from pretrain.config.schema import Config, SourceConfig
from pretrain.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from pretrain.errors import ConfigError
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.depth_task import DepthTask, plain_encoder
from pretrain.files import require_writable

RUN_FILES = ("log.txt", "metrics.jsonl", "config.yaml", "environment.json")
RUN_FOLDERS = ("checkpoints", "wandb")


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
    for name in RUN_FOLDERS:
        if os.path.lexists(folder / name):
            require_writable(folder / name, setting)


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
    """One global batch must fit into an epoch; validation reads the first `validation.rows` rows."""
    if len(manifests) < len(cfg.data.all_sources):
        return
    names = ", ".join(manifests)
    rows = sum(manifest.splits["train"].rows for manifest in manifests.values())
    batch = cfg.train.global_batch_size
    if rows < batch:
        raise ConfigError(f"train.global_batch_size={batch}: expected at most the {rows} training rows of {names}")
    rows = sum(m.splits["validation"].rows for m in manifests.values() if "validation" in m.splits)
    if rows < cfg.validation.rows:
        raise ConfigError(
            f"validation.rows={cfg.validation.rows}: expected at most the {rows} validation rows of {names}, or 0 to "
            "train without validation"
        )
