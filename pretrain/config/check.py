"""Checks of raw configuration values against the section dataclasses: known keys and types, with messages that help.

A value arrives as YAML gave it. It leaves as the type of its field, or as a ConfigError of the form
`ORIGIN: key=value: expected ...`, where ORIGIN is the file or "command line".
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, Union

from pretrain.config.schema import Config
from pretrain.errors import ConfigError

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


def check_tree(tree: Any, origin: str) -> dict[str, Any]:
    """Returns the sections of `tree` with every value as its field's type; ConfigError names what does not fit.

    Interpolations (`${...}`) and the mark of a missing value (`???`) pass; OmegaConf checks them when it resolves.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{origin}: expected sections ({', '.join(fields_of(Config))}), found {_show(tree)}")
    return _check_section(tree, Config, "", origin)


def check_value(value: Any, key: str, origin: str) -> Any:
    """Returns `value` as the type of the field `key`, such as `optimizer.lr` or `data.sources[0].path`."""
    return _check(value, type_of(key, value, origin), key, origin)


def type_of(key: str, value: Any, origin: str) -> Any:
    """Returns the type annotation of `key`; ConfigError with the nearest name where there is no such key."""
    hint: Any = Config
    seen = ""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key):
        core = without_null(hint)
        if index:
            if typing.get_origin(core) not in (list, tuple):
                raise ConfigError(f"{origin}: {key}={_show(value)}: {seen} is not a list")
            hint = typing.get_args(core)[0]
            seen += f"[{index}]"
        else:
            if not is_dataclass(core) or name not in fields_of(core):
                raise ConfigError(_unknown_key(core, seen, name, value, origin))
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
    plain = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(plain), n=1, cutoff=0.5)
    return plain[found[0]] if found else None


def fields_of(section: Any) -> dict[str, Any]:
    """Returns the type of each field of a section, in order."""
    return typing.get_type_hints(section)


def without_null(hint: Any) -> Any:
    """The type itself, without `| None`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def describe_type(hint: Any) -> str:
    """Returns the values of a type in words: "an integer, or null"."""
    core = without_null(hint)
    suffix = ", or null" if core is not hint else ""
    kind = typing.get_origin(core)
    if kind is Literal:
        return "one of " + ", ".join(typing.get_args(core)) + suffix
    if is_dataclass(core):
        return f"a section with the keys {', '.join(fields_of(core))}" + suffix
    if kind is tuple:
        return f"a list of {len(typing.get_args(core))} values" + suffix
    if kind is list:
        return "a list" + suffix
    return _TYPE_NAMES[core] + suffix


def _check_section(tree: Mapping[Any, Any], section: type, prefix: str, origin: str) -> dict[str, Any]:
    fields = fields_of(section)
    checked = {}
    for name, value in tree.items():
        if name not in fields:
            raise ConfigError(_unknown_key(section, prefix, str(name), value, origin))
        checked[name] = _check(value, fields[name], _join(prefix, name), origin)
    return checked


def _check(value: Any, hint: Any, key: str, origin: str) -> Any:
    core = without_null(hint)
    if isinstance(value, str) and (INTERPOLATION in value or value == MISSING):
        return value
    if value is None and core is not hint:
        return None
    kind = typing.get_origin(core)
    if is_dataclass(core) and isinstance(value, Mapping):
        return _check_section(value, typing.cast(type, core), key, origin)
    if kind in (list, tuple) and isinstance(value, list | tuple):
        types_ = typing.get_args(core)
        if kind is tuple and len(value) != len(types_):
            raise _misfit(value, hint, key, origin)
        return [
            _check(item, types_[i] if kind is tuple else types_[0], f"{key}[{i}]", origin)
            for i, item in enumerate(value)
        ]
    if kind is Literal and isinstance(value, str) and value in typing.get_args(core):
        return value
    if core in _TYPE_NAMES and (converted := _as_scalar(value, core)) is not None:
        return converted
    raise _misfit(value, hint, key, origin)


def _as_scalar(value: Any, core: type) -> Any:
    """Returns `value` as int, float, bool or str, or None where that would change what was written."""
    if isinstance(value, bool) or core is bool:
        return value if isinstance(value, bool) and core is bool else None
    if core is str:
        return value if isinstance(value, str) else None
    if (core is int and isinstance(value, float)) or not isinstance(value, int | float | str):
        return None
    try:
        number = core(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _misfit(value: Any, hint: Any, key: str, origin: str) -> ConfigError:
    message = f"{origin}: {key}={_show(value)}: expected {describe_type(hint)}"
    if advice := _advice(value, hint):
        message += f"; {advice}"
    return ConfigError(message)


def _advice(value: Any, hint: Any) -> str:
    core = without_null(hint)
    nullable = core is not hint
    if value is None:
        return "null is not allowed here"
    if nullable and isinstance(value, str | int | float) and str(value).lower() in _NULL_WORDS:
        return "for none write null"
    if core is int and isinstance(value, str | float):
        try:
            number = float(value)
        except ValueError:
            return ""
        return f"write {int(number)}" if number.is_integer() else ""
    if core is str and isinstance(value, bool | int | float):
        return "put text that looks like a number or a truth value in quotes"
    if typing.get_origin(core) is Literal:
        near = nearest(str(value), list(typing.get_args(core)))
        return f"nearest: {near}" if near else ""
    return ""


def _unknown_key(section: Any, prefix: str, name: str, value: Any, origin: str) -> str:
    key = _join(prefix, name)
    head = f"{origin}: {key}={_show(value)}: "
    if not is_dataclass(section):
        return head + f"{prefix} holds a value, not a section"
    names = list(fields_of(section))
    if "." in name and not prefix and name in all_keys():
        return head + f"write it nested, '{name.replace('.', ': {')}: ...{'}' * name.count('.')}'"
    plain = name.lower().replace("-", "_")
    elsewhere = [other for other in all_keys() if other.rsplit(".", 1)[-1] == plain and other != key]
    if near := next((n for n in names if n == plain), None) or (None if elsewhere else nearest(name, names)):
        return head + f"unknown key; nearest: {_join(prefix, near)}"
    if elsewhere:
        return head + f"unknown key; it exists as {' and '.join(elsewhere)}"
    if plain in OTHER_NAMES:
        return head + f"unknown key; nearest: {OTHER_NAMES[plain]}"
    kind = f"keys of {prefix}" if prefix else "sections"
    return head + f"unknown key; the {kind} are {', '.join(names)}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
