"""The data sets of a run, found, fetched where remote, and checked before the first row is read."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from streaming.base.format import Reader
from streaming.base.storage import CloudDownloader

from pretrain.config.schema import Config, SourceConfig
from pretrain.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardFile,
    read_manifest,
    read_manifest_file,
    read_shards,
)
from pretrain.data.node import NodeFolder
from pretrain.data.place import DataPlace, Node
from pretrain.errors import ConfigError, DataError
from pretrain.foreign import path_below
from pretrain.preflight import preflight_data

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def open_sources(cfg: Config, place: DataPlace, node: Node, folder: NodeFolder | None) -> list[Manifest]:
    """Manifest of each source, once its metadata is local, agrees with `cfg`, and the shards on disk have their sizes.

    `folder` keeps other runs from the caches of remote sources; with None the shards in caches are not looked at.
    Errors: ConfigError where data and configuration disagree; DataError naming a shard that is missing or truncated,
    or a remote file that cannot be fetched; either is raised on all processes. Collective over all processes.
    """
    place.on_leaders(lambda: _prepare(cfg, folder), node.is_leader)
    return [read_manifest(source.path) for source in cfg.data.all_sources]


def fingerprint(source: SourceConfig, manifest: Manifest) -> str:
    """Changes with the names, sizes or contents of the training shards, or with their order."""
    digest = hashlib.sha256()
    for shard in read_shards(source.path, manifest, "train"):
        digest.update(f"{shard.path.name} {shard.hash} {shard.rows}\n".encode())
    return digest.hexdigest()


def shard_path(shard: Reader) -> str:
    """File of the shard's rows, unpacked."""
    raw, _ = shard.file_pairs[0]
    return os.path.join(shard.dirname, shard.split, raw.basename)


def _prepare(cfg: Config, folder: NodeFolder | None) -> None:
    _check_caches(cfg)  # before anything is fetched
    for source in cfg.data.all_sources:
        if source.remote is not None:
            if folder is not None:
                folder.lock_cache(Path(source.path))
            _fetch_metadata(source, source.remote)
    preflight_data(cfg)
    check_local_shards(cfg)
    for source in cfg.data.all_sources:
        if source.remote is None:
            continue
        shards = _shards_of(source)
        _check_cached(Path(source.path), shards)
        if folder is not None:
            for shard in shards:
                _remove_if_broken(shard)


def check_local_shards(cfg: Config) -> None:
    """ConfigError or DataError where a shard of a local data set is missing, cut short or packed; none is read."""
    _check_caches(cfg)
    for source in cfg.data.all_sources:
        if source.remote is None:
            for shard in _shards_of(source):
                _check_local(source, shard)


def _shards_of(source: SourceConfig) -> list[ShardFile]:
    """The shards of all splits, as manifest and indexes name them."""
    manifest = read_manifest(source.path)
    return [shard for split in manifest.splits for shard in read_shards(source.path, manifest, split)]


def _check_caches(cfg: Config) -> None:
    """Refuses settings under which streaming would delete or rewrite the only copy of a data set."""
    for source in cfg.data.all_sources:
        if source.remote is None and cfg.data.cache_limit_bytes is not None:
            raise ConfigError(
                f"data.cache_limit_bytes={cfg.data.cache_limit_bytes}: expected null, since {source.path} is no cache: "
                "shards deleted there cannot be downloaded again"
            )
        if source.remote is not None and Path(source.remote).resolve() == Path(source.path).resolve():
            raise ConfigError(
                f"data.sources[].remote={source.remote!r}: expected another folder than path, which is its cache"
            )


def _check_local(source: SourceConfig, shard: ShardFile) -> None:
    if shard.compression is not None:
        raise ConfigError(
            f"data.sources[].path={source.path!r}: its shards are compressed and must be unpacked somewhere: name "
            "this folder as data.sources[].remote, and a cache folder as data.sources[].path"
        )
    shard.check_size()


def _check_cached(cache: Path, shards: list[ShardFile]) -> None:
    """ConfigError where a link leads out of the cache to what streaming would write or remove there."""
    files = {path for shard in shards for path in (shard.path, shard.raw_path)}
    # Each folder once: resolving all shards of a trillion tokens would take minutes on a network's file system.
    for path in sorted({path.parent for path in files} | {path for path in files if path.is_symlink()}):
        path_below(cache, str(path.relative_to(cache)), f"{cache}: a shard of its index.json")


def _remove_if_broken(shard: ShardFile) -> None:
    """Removes a cached shard that has not its size, packed or not: it will be downloaded again."""
    for path, size in ((shard.path, shard.bytes), (shard.raw_path, shard.raw_bytes)):
        if path.is_file() and path.stat().st_size != size:
            logger.warning("%s: removed from the cache: expected %d bytes, found %d", path, size, path.stat().st_size)
            path.unlink()


def _fetch_metadata(source: SourceConfig, remote: str) -> None:
    """Downloads manifest, tokenizer and indexes into the cache folder, as far as they are not there."""
    _fetch(source, remote, MANIFEST_NAME)
    manifest = read_manifest_file(Path(source.path) / MANIFEST_NAME)
    names = [f"{manifest.tokenizer.path}/{name}" for name in TOKENIZER_FILES]
    for name in [*names, *(f"{split}/index.json" for split in manifest.splits)]:
        _fetch(source, remote, name)


def _fetch(source: SourceConfig, remote: str, name: str) -> None:
    path = path_below(Path(source.path), name, f"{source.path}: a file of its {MANIFEST_NAME}")
    if path.is_file():
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        CloudDownloader.direct_download(os.path.join(remote, name), str(part))
    except Exception as error:  # each cloud's client raises errors of its own
        raise DataError(
            f"{remote}: cannot fetch {name} ({type(error).__name__}: {error}); expected a data set written by "
            "data_prep/build_shards.py, and credentials as mosaicml-streaming documents them"
        ) from error
    os.replace(part, path)


def tokenizer_folder(cfg: Config) -> Path:
    """The tokenizer of the first data set. ConfigError where the configuration names none."""
    if not cfg.data.all_sources:
        raise ConfigError("data.path=null: no data set, so no tokenizer of it; name a tokenizer's folder (--tokenizer)")
    data = Path(cfg.data.all_sources[0].path)
    return data / read_manifest(data, shards_are_local=False).tokenizer.path
