"""Subword features of tokens: prefixes, suffixes, lower-case form and shape, which related words have in common.

Half of the words of a text are rare, and a network sees too little of each to learn its vector. Words that share a
feature share a vector, which is added to the own vector of each (Botha & Blunsom 2014, arXiv 1405.4273, section 2).
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parnas.config.schema import SUBWORD_KINDS

__all__ = ["subword_features"]

_OTHER = ""  # the feature of a token that has none of a kind


def _shape(word: str) -> str:
    if any(character.isdigit() for character in word):
        return f"number {min(len(word), 6)}"
    return "capital" if word[:1].isupper() else "small"


def _suffix(length: int) -> Callable[[str], str]:
    return lambda word: word[-length:] if len(word) > length + 1 else _OTHER


def _prefix(length: int) -> Callable[[str], str]:
    return lambda word: word[:length].lower() if len(word) > length else _OTHER


# A suffix or prefix leaves at least one character of the word, or it would be the word itself. Case matters at the
# beginning of a word only, and there `_shape` has it.
_FEATURES: dict[str, Callable[[str], str]] = {
    "shape": _shape,
    "lower-case form": str.lower,
    "last character": _suffix(1),
    "last two characters": _suffix(2),
    "last three characters": _suffix(3),
    "first three characters": lambda word: _prefix(3)(word) if len(word) > 4 else _OTHER,
    "first five characters": _prefix(5),
}


def subword_features(spellings: Sequence[str], rows: int) -> NDArray[np.int32]:
    """Return the numbers of the features of each token, [V, SUBWORD_KINDS], below `rows`.

    Each kind has a number for the tokens without such a feature. The other numbers go to the features that most tokens
    have; a feature that fewer tokens have, or one token alone, has no number, and its tokens count as without it.

    Args:
        spellings: the text of each token [V]; white space around it is ignored.
        rows: largest count of different numbers, at least `SUBWORD_KINDS`.
    """
    assert len(_FEATURES) == SUBWORD_KINDS
    words = [spelling.strip() for spelling in spellings]
    found = [[(kind, feature(word)) for word in words] for kind, feature in enumerate(_FEATURES.values())]
    counts = Counter(key for column in found for key in column if key[1] != _OTHER)
    shared = [key for key, count in counts.most_common(rows - SUBWORD_KINDS) if count > 1]
    numbers = {key: number for number, key in enumerate(shared, SUBWORD_KINDS)}
    return np.array([[numbers.get(key, key[0]) for key in column] for column in found], np.int32).T.copy()
