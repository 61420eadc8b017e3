"""From a YAML file and command-line overrides to a checked `Config`, and back to a file that loads equal.

Order, the later wins: dataclass defaults < the family's preset < the files that `base:` names < the file < overrides.
Everything is checked twice: as it was written, so that a message can name the file, and with interpolations resolved.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrain.config.check import (
    INTERPOLATION,
    check_tree,
    check_value,
    fields_of,
    is_scalar,
    nearest,
    show,
    show_key,
    split_key,
    type_of,
    without_null,
)
from pretrain.config.families import FAMILIES
from pretrain.config.schema import Config
from pretrain.config.yaml_text import parse_yaml, read_yaml
from pretrain.errors import ConfigError
from pretrain.files import write_text
from pretrain.foreign import is_one_line

COMMAND_LINE = "command line"
MOST_BASES = 20
_SHOWN_FILES = 10

# Two ways to say one thing: a source that gives the key empties the other one of the sources before it.
ALTERNATIVES: dict[str, tuple[str, Any]] = {
    "train.max_steps": ("train.max_tokens", None),
    "train.max_tokens": ("train.max_steps", None),
    "data.path": ("data.sources", []),
    "data.sources": ("data.path", None),
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration in the file at `path`, with `overrides` such as `optimizer.lr=3e-4` on top.

    Interpolations are resolved. Raises ConfigError that names the file or the command line, the key, its value and
    what was expected.
    """
    files = _read_files(Path(os.path.expanduser(path)))
    pairs = [_parse_override(text) for text in join_overrides(overrides)]
    tree = _plain(asdict(Config()))
    _merge(tree, {"model": FAMILIES[_family_name(files, pairs)]})
    origins: dict[str, str] = {}
    for given, origin in files:
        _merge(tree, given)
        flat = _flatten(given)
        origins |= dict.fromkeys(flat, origin)
        _empty_alternatives(tree, flat)
    for key, value in pairs:
        _set(tree, key, value)
        origins |= {name: COMMAND_LINE for name in (key, key.split("[")[0], *_flatten({key: value}))}
    _empty_alternatives(tree, {key.split("[")[0]: value for key, value in pairs})
    return _build(tree, origins, str(path))


def join_overrides(arguments: Sequence[str]) -> list[str]:
    """Returns overrides as `key=value`: dashes in front are dropped, `--key value` becomes `key=value`."""
    joined = []
    remaining = list(arguments)
    while remaining:
        text = remaining.pop(0)
        takes_next = text.startswith("--") and "=" not in text
        if takes_next and remaining and "=" not in remaining[0] and not remaining[0].startswith("--"):
            text = f"{text}={remaining.pop(0)}"
        joined.append(text.lstrip("-"))
    return joined


def dump_config(cfg: Config) -> str:
    """Returns YAML that loads back equal, in values and types, through `load_config` and through PyYAML."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(cfg))))


def save_resolved(cfg: Config, path: Path) -> None:
    """Writes `cfg` to `path` (whole or not at all), loads it back at once and compares; ConfigError if they differ."""
    write_text(path, dump_config(cfg))
    loaded = load_config(path)
    if loaded != cfg:
        raise ConfigError(f"{path}: the saved configuration does not load back equal: {diff_configs(cfg, loaded)}")


def diff_configs(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Returns (key, old value, new value) of every key that differs; a list is one value."""
    before, after = _flatten(asdict(old)), _flatten(asdict(new))
    return [(key, value, after[key]) for key, value in before.items() if value != after[key]]


