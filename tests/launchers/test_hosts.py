"""Node lists: every form that SLURM writes, and what is none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.hosts import expand_hosts
from pretrain.errors import DistributedError


@pytest.mark.parametrize(
    "node_list, hosts",
    [
        ("gpu7", ["gpu7"]),
        ("linux[1,2]", ["linux1", "linux2"]),
        ("linux[1-2]", ["linux1", "linux2"]),
        ("a,b,login-1", ["a", "b", "login-1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-100,7]", ["n098", "n099", "n100", "n7"]),
        ("r[1-2]n[1-2].ib", ["r1n1.ib", "r1n2.ib", "r2n1.ib", "r2n2.ib"]),
        ("a[1-2],b,c[3,5-6]x", ["a1", "a2", "b", "c3x", "c5x", "c6x"]),
    ],
)
def test_the_forms_of_slurm(node_list: str, hosts: list[str]) -> None:
    assert expand_hosts(node_list) == hosts


@pytest.mark.parametrize(
    "node_list, part",
    [
        ("", "nothing"),
        ("a,", "nothing"),
        (",a", "',a'|,a"),
        ("a,,b", ",b"),
        ("n[1-2", r"\[1-2"),
        ("n1-2]", r"\]"),
        ("n[2-1]", r"\[2-1\]"),
        ("n[a-b]", r"\[a-b\]"),
        ("n[]", r"\[\]"),
        ("n[1,]", r"\[1,\]"),
        ("a b", " b"),
    ],
)
def test_what_is_no_list_is_refused(node_list: str, part: str) -> None:
    with pytest.raises(DistributedError, match=f"expected names such as .*found .*{part}"):
        expand_hosts(node_list)


TEXT = st.text("abcxyz-._0123456789", min_size=1, max_size=6)


@st.composite
def groups(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracket group and the numbers that it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        low, count, width = draw(st.integers(0, 2000)), draw(st.integers(1, 12)), draw(st.integers(1, 5))
        padded = [str(n).zfill(width) for n in range(low, low + count)]
        # A range's first number fixes the width of all.
        numbers += [str(n).zfill(len(padded[0])) for n in range(low, low + count)]
        texts.append(padded[0] if count == 1 else f"{padded[0]}-{low + count - 1}")
    return f"[{','.join(texts)}]", numbers


@st.composite
def names(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A name with groups, and the hosts it stands for, built piece by piece."""
    text = ""
    pieces: list[list[str]] = []
    for _ in range(draw(st.integers(0, 2))):
        plain = draw(TEXT)
        group, numbers = draw(groups())
        text, pieces = text + plain + group, [*pieces, [plain], numbers]
    end = draw(TEXT)
    return text + end, ["".join(host) for host in itertools.product(*pieces, [end])]


@given(st.lists(names(), min_size=1, max_size=4))
def test_a_list_stands_for_the_hosts_of_its_names(parts: list[tuple[str, list[str]]]) -> None:
    node_list = ",".join(text for text, _ in parts)
    assert expand_hosts(node_list) == [host for _, hosts in parts for host in hosts]


@given(st.text("an,[]-01 ", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except DistributedError:
        return
    assert hosts and all(host and not set(host) & set(",[] ") for host in hosts)
