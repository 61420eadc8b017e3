"""Checks of raw configuration values against the section dataclasses: known keys and types, with messages that help.

A value arrives as YAML gave it. It leaves as the type of its field and within its bounds, or as a ConfigError of the
form `key=value: expected ...`; pretrain/config/load.py puts the file or "command line" in front.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union

from pretrain.config.bounds import PathText, Range
from pretrain.config.schema import Config
from pretrain.config.yaml_text import INTEGER, NUMBER
from pretrain.errors import ConfigError
from pretrain.foreign import ONE_LINE, is_one_line

# What other frameworks call a key, for the hint of an unknown one.
OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "gradient_clipping": "optimizer.clip_norm",
    "hidden_size": "model.width",
    "n_embd": "model.width",
    "intermediate_size": "model.ffn_width",
    "n_layers": "model.core_layers",
    "num_layers": "model.core_layers",
    "seq_len": "model.context_length",
    "block_size": "model.context_length",
    "mean_recurrence": "model.recurrence.mean_loops",
    "mean_backprop_depth": "model.recurrence.backprop_loops",
    "tensor_parallel": "parallel.tensor",
    "pipeline_parallel": "parallel.pipeline",
    "zero_stage": "zero.stage",
    "steps": "train.max_steps",
}

INTERPOLATION = "${"
MISSING = "???"
_NULL_WORDS = ("none", "nil", "nan", "off", "-1")
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_TRUTH = {"true": True, "false": False}
_PATTERNS = {int: INTEGER, float: NUMBER}
_LONGEST_TEXT = 4_000
_KEY = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[(?:0|[1-9][0-9]{0,5})\])*", re.ASCII)


def check_tree(tree: Any, *, raw: bool = False) -> dict[str, Any]:
    """Returns the sections of `tree` with every value as its field's type; ConfigError names what does not fit.

    In a `raw` tree interpolations (`${...}`) and the mark of a missing value (`???`) pass. Afterwards none may be left,
    and fields without a default must be there.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"expected sections such as 'model:' and 'train:', found {_found(tree)}")
    return _check_section(tree, Config, "", raw)


def check_value(value: Any, key: str) -> Any:
    """Returns a raw `value` as the type of the field `key`, such as `optimizer.lr` or `data.sources[0].path`."""
    return _check(value, type_of(key, value), key, raw=True)


