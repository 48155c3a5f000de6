"""Text read in bounded memory: blocks, lines and the count of words."""

import random

import pytest
from helpers.data_helpers import ODD_TEXTS
from hypothesis import given
from hypothesis import strategies as st

from parnas.data.text import LONGEST_LINE, TextSlice, count_words, split_lines


@given(texts=st.lists(st.sampled_from(ODD_TEXTS), max_size=8), size=st.integers(4, 50), data=st.data())
def test_blocks_joined_are_the_slice(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    whole = "".join(texts).encode()
    path.write_bytes(whole)
    start = data.draw(st.integers(0, len(whole)))
    text = TextSlice(path, start, data.draw(st.integers(start, len(whole))))
    blocks = list(text.blocks(size))
    assert b"".join(blocks) == whole[text.start : text.stop]
    assert all(blocks)
    assert text.bytes == text.stop - text.start


@given(texts=st.lists(st.sampled_from(ODD_TEXTS), max_size=8), size=st.integers(4, 50))
def test_blocks_divide_no_character_and_no_short_line(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    whole = "".join(texts).encode()
    path.write_bytes(whole)
    lines = []
    for block in TextSlice.whole(path).blocks(size):
        lines += split_lines(block.decode())
    for line in split_lines(whole.decode()):
        assert line in lines or len(line.encode()) >= size


def test_a_line_too_long_comes_in_pieces_that_begin_with_a_space() -> None:
    draw = random.Random(0)
    line = " ".join("x" * draw.randint(1, 20) for _ in range(30_000))
    pieces = split_lines(line + "\nshort\n")
    assert "".join(pieces) == line + "\nshort\n"
    assert max(map(len, pieces)) <= LONGEST_LINE
    assert len(pieces) < len(line) / LONGEST_LINE + 3
    assert all(piece.startswith(" ") and not piece.startswith("  ") for piece in pieces[1:-1])
    assert [piece.endswith("\n") for piece in pieces] == [False] * (len(pieces) - 2) + [True, True]
    assert [len(piece) for piece in split_lines("y" * (2 * LONGEST_LINE + 5))] == [LONGEST_LINE, LONGEST_LINE, 5]


@given(text=st.text(st.sampled_from("ab é日\t\n\r\x0b\x1c\x1f\x85\xa0\u2003\u2028\u3000\u200b")))
def test_words_are_counted_as_python_splits_them(text: str) -> None:
    assert count_words(text.encode()) == len(text.split())
