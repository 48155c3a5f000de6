"""The architecture: one letter per block, and the grammar it is written in.

    expression := item+            item := letter | '(' expression ')' [ '*' count ] | letter '*' count

so that `sfsf`, `(sf)*2` and `s*1 f (sf)` all name networks. Presets stand for whole expressions:
`interleaved-N`, `sandwich-N-K`, `all-f-N` and `random-N-SEED`, where N is the number of blocks.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from parnas.errors import ParnasError

ATTENTION, FEED_FORWARD, IDENTITY = "s", "f", "i"
LETTERS = {ATTENTION: "self-attention", FEED_FORWARD: "feed-forward", IDENTITY: "identity"}
MAX_BLOCKS = 1000
MAX_TEXT = 10_000

_TOKEN = re.compile(r"\s*(?:([a-z])|([()])|\*\s*(\d{1,6}))")
_PRESET = re.compile(r"(interleaved|sandwich|all-f|random)((?:-\d{1,9})+)")
_HELP = (
    "Write one letter per block (s self-attention, f feed-forward, i identity), such as sfsff or (sf)*8, "
    "or a preset: interleaved-N, sandwich-N-K, all-f-N, random-N-SEED."
)


@dataclass(frozen=True)
class Architecture:
    """The layer string of a network, such as `sfsff`; iterating gives one letter per block."""

    letters: str

    def __post_init__(self) -> None:
        if not self.letters or len(self.letters) > MAX_BLOCKS:
            raise ParnasError(f"An architecture has 1 to {MAX_BLOCKS} blocks, not {len(self.letters)}. {_HELP}")
        if unknown := set(self.letters) - set(LETTERS):
            raise ParnasError(f"Unknown layer letter {sorted(unknown)[0]!r} in an architecture. {_HELP}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an expression or a preset; raises `ParnasError` with the place of the mistake."""
        text = text.strip()
        if len(text) > MAX_TEXT:
            raise ParnasError(f"The architecture is {len(text)} characters long; at most {MAX_TEXT} are read. {_HELP}")
        if preset := _PRESET.fullmatch(text):
            return cls(_preset(preset[1], [int(number) for number in preset[2][1:].split("-")], text))
        return cls(_expand(text))

    def canonical(self) -> Self:
        """The same network without identity blocks: `sifi` and `iisf` are both `sf`."""
        letters = self.letters.replace(IDENTITY, "")
        if not letters:
            raise ParnasError(f"{self} has no layer besides identity, so there is no network to train.")
        return type(self)(letters)

    def counts(self) -> dict[str, int]:
        """Number of blocks per letter, every known letter included."""
        found = Counter(self.letters)
        return {letter: found[letter] for letter in LETTERS}

    def __str__(self) -> str:
        return self.letters

    def __len__(self) -> int:
        return len(self.letters)

    def __iter__(self) -> Iterator[str]:
        return iter(self.letters)


def _expand(text: str) -> str:
    """Expand groups and repeats; open groups are kept on a stack, so depth costs no recursion."""
    groups: list[list[str]] = [[]]
    position = 0
    repeatable = False
    while position < len(text):
        token = _TOKEN.match(text, position)
        if not token:
            raise ParnasError(
                f"Cannot read the architecture at character {position + 1}: {text[position:][:12]!r}. {_HELP}"
            )
        letter, bracket, count = token.groups()
        if letter:
            groups[-1].append(letter)
        elif bracket == "(":
            groups.append([])
        elif bracket == ")":
            if len(groups) == 1:
                raise ParnasError(
                    f"The architecture closes a bracket it never opened, at character {token.end()}. {_HELP}"
                )
            inner = groups.pop()
            if not inner:
                raise ParnasError(f"The architecture has an empty group, at character {token.end()}. {_HELP}")
            groups[-1].append("".join(inner))
        else:
            if not repeatable:
                raise ParnasError(f"Nothing to repeat before '*' at character {token.start() + 1}. {_HELP}")
            last = groups[-1].pop()
            if not 1 <= int(count) * len(last) <= MAX_BLOCKS:
                raise ParnasError(f"{last[:12]!r} repeated {count} times is not 1 to {MAX_BLOCKS} blocks. {_HELP}")
            groups[-1].append(last * int(count))
        if sum(map(len, groups[-1])) > MAX_BLOCKS:
            raise ParnasError(f"The architecture has more than {MAX_BLOCKS} blocks. {_HELP}")
        repeatable = bool(letter) or bracket == ")"
        position = token.end()
    if len(groups) > 1:
        raise ParnasError(f"The architecture leaves {len(groups) - 1} bracket(s) open. {_HELP}")
    return "".join(groups[0])


def _preset(name: str, numbers: list[int], text: str) -> str:
    expected = {"interleaved": 1, "all-f": 1, "sandwich": 2, "random": 2}[name]
    if len(numbers) != expected:
        raise ParnasError(f"{name} takes {expected} number(s), not {len(numbers)}, in {text!r}. {_HELP}")
    blocks = numbers[0]
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ParnasError(f"{text!r} asks for {blocks} blocks; 1 to {MAX_BLOCKS} are possible.")
    if name == "interleaved":
        return "".join((ATTENTION, FEED_FORWARD)[block % 2] for block in range(blocks))
    if name == "all-f":
        return FEED_FORWARD * blocks
    if name == "random":
        return "".join(random.Random(numbers[1]).choices(list(LETTERS), k=blocks))
    # Sandwich ordering, Press et al. 2020 (arXiv 1911.03864): s^K (sf)^(N/2-K) f^K.
    ends = numbers[1]
    if blocks % 2 or ends > blocks // 2:
        raise ParnasError(f"sandwich-N-K needs an even N and a K of at most N/2, unlike {text!r}.")
    return ATTENTION * ends + (ATTENTION + FEED_FORWARD) * (blocks // 2 - ends) + FEED_FORWARD * ends
