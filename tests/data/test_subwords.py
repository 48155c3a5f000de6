"""Subword features of tokens."""

import numpy as np

from parnas.config.schema import SUBWORD_KINDS
from parnas.data.subwords import subword_features

WORDS = [" the", "\n", " The", " walking", " walked", " talking", " Walking", " 1990", " 2001", " 12", " walks", ""]
KINDS = ["shape", "lower-case form", "last 1", "last 2", "last 3", "first 3", "first 5"]


def features_of(rows=100):
    """The features of each word, by kind."""
    numbers = subword_features(WORDS, rows)
    assert numbers.shape == (len(WORDS), SUBWORD_KINDS)
    assert numbers.dtype == np.int32
    return {word.strip(): dict(zip(KINDS, row.tolist(), strict=True)) for word, row in zip(WORDS, numbers, strict=True)}


def test_related_words_share_numbers():
    found = features_of()
    walking, other, talking = found["walking"], found["Walking"], found["talking"]
    assert {kind for kind in KINDS if walking[kind] == other[kind]} == set(KINDS) - {"shape"}
    assert {kind for kind in KINDS if walking[kind] == talking[kind] >= SUBWORD_KINDS} == {
        *("shape", "last 1", "last 2", "last 3")
    }
    assert walking["first 5"] != talking["first 5"]
    assert walking["first 3"] == found["walked"]["first 3"] == found["walks"]["first 3"] >= SUBWORD_KINDS
    assert found["1990"]["shape"] == found["2001"]["shape"] != found["12"]["shape"]
    assert found["the"]["lower-case form"] == found["The"]["lower-case form"] >= SUBWORD_KINDS


def test_a_feature_of_one_token_alone_has_no_number_of_its_own():
    found = features_of()
    assert [found["talking"][kind] for kind in ("lower-case form", "first 5")] == [1, 6]
    assert list(found[""].values())[1:] == list(range(1, SUBWORD_KINDS))
    used = {number for row in found.values() for number in row.values() if number >= SUBWORD_KINDS}
    assert used == set(range(SUBWORD_KINDS, SUBWORD_KINDS + len(used)))  # numbers have no gaps


def test_the_commonest_features_get_the_numbers_there_are():
    few = features_of(SUBWORD_KINDS + 2)
    shared = {(kind, number) for row in few.values() for kind, number in row.items() if number >= SUBWORD_KINDS}
    assert {kind for kind, _ in shared} == {"shape", "first 3"}  # small letters, and "wal"
    assert max(number for _, number in shared) == SUBWORD_KINDS + 1
