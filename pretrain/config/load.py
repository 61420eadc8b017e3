"""From a YAML file and command-line overrides to a checked `Config`, and back to a file that loads equal.

Order, the later wins: dataclass defaults < the family's preset < the files that `base:` names < the file < overrides.
OmegaConf is the only YAML reader: it takes 1e-3 for a number, where PyYAML takes it for text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from pretrain.config.check import MISSING, check_tree, check_value, is_scalar, nearest, type_of
from pretrain.config.families import FAMILIES
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.files import write_text

COMMAND_LINE = "command line"

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
    files = _read_files(Path(path), ())
    pairs = [_parse_override(text) for text in join_overrides(overrides)]
    merged = deepcopy(_defaults())
    merged.merge_with({"model": FAMILIES[_family_name(files, pairs)]})
    for tree, _ in files:
        given = _flatten(tree)
        merged.merge_with(tree)
        _empty_alternatives(merged, given)
        for key in (key for key, value in given.items() if value == MISSING):
            OmegaConf.update(merged, key, MISSING)  # a merge keeps the weaker source's value
    for key, value in pairs:
        _apply_override(merged, key, value)
    _empty_alternatives(merged, {key.split("[")[0]: value for key, value in pairs})
    return _build(merged, str(path), {key for key, _ in pairs})


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


@cache
def _defaults() -> DictConfig:
    """The dataclasses as OmegaConf has them, made once: 40 ms, a copy takes 7."""
    return cast(DictConfig, OmegaConf.structured(Config))


def _read_files(path: Path, seen: tuple[Path, ...]) -> list[tuple[dict[str, Any], str]]:
    """Returns (checked sections, file name) of the files that `base:` names, farthest first, then of `path`."""
    tree = _read_yaml(path)
    base = tree.pop("base", None)
    earlier: list[tuple[dict[str, Any], str]] = []
    if base is not None:
        chain = (*seen, path.resolve())
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base={base!r}: expected the name of another configuration file")
        base_path = path.parent / base
        if base_path.resolve() in chain:
            raise ConfigError(f"{path}: base={base!r}: expected a file that does not lead back to itself")
        if not base_path.is_file():
            raise ConfigError(f"{path}: base={base!r}: {_no_such_file(base_path)}")
        earlier = _read_files(base_path, chain)
    return [*earlier, (check_tree(tree, str(path)), str(path))]


def _read_yaml(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: {_no_such_file(path)}")
    try:
        text = path.read_text(encoding="utf-8")
        tree = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except MarkedYAMLError as error:
        raise ConfigError(f"{path}: {_describe_syntax(error, text)}") from error
    except (YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections such as 'model:' and 'train:', found a list")
    return tree


def _describe_syntax(error: MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    if mark is None:
        return f"not valid YAML: {error.problem}"
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    indent = line[: len(line) - len(line.lstrip())]
    tab = "; YAML indents with spaces, never with tabs" if "\t" in indent else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {error.problem}{tab}"


def _no_such_file(path: Path) -> str:
    if path.is_dir():
        return "expected a configuration file, found a folder"
    if not path.parent.is_dir():
        return f"no such file (there is no folder {path.parent})"
    there = {other.stem: other for other in sorted(path.parent.glob("*.yaml"))}
    if near := nearest(path.stem, list(there)):
        return f"no such file; nearest: {there[near]}"
    return "no such file" + (f"; the folder has {', '.join(file.name for file in there.values())}" if there else "")


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, written = text.partition("=")
    if not equals or not key or not written:
        raise ConfigError(
            f"{COMMAND_LINE}: {text!r}: expected section.key=value, such as optimizer.lr=3e-4 (null for none)"
        )
    hint = type_of(key, written, COMMAND_LINE)
    value: Any = written
    if written in ("null", "~"):
        value = None
    elif not is_scalar(hint) or written[0] in "\"'":
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={written}"]))["value"]  # type: ignore[index,call-overload]
        except MarkedYAMLError as error:
            raise ConfigError(f"{COMMAND_LINE}: {key}={written}: not valid YAML: {error.problem}") from error
    return key, check_value(value, key, COMMAND_LINE)


def _apply_override(merged: DictConfig, key: str, value: Any) -> None:
    list_key, index = key.split("[")[0], re.search(r"\[(\d+)\]", key)
    if index and int(index[1]) >= len(OmegaConf.select(merged, list_key)):
        length = len(OmegaConf.select(merged, list_key))
        raise ConfigError(f"{COMMAND_LINE}: {key}={value!r}: {list_key} has {length} items, counted from 0")
    OmegaConf.update(merged, key, value)


def _family_name(files: Sequence[tuple[dict[str, Any], str]], pairs: Sequence[tuple[str, Any]]) -> str:
    named = [(tree.get("model", {}).get("family"), origin) for tree, origin in files]
    named += [(value, COMMAND_LINE) for key, value in pairs if key == "model.family"]
    name, origin = next(((name, origin) for name, origin in reversed(named) if name), (Config().model.family, ""))
    if name not in FAMILIES:
        raise ConfigError(f"{origin}: model.family={name!r}: expected one of {', '.join(FAMILIES)}, written out")
    return cast(str, name)


def _empty_alternatives(merged: DictConfig, given: Mapping[str, Any]) -> None:
    for key, (other, empty) in ALTERNATIVES.items():
        if given.get(key) not in (None, []) and given.get(other) in (None, []):
            OmegaConf.update(merged, other, empty, merge=False)


def _build(merged: DictConfig, path: str, overridden: set[str]) -> Config:
    """Resolves interpolations and builds the sections, whose own checks then get the origin of the value."""
    try:
        OmegaConf.resolve(merged)
        return cast(Config, OmegaConf.to_object(merged))
    except ConfigError as error:
        origin = COMMAND_LINE if str(error).partition("=")[0] in overridden else path
        raise ConfigError(f"{origin}: {error}") from error
    except MissingMandatoryValue as error:
        raise ConfigError(f"{path}: {error.full_key}: expected a value, none is given") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from error


def _plain(value: Any) -> Any:
    """`value` without tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