def _read_files(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Returns (checked sections, file name) of the files that `base:` names, farthest first, then of `path`."""
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: {_no_such_file(path)}")
    found: list[tuple[dict[str, Any], str]] = []
    seen: list[str] = []
    while True:
        tree = read_yaml(path)
        base = tree.pop("base", None) if isinstance(tree, dict) else None
        seen.append(os.path.realpath(path))
        try:
            found.insert(0, (check_tree(tree, raw=True), str(path)))
            if base is None:
                return found
            path = _base_of(path, base, seen)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def _base_of(path: Path, base: Any, seen: Sequence[str]) -> Path:
    if not isinstance(base, str) or not is_one_line(base) or not base:
        raise ConfigError(f"base={show(base)}: expected the name of another configuration file")
    base_path = path.parent / os.path.expanduser(base)
    if os.path.realpath(base_path) in seen:
        raise ConfigError(f"base={show(base)}: expected a file that does not lead back to itself")
    if not os.path.isfile(base_path):
        raise ConfigError(f"base={show(base)}: {_no_such_file(base_path)}")
    if len(seen) > MOST_BASES:
        raise ConfigError(f"base={show(base)}: expected at most {MOST_BASES} files, each the base of another")
    return base_path


def _no_such_file(path: Path) -> str:
    if os.path.isdir(path):
        return "expected a configuration file, found a folder"
    if not os.path.isdir(path.parent):
        return f"no such file (there is no folder {show_key(str(path.parent))})"
    there = {other.stem: other for other in sorted(path.parent.glob("*.yaml"))}
    if near := nearest(path.stem, list(there)):
        return f"no such file; nearest: {there[near]}"
    names = [file.name for file in there.values()]
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return "no such file" + (f"; the folder has {', '.join(names[:_SHOWN_FILES])}{more}" if names else "")


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, written = text.partition("=")
    if not equals or not key or not written:
        raise ConfigError(
            f"{COMMAND_LINE}: {show(text)}: expected section.key=value, such as optimizer.lr=3e-4 (null for none)"
        )
    try:
        hint = type_of(key, written)
        value: Any = written
        if written in ("null", "~"):
            value = None
        elif not is_scalar(hint) or written[0] in "\"'":
            value = parse_yaml(written)
        return key, check_value(value, key)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{COMMAND_LINE}: {show_key(key)}={show_key(written)}: {error}") from error


def _merge(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Puts `given` into `tree`; a list replaces a list."""
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = _plain(value)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Puts the `value` of an override at `key`; a section's keys that it leaves out stay."""
    *path, last = split_key(key)
    place: Any = tree
    for name in path:
        place = place[name] if isinstance(name, str) else _item(place, name, key, value)[name]
    if isinstance(last, int):
        _item(place, last, key, value)[last] = value
    else:
        _merge(place, {last: value})


def _item(place: Any, index: int, key: str, value: Any) -> Any:
    """The list `place`, if it has such an item."""
    if isinstance(place, list) and index < len(place):
        return place
    what = f"has {len(place)} items, counted from 0" if isinstance(place, list) else f"is {show(place)}; set all of it"
    raise ConfigError(f"{COMMAND_LINE}: {key}={value!r}: {key.rpartition('[')[0]} {what}")


def _family_name(files: Sequence[tuple[dict[str, Any], str]], pairs: Sequence[tuple[str, Any]]) -> str:
    named = [(tree.get("model", {}).get("family"), origin) for tree, origin in files]
    named += [(value, COMMAND_LINE) for key, value in pairs if key == "model.family"]
    named += [(value.get("family"), COMMAND_LINE) for key, value in pairs if key == "model"]
    name, origin = next(((name, origin) for name, origin in reversed(named) if name), (Config().model.family, ""))
    if name not in FAMILIES:
        raise ConfigError(f"{origin}: model.family={name!r}: expected one of {', '.join(FAMILIES)}, written out")
    return cast(str, name)


def _empty_alternatives(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    for key, (other, empty) in ALTERNATIVES.items():
        if given.get(key) not in (None, []) and given.get(other) in (None, []):
            section, _, name = other.partition(".")
            tree[section][name] = _plain(empty)


def _build(tree: dict[str, Any], origins: Mapping[str, str], path: str) -> Config:
    """Resolves interpolations, checks what came out, builds the sections; a refusal says where the value is from."""
    try:
        return cast(Config, _construct(Config, check_tree(_resolve(tree))))
    except ConfigError as error:
        key = str(error).partition("=")[0].partition(":")[0]
        origin = next((origins[name] for name in (key, key.split("[")[0]) if name in origins), path)
        raise ConfigError(f"{origin}: {error}") from error


def _resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the values that interpolations stand for."""
    keys = [key for key, text in _leaves(tree) if isinstance(text, str) and INTERPOLATION in text]
    if not keys:
        return tree
    key = keys[0]
    try:
        resolver = OmegaConf.create(tree)
        for key in keys:
            OmegaConf.select(resolver, key)  # so that a failure has its key
        return cast(dict[str, Any], OmegaConf.to_container(resolver, resolve=True))
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        key = getattr(error, "full_key", None) or key
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        value = dict(_leaves(tree)).get(key)
        raise ConfigError(f"{key}={show(value)}: cannot be resolved: {reason[:300]}") from error


def _construct(hint: Any, value: Any) -> Any:
    """Sections, lists and tuples from what `check_tree` has returned."""
    core = without_null(hint)
    items = typing.get_args(core)
    if is_dataclass(core) and isinstance(value, Mapping):
        hints = fields_of(core)
        return cast(type, core)(**{name: _construct(hints[name], item) for name, item in value.items()})
    if typing.get_origin(core) is list and isinstance(value, list):
        return [_construct(items[0], item) for item in value]
    return tuple(value) if typing.get_origin(core) is tuple else value


def _plain(value: Any) -> Any:
    """A copy of `value` without tuples, which YAML does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of all that is neither section nor list."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from _leaves(item, f"{key}[{i}]")
    else:
        yield key, tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
