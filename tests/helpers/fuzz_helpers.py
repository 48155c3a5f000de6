"""Counting of fuzzed cases, the property that all fuzz tests assert, and the generators of their inputs."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from parnas.architecture import MAX_BLOCKS
from parnas.errors import ParnasError

LONGEST_MESSAGE = 60_000  # characters: a hundred mistakes of a configuration, each shortened
T = TypeVar("T")


class Cases:
    """Counts the cases of a test, for the table at the end of a session."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self.count, self.record = 0, record

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, or `None` if it raises a printable `ParnasError`; other errors fail the test."""
        self.count += 1
        try:
            return make()
        except ParnasError as error:
            length = len(str(error))
        assert 10 < length < LONGEST_MESSAGE
        return None


@contextmanager
def counting(record_property: Callable[[str, object], None]) -> Iterator[Cases]:
    """Record the number of cases of a test at its end."""
    cases = Cases(record_property)
    yield cases
    record_property("cases", cases.count)


@pytest.fixture
def cases(record_property: Callable[[str, object], None]) -> Iterator[Cases]:
    """Do what `counting` does, for a whole module."""
    with counting(record_property) as counted:
        yield counted


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["", "s", "sfsf", "auto", "\n", "\0", "é", "\u2028", "x" * 5000, "~nobody/x", "1e5", "null", "<<", "="]
    )
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)

NAMES = st.sampled_from(["s", "f", "i", "c", "s:heads=2", "s:d_head=8,heads=03", "f:d_inner=64", "c:heads=1"])


@st.composite
def expressions(draw, depth: int = 4):
    """Draw an architecture expression, and its layers by a slow and obvious computation."""
    text, meaning = "", []
    for _ in range(draw(st.integers(1, 3))):
        if depth and draw(st.booleans()):
            inner, names = draw(expressions(depth=depth - 1))
            item = "(" * (deep := draw(st.sampled_from([1, 1, 2, 300]))) + inner + ")" * deep
        else:
            item = draw(NAMES)
            names = [item]
        times = draw(st.none() | st.integers(1, 4) | st.sampled_from([5, 30, 90, 999, 1000, 999_999_999]))
        text += f" {item}" + ("" if times is None else f"*{times}")
        meaning += names * min(times or 1, MAX_BLOCKS + 1)
        meaning = meaning[: MAX_BLOCKS + 1]
    return text, meaning


def places(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside nested dictionaries and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutate(tree: Any, draw: random.Random, value: object) -> Any:
    """Draw a copy of a tree of JSON values in which a value is replaced, removed, added or doubled."""
    tree = json.loads(json.dumps(tree))
    found = list(places(tree))
    if not found or draw.random() < 0.05:
        return value
    *above, last = draw.choice(found)
    inner = tree
    for key in above:
        inner = inner[key]
    match draw.randrange(4):
        case 0 if isinstance(inner, dict):
            del inner[last]
        case 1 if isinstance(inner, dict):
            inner[f"{last}x"] = inner[last]
        case 2 if isinstance(inner, list):
            inner.insert(last, inner[last])
        case _:
            inner[last] = value
    return tree


def damage(content: bytes, draw: random.Random) -> bytes:
    """Draw a copy of bytes with some of them changed, removed, doubled or cut off."""
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        place = draw.randrange(len(content) + 1)
        length = draw.choice([1, 1, 2, 8, 100])
        match draw.randrange(5):
            case 0:
                content = content[:place] + draw.randbytes(length) + content[place + length :]
            case 1:
                content = content[:place] + content[place + length :]
            case 2:
                content = content[:place] + content[place : place + length] * 3 + content[place + length :]
            case 3:
                content = content[:place]
            case 4:
                content = (
                    content[:place]
                    + draw.choice([b"{", b"]", b'"', b":", b"\n", b"&a ", b"*a", b"- ", b"!!int "])
                    + content[place:]
                )
    return content


def plain(tree: object) -> object:
    """Return what PyYAML reads, with lists as tuples."""
    if isinstance(tree, dict):
        return {plain(key): plain(value) for key, value in tree.items()}
    return tuple(map(plain, tree)) if isinstance(tree, list | tuple) else tree
