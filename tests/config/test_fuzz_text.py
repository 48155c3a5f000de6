"""Fuzzing of what people type: architectures and YAML.

Each case ends in a `ParnasError` or in a result that is checked; any other exception fails the test.
"""

import re

import pytest
import yaml
from helpers.fuzz_helpers import Cases, cases, expressions
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parnas.architecture import LETTERS, MAX_BLOCKS, Architecture
from parnas.config.yaml_file import MAX_SIZE, read_yaml, to_yaml

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # the other tests cover what these read
__all__ = ["cases"]

# Architectures

PRESETS = ["interleaved", "compressive", "sandwich", "all-f", "random", "all", "none"]


def test_expressions_mean_what_they_say(cases: Cases) -> None:
    @settings(max_examples=200)
    @given(expressions())
    def check(pair) -> None:
        text, meaning = pair
        architecture = cases.attempt(lambda: Architecture.parse(text))
        assert (architecture is None) == (len(meaning) > MAX_BLOCKS)
        if architecture is not None:
            kept = {name: str(Architecture([name])) for name in meaning}
            assert list(architecture) == [kept[name] for name in meaning]
            check_architecture(architecture)

    check()


def check_architecture(architecture: Architecture) -> None:
    """What holds for all."""
    assert 1 <= len(architecture) <= MAX_BLOCKS
    assert {name[0] for name in architecture} <= set(LETTERS)
    assert Architecture.parse(str(architecture)) == architecture
    assert sum(architecture.counts().values()) == len(architecture)
    kept = [name for name in architecture if name != "i"]
    if kept:
        assert list(architecture.canonical()) == kept


def test_presets_have_as_many_blocks_as_they_say(cases: Cases) -> None:
    numbers = st.integers(0, 1100).map(str) | st.integers(0, 10**12).map(str) | st.sampled_from(["", "-", "1-2", "٣"])

    @settings(max_examples=200)
    @given(st.sampled_from(PRESETS), st.lists(numbers))
    def check(name: str, given_numbers: list[str]) -> None:
        architecture = cases.attempt(lambda: Architecture.parse("-".join([name, *given_numbers])))
        if architecture is not None:
            assert len(architecture) == int(given_numbers[0].split("-")[0])
            check_architecture(architecture)

    check()


def test_any_text_is_an_architecture_or_refused(cases: Cases) -> None:
    junk = st.text(max_size=30) | st.text("sfic()*0123456789 -:=,heads_inr", max_size=40)

    @settings(max_examples=500)
    @given(junk)
    @example("random-3-" + "9" * 12)
    @example("s*" + "9" * 30)
    @example("(" * 500 + ")" * 500)
    @example("s*٣")
    def check(text: str) -> None:
        architecture = cases.attempt(lambda: Architecture.parse(text))
        if architecture is not None:
            check_architecture(architecture)

    check()


def test_huge_texts_are_refused_or_read(cases: Cases) -> None:
    pieces = [
        "s",
        "(",
        ")",
        "(s",
        "s)",
        "(s)",
        "s:",
        "s:heads=2 ",
        "*",
        "*9",
        " ",
        "-1",
        "9",
        "x",
        "s*1",
        "()",
        "\0",
        "é",
    ]
    for piece, size in [*((piece, 99_000) for piece in pieces), ("s", 1_000_000)]:  # below and above MAX_TEXT
        for text in (
            piece * (size // len(piece)),
            "(" * (size // 2) + piece + ")" * (size // 2),
            f"random-{piece * size}",
        ):
            architecture = cases.attempt(lambda text=text: Architecture.parse(text))
            if architecture is not None:
                check_architecture(architecture)
    for text in (
        "(s)*999999999",
        "s" * 1000 + "*999999",
        "((((s)*999)*999)*999)*999",
        "sandwich-1000-500",
        "random-9-" + "9" * 9,
    ):
        architecture = cases.attempt(lambda text=text: Architecture.parse(text))
        assert (architecture is None) == ("*" in text)


# YAML

YAML_PARTS = [
    *("a: ", "b", "- ", "{", "}", "[", "]", ", ", "\n", "  ", "&x ", "*x", "<<: ", "? ", ": ", "'", '"', "|\n", ">\n"),
    *(
        "1",
        "1e5",
        ".inf",
        "=",
        "~",
        "2001-01-01",
        "1:30",
        "0b1",
        "#",
        "%YAML 1.1\n",
        "---\n",
        "...\n",
        "\\",
        "\t",
        "\x85",
    ),
    *(
        "!!int ",
        "!!float ",
        "!!null ",
        "!!bool ",
        "!!set ",
        "!!omap ",
        "!!pairs ",
        "!!binary ",
        "!!timestamp ",
        "!!map ",
    ),
    *(
        "!!seq ",
        "!!str ",
        "!!merge ",
        "!!value ",
        "!exponent ",
        "!x ",
        "!!python/object:os.system ",
        "!!python/name:x ",
    ),
]


def test_trees_survive_a_round_trip_through_yaml(cases: Cases) -> None:
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    texts |= st.sampled_from(
        ["", " ", "a\n", "\x85", "\u2028", "a  b " * 60, "1e5", "0x1", "1:30", "<<", "=", "~", "off", "\ufeff"]
    )
    leaves = texts | st.integers(-(2**63), 2**63) | st.booleans() | st.none() | st.floats(allow_nan=False)
    trees = st.recursive(
        leaves, lambda inner: st.dictionaries(texts, inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    )

    @settings(max_examples=200)
    @given(trees)
    def check(tree) -> None:
        text = to_yaml(as_lists(tree))
        assert cases.attempt(lambda: (read_yaml(text, "the text"),)) == (tree,)

    check()


def as_lists(tree: object) -> object:
    """Tuples as lists, as YAML has them."""
    if isinstance(tree, dict):
        return {key: as_lists(value) for key, value in tree.items()}
    return [as_lists(value) for value in tree] if isinstance(tree, tuple) else tree


class TupleLoader(yaml.SafeLoader):
    """PyYAML's loader with lists as tuples, which may be keys of mappings."""


TupleLoader.add_constructor(
    "tag:yaml.org,2002:seq", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
)


def test_any_text_is_yaml_or_refused(cases: Cases) -> None:
    text = st.lists(st.sampled_from(YAML_PARTS), max_size=14).map("".join) | st.text(max_size=30)

    @settings(max_examples=500)
    @given(text)
    @example("? - ")
    def check(text: str) -> None:
        found = cases.attempt(lambda: (read_yaml(text, "the text"),))
        if found is not None and "!" not in text and not re.search(r"\d[eE]", text):
            assert repr(found[0]) == repr(yaml.load(text, Loader=TupleLoader))

    check()


def test_texts_with_too_many_values_are_refused(cases: Cases) -> None:
    """Texts of known size: those above the limit are refused."""

    @settings(max_examples=30)
    @given(st.integers(1, 40), st.integers(1, 6000), st.sampled_from([("[x]", 2), ("{k: x}", 3), ("x" * 1000, 11)]))
    def check(lines: int, width: int, content: tuple[str, int]) -> None:
        text, size = content
        found = cases.attempt(lambda: read_yaml(f"- [{f'{text}, ' * width}]\n" * lines, "the text"))
        assert (found is None) == (1 + lines * (1 + width * size) > MAX_SIZE)

    check()
