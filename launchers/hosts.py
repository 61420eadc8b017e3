"""SLURM's compressed lists of node names, read without scontrol, which not every compute node has.

A list is names separated by commas; a name may hold groups in brackets, `rack[1-2]n[08,10-12].ib`, each of which stands
for its numbers, written as wide as the first of a range.
"""

from __future__ import annotations

import itertools
import re

from pretrain.errors import DistributedError

_NAME = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(node_list: str) -> list[str]:
    """The names that `node_list` stands for, in its order (that of the tasks), as `scontrol show hostnames` has them.

    Errors: DistributedError naming the list and what in it is no node name.
    """
    names = _split(node_list)
    return [host for name in names for host in _expand(name, node_list)]


def _split(node_list: str) -> list[str]:
    """The names between the commas that stand outside of brackets."""
    names: list[str] = []
    position = 0
    while position < len(node_list) or not names:
        found = _NAME.match(node_list, position)
        if found is None or node_list[found.end() : found.end() + 1] not in ("", ","):
            at = position if found is None else found.end()
            raise _unreadable(node_list, node_list[at:] or "nothing")
        names.append(found[0])
        position = found.end() + 1
    if node_list.endswith(","):
        raise _unreadable(node_list, "nothing")
    return names


def _expand(name: str, node_list: str) -> list[str]:
    pieces = _GROUP.split(name)  # text, group, text, group, ..., text
    choices = [_numbers(p, node_list) if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(group: str, node_list: str) -> list[str]:
    numbers = []
    for item in group.split(","):
        found = _RANGE.fullmatch(item)
        low, high = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(low) > int(high):
            raise _unreadable(node_list, f"[{group}]")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return numbers


def _unreadable(node_list: str, part: str) -> DistributedError:
    return DistributedError(
        f"node list {node_list!r}: expected names such as gpu7,gpu[01-04,9] from SLURM_STEP_NODELIST, found {part}"
    )