def split_key(key: str) -> list[str | int]:
    """The names and indices of a key: `data.sources[0].path` as ["data", "sources", 0, "path"].

    Errors: ConfigError where it is no key.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{show_key(key)}: expected a key such as optimizer.lr or data.sources[0].weight")
    return [int(index) if index else name for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key)]


def type_of(key: str, value: Any) -> Any:
    """Returns the type annotation of `key`; ConfigError with the nearest key where there is none."""
    hint: Any = Config
    seen = ""
    for name in split_key(key):
        core = without_null(hint)
        if isinstance(name, int):
            if typing.get_origin(core) not in (list, tuple):
                raise ConfigError(f"{show_key(key)}={show(value)}: {seen} is not a list")
            items = typing.get_args(core)
            if typing.get_origin(core) is tuple and name >= len(items):
                raise ConfigError(f"{key}={show(value)}: {seen} has {len(items)} items, counted from 0")
            hint = items[name if typing.get_origin(core) is tuple else 0]
            seen += f"[{name}]"
        else:
            if not is_dataclass(core) or name not in fields_of(core):
                raise ConfigError(_unknown_key(core, seen, name, value, key))
            hint = fields_of(core)[name]
            seen = _join(seen, name)
    return hint


def is_scalar(hint: Any) -> bool:
    """True for text, numbers and names from a list: on the command line they are taken as they stand."""
    core = without_null(hint)
    return core in (str, int, float) or typing.get_origin(core) is Literal


def all_keys(section: type = Config, prefix: str = "") -> Iterator[str]:
    """Yields every key that holds a value, as `section.key`; keys of list items as `data.sources[].path`."""
    for name, hint in fields_of(section).items():
        core, key = without_null(hint), _join(prefix, name)
        item = typing.get_args(core)[0] if typing.get_origin(core) is list else None
        if is_dataclass(core):
            yield from all_keys(typing.cast(type, core), key)
        elif is_dataclass(item):
            yield from all_keys(typing.cast(type, item), f"{key}[]")
        else:
            yield key


def nearest(name: str, names: list[str]) -> str | None:
    """Returns the most similar of `names`, or None where none is close."""
    if len(name) > 200:
        return None
    plain = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(plain), n=1, cutoff=0.5)
    return plain[found[0]] if found else None


def fields_of(section: Any) -> dict[str, Any]:
    """Returns the type of each field of a section, in order, with its bounds."""
    return _type_hints(section)


@cache
def _type_hints(section: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def without_null(hint: Any) -> Any:
    """The type itself, without `| None` and bounds."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def bounds_of(hint: Any) -> Range | PathText | None:
    """What a type's values may be beyond it (pretrain/config/bounds.py)."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((option.__metadata__[0] for option in options if typing.get_origin(option) is Annotated), None)


def is_nullable(hint: Any) -> bool:
    """Whether null is one of its values."""
    return typing.get_origin(hint) in (Union, types.UnionType)


def describe_type(hint: Any) -> str:
    """Returns the values of a type in words: "an integer >= 1 and <= 512, or null"."""
    core, bounds = without_null(hint), bounds_of(hint)
    suffix = ", or null" if is_nullable(hint) else ""
    kind, items = typing.get_origin(core), typing.get_args(core)
    if kind is Literal:
        return "one of " + ", ".join(items) + suffix
    if is_dataclass(core):
        return f"a section with the keys {', '.join(fields_of(core))}" + suffix
    if kind is tuple:
        return f"a list of {len(items)} values, each {describe_type(items[0])}" + suffix
    if kind is list:
        plain = is_dataclass(items[0]) or items[0] is str
        return "a list" + ("" if plain else f", each {describe_type(items[0])}") + suffix
    if isinstance(bounds, PathText):
        return "the name of a folder" + suffix
    return _TYPE_NAMES[core] + (f" {bounds}" if bounds is not None else "") + suffix


def show(value: Any) -> str:
    """A value in a message: in quotes where it is text, and not too long."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def show_key(key: str) -> str:
    """A key as it was typed, in one line and not too long."""
    text = key if key.isprintable() else repr(key)
    return text if len(text) <= 120 else text[:117] + "..."


def _check_section(tree: Mapping[Any, Any], section: type, prefix: str, raw: bool) -> dict[str, Any]:
    hints = fields_of(section)
    checked = {}
    for name, value in tree.items():
        if name not in hints:
            raise ConfigError(_unknown_key(section, prefix, str(name), value, _join(prefix, str(name))))
        checked[name] = _check(value, hints[name], _join(prefix, name), raw)
    for item in fields(section):
        if not raw and item.default == MISSING and item.name not in checked:
            raise ConfigError(_missing(_join(prefix, item.name)))
    return checked


def _check(value: Any, hint: Any, key: str, raw: bool) -> Any:
    core = without_null(hint)
    kind = typing.get_origin(core)
    if isinstance(value, str) and not is_dataclass(core) and (INTERPOLATION in value or value == MISSING):
        if raw:
            return value
        raise ConfigError(_missing(key) if value == MISSING else f"{key}={show(value)}: expected text without ${{")
    if value is None and is_nullable(hint):
        return None
    if is_dataclass(core) and isinstance(value, Mapping):
        return _check_section(value, typing.cast(type, core), key, raw)
    if kind in (list, tuple) and isinstance(value, list | tuple):
        items = typing.get_args(core)
        if kind is tuple and len(value) != len(items):
            raise _misfit(value, hint, key)
        hints = items if kind is tuple else items[:1] * len(value)
        pairs = zip(value, hints, strict=True)
        return [_check(item, item_hint, f"{key}[{i}]", raw) for i, (item, item_hint) in enumerate(pairs)]
    if kind is Literal and isinstance(value, str) and value in typing.get_args(core):
        return value
    if core in _TYPE_NAMES and (converted := _as_scalar(value, core)) is not None:
        return _within(converted, hint, key)
    raise _misfit(value, hint, key)


def _within(value: Any, hint: Any, key: str) -> Any:
    """`value` if its bounds hold; a folder's name without `~`."""
    bounds = bounds_of(hint)
    if isinstance(value, str):
        if not is_one_line(value):
            raise ConfigError(f"{key}={show(value)}: expected {ONE_LINE}")
        if len(os.fsencode(value)) > _LONGEST_TEXT:
            raise ConfigError(f"{key}={show(value)}: expected at most {_LONGEST_TEXT} bytes of text")
        if isinstance(bounds, PathText):
            try:
                return bounds.expand(value)
            except ValueError as error:
                raise ConfigError(f"{key}={show(value)}: expected {error}") from error
    if isinstance(bounds, Range) and value not in bounds:
        raise _misfit(value, hint, key)
    return value


