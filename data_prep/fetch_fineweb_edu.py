"""Fetch a subset of FineWeb-Edu (ODC-By 1.0) as parquet files for build_shards.py.

From the Hugging Face hub, or with --mirror from a folder that is laid out like the repository
(sample/10BT/*.parquet, data/CC-MAIN-2024-10/*.parquet, ...). A fetch that was stopped continues
when the same command is run again; until it has ended, build_shards.py refuses the folder.

Size: sample-10BT 28 GB, sample-100BT 280 GB, sample-350BT 1 TB, default about 5 TB.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import sys
from pathlib import Path

if not __package__:  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from data_prep.sources import FETCH_INCOMPLETE
from data_prep.tasks import command
from pretrain.arguments import integer, pathname
from pretrain.errors import ConfigError, DataError
from pretrain.foreign import check_name, files_below, path_below

REPOSITORY = "HuggingFaceFW/fineweb-edu"
SUBSETS = {
    "sample-10BT": "sample/10BT/*.parquet",
    "sample-100BT": "sample/100BT/*.parquet",
    "sample-350BT": "sample/350BT/*.parquet",
    "default": "data/*/*.parquet",
}
Sizes = dict[str, int]
"""Bytes of each file by its path in the repository."""


def fetch_from_hub(
    subset: str,
    out: Path,
    *,
    max_files: int | None = None,
    revision: str = "main",
    endpoint: str | None = None,
) -> Sizes:
    """Downloads the files of `subset` to `out`, continuing what an earlier call began.

    The revision is resolved once, so that all files are of one commit. Errors: ConfigError if the
    hub cannot be reached, knows no such revision, or the disk is too small; DataError if the
    download stops.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    try:
        info = api.dataset_info(REPOSITORY, revision=revision, files_metadata=True)
    except OSError as error:
        raise ConfigError(
            f"{REPOSITORY}@{revision}: {api.endpoint} does not give it ({_first_line(error)}); run "
            "this where the hub can be reached (HF_ENDPOINT names another one), or give a local "
            "copy with --mirror FOLDER"
        ) from error
    names = {file.rfilename: file.size or 0 for file in info.siblings or []}
    sizes = _choose(names, subset, max_files, f"{REPOSITORY}@{revision}")
    _begin(out, sizes, takes_room=True)
    try:
        api.snapshot_download(
            REPOSITORY,
            repo_type="dataset",
            revision=info.sha,
            allow_patterns=list(sizes),
            local_dir=out,
        )
    except OSError as error:
        raise DataError(
            f"{out}: the download stopped ({_first_line(error)}); run the same command to continue"
        ) from error
    _end(out, sizes)
    return sizes


def fetch_from_mirror(
    subset: str, out: Path, mirror: Path, *, max_files: int | None = None, copy: bool = False
) -> Sizes:
    """Links (or copies) the files of `subset` from a local copy of the repository to `out`.

    Errors: ConfigError if the mirror has no such files, or `out` has others or too little room.
    """
    if not mirror.is_dir():
        raise ConfigError(f"--mirror: {mirror} is no folder; expected a copy of {REPOSITORY}")
    searched = mirror / SUBSETS[subset].split("/*")[0]  # of other subsets there may be links alone
    files = files_below(searched) if searched.is_dir() else []
    found = {path.relative_to(mirror).as_posix(): path.stat().st_size for path in files}
    sizes = _choose(found, subset, max_files, str(mirror))
    _begin(out, sizes, takes_room=copy)
    for name in tqdm(sizes, desc=subset, unit="file"):
        source, target = (mirror / name).absolute(), out / name
        if target.exists() and target.stat().st_size == sizes[name]:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        if copy:
            shutil.copyfile(source, temporary)
        else:
            temporary.symlink_to(source)
        os.replace(temporary, target)
    _end(out, sizes)
    return sizes


def _choose(available: Sizes, subset: str, max_files: int | None, where: str) -> Sizes:
    names = sorted(fnmatch.filter(available, SUBSETS[subset]))[:max_files]
    if not names:
        raise ConfigError(f"{where}: no files {SUBSETS[subset]} for the subset {subset}")
    return {check_name(name, f"{where}: a file's name"): available[name] for name in names}


def _begin(out: Path, sizes: Sizes, takes_room: bool) -> None:
    """Marks `out` as incomplete; ConfigError if it holds other files or the disk lacks the room."""
    out.mkdir(parents=True, exist_ok=True)
    for name in sizes:
        if not (out / name).is_symlink():  # one of --mirror's, which is replaced and not followed
            path_below(out, name, f"{out}: a file to fetch")
    # Links of an earlier --mirror count where they lead nowhere too: they are replaced.
    here = {path.relative_to(out).as_posix(): path for path in out.rglob("*.parquet")}
    others = sorted(here.keys() - sizes.keys())
    if others:
        raise ConfigError(
            f"{out}: holds {len(others)} files that are not asked for, such as {others[0]}; "
            "choose another --out, or remove them"
        )
    missing = sum(size for name, size in sizes.items() if name not in here)
    free = shutil.disk_usage(out).free
    if takes_room and missing > free:
        raise ConfigError(
            f"{out}: {missing / 1e9:.1f} GB to fetch, {free / 1e9:.1f} GB free; make room, choose "
            "another --out or fewer --max-files"
        )
    (out / FETCH_INCOMPLETE).touch()
    print(f"{out}: {len(sizes)} files, {missing / 1e9:.2f} GB to fetch", flush=True)


def _end(out: Path, sizes: Sizes) -> None:
    """Removes the mark, once every file is there with its size."""
    for name, expected in sizes.items():
        path = out / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            raise DataError(
                f"{path}: {'missing' if size is None else f'{size} bytes'}, expected {expected} "
                "bytes; remove it and run the same command again"
            )
    (out / FETCH_INCOMPLETE).unlink()
    print(f"{out}: complete, {len(sizes)} files, {sum(sizes.values()) / 1e9:.2f} GB")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python data_prep/fetch_fineweb_edu.py sample-10BT "
        "--out data/fineweb_edu",
    )
    add = parser.add_argument
    add("subset", choices=list(SUBSETS))
    add("--out", type=pathname, required=True, help="folder for the parquet files")
    add("--max-files", type=integer(1), help="only the first so many files (about 2 GB each)")
    add("--revision", default="main", help="branch, tag or commit on the hub (%(default)s)")
    add("--mirror", type=pathname, help="folder with a copy of the repository, instead of the hub")
    add("--copy", action="store_true", help="with --mirror: copy instead of symbolic links")
    values = parser.parse_args()
    if values.copy and values.mirror is None:
        parser.error("--copy goes with --mirror")
    if values.mirror is not None:
        fetch_from_mirror(
            values.subset, values.out, values.mirror, max_files=values.max_files, copy=values.copy
        )
    else:
        fetch_from_hub(
            values.subset, values.out, max_files=values.max_files, revision=values.revision
        )


if __name__ == "__main__":
    command(main)