def _as_scalar(value: Any, core: type) -> Any:
    """Returns `value` as int, float, bool or str, or None where that would change what was written."""
    if core is bool:
        return value if isinstance(value, bool) else _TRUTH.get(value) if isinstance(value, str) else None
    if core is str or isinstance(value, bool):
        return value if core is str and isinstance(value, str) else None
    if (core is int and isinstance(value, float)) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not _PATTERNS[core].fullmatch(value):
        return None
    try:
        number = core(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _missing(key: str) -> str:
    return f"{key}: expected a value, none is given"


def _misfit(value: Any, hint: Any, key: str) -> ConfigError:
    message = f"{key}={show(value)}: expected {describe_type(hint)}"
    if advice := _advice(value, hint):
        message += f"; {advice}"
    return ConfigError(message)


def _advice(value: Any, hint: Any) -> str:
    core = without_null(hint)
    if value is None:
        return "null is not allowed here"
    if is_nullable(hint) and isinstance(value, str | int | float) and str(value).lower() in _NULL_WORDS:
        return "for none write null"
    if core in (int, float) and isinstance(value, str | float) and not isinstance(value, bool):
        return _as_decimal(value, core)
    if core is str and isinstance(value, bool | int | float):
        return "put text that looks like a number or a truth value in quotes"
    if typing.get_origin(core) is Literal:
        near = nearest(str(value), list(typing.get_args(core)))
        return f"nearest: {near}" if near else ""
    if isinstance(value, str) and core is not str:
        return "of text from the environment: ${oc.decode:${oc.env:NAME}}" if value[:1] in ("[", "{") else ""
    return ""


def _as_decimal(value: str | float, core: type) -> str:
    """How to write the number that may be meant: 10000 for 1e4, 650 for 0650."""
    try:
        number = float(value)
    except ValueError:
        return ""
    if not number.is_integer() or abs(number) >= 1e15 or (isinstance(value, float) and core is float):
        return ""
    return f"write {int(number)}"


def _unknown_key(section: Any, prefix: str, name: str, value: Any, typed: str) -> str:
    """The message for the `typed` key, of which `name` does not exist in `section` at `prefix`."""
    head = f"{show_key(typed)}={show(value)}: "
    if not is_dataclass(section):
        return head + f"{prefix} holds a value, not a section"
    if "." in name and not prefix and name in all_keys():
        return head + f"write it nested, '{name.replace('.', ': {')}: ...{'}' * name.count('.')}'"
    if near := _nearest_key(section, prefix, name, typed):
        return head + f"unknown key; nearest: {near}"
    plain = _plain(name)
    if elsewhere := [other for other in all_keys() if other.rsplit(".", 1)[-1] == plain]:
        return head + f"unknown key; it exists as {' and '.join(elsewhere)}"
    kind = f"keys of {prefix}" if prefix else "sections"
    return head + f"unknown key; the {kind} are {', '.join(fields_of(section))}"


def _nearest_key(section: Any, prefix: str, name: str, typed: str) -> str | None:
    """The whole key that was probably meant."""
    plain, names = _plain(name), list(fields_of(section))
    rest = typed[len(_join(prefix, name)) :]
    exact = next((n for n in names if n == plain), None)
    elsewhere = [key for key in all_keys() if key.rsplit(".", 1)[-1] == plain]
    if not exact and not rest and (elsewhere or plain in OTHER_NAMES):
        return None if elsewhere else OTHER_NAMES[plain]
    near = exact or nearest(name, names)
    if near is None:
        return _nearest_whole(typed) if rest else None
    whole = _join(prefix, near) + rest
    return whole if not rest or whole in all_keys() else _nearest_whole(whole) or _join(prefix, near)


def _nearest_whole(key: str) -> str | None:
    last = _plain(key.rsplit(".", 1)[-1])
    if last in OTHER_NAMES:
        return OTHER_NAMES[last]
    return nearest(key, list(all_keys()))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _found(tree: Any) -> str:
    return "a list" if isinstance(tree, list) else show(tree)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
