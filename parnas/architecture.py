"""The architecture of a network: one layer name per block, written in the grammar below.

    expression := item+            item := name | '(' expression ')' [ '*' count ] | name '*' count
    name := letter [ ':' option '=' number ( ',' option '=' number )* ]

Examples are `sfsf`, `(sf)*2`, `s*1 f (sf)` and `s:heads=2 f`; white space ends a name with options.
Presets are names of whole architectures of N blocks, such as `interleaved-N`, `sandwich-N-K` and `lfm2-N`: see
`_preset`.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from parnas.errors import ParnasError

__all__ = [
    "ATTENTION",
    "COMPRESSIVE",
    "CONVOLUTION",
    "FEED_FORWARD",
    "GATED_FEED_FORWARD",
    "IDENTITY",
    "LETTERS",
    "RECURRENCE",
    "Architecture",
    "LayerName",
    "Letter",
    "describe_layer",
    "drop_identity",
    "is_preset",
]


class Letter(NamedTuple):
    """A kind of layer: the description of the layer and the names of its options."""

    description: str
    options: tuple[str, ...] = ()


ATTENTION, COMPRESSIVE, FEED_FORWARD, IDENTITY = "s", "c", "f", "i"
CONVOLUTION, RECURRENCE, GATED_FEED_FORWARD = "k", "r", "g"
LETTERS = {
    ATTENTION: Letter("self-attention", ("heads", "d_head", "kv_heads", "window")),
    COMPRESSIVE: Letter("compressive attention", ("heads", "d_head")),
    CONVOLUTION: Letter("gated convolution", ("width",)),
    RECURRENCE: Letter("gated recurrence"),
    FEED_FORWARD: Letter("feed-forward", ("d_inner",)),
    GATED_FEED_FORWARD: Letter("gated feed-forward", ("d_inner",)),
    IDENTITY: Letter("identity"),
}
"""All letters that name layers; `parnas.model.layers.register_layer` adds to them."""
MAX_BLOCKS = 1000
_MAX_NAME = 99  # characters of a layer's name
MAX_TEXT = MAX_BLOCKS * (_MAX_NAME + 1)  # characters, enough for the longest architecture with spaces between names

_TOKEN = re.compile(r"\s*(?:([a-z](?::[^\s()*]*)?)|([()])|\*\s*(\d{1,6}))")
_OPTION = re.compile(r"([a-z][a-z0-9_]*)=0*([1-9][0-9]{0,5})")
_PRESET = re.compile(r"([a-z][a-z0-9]*(?:-f)?)((?:-\d{1,9})+)")
_HELP = (
    "Write one letter per block, such as sfsff or (sf)*8 (s self-attention, k convolution, f feed-forward, …), or a "
    "preset such as interleaved-N or lfm2-N for N blocks; docs/layers.md lists all letters and presets."
)


class LayerName(NamedTuple):
    """A layer's letter and options, such as `s:heads=2,d_head=16`; options are ordered as in `Letter.options`."""

    letter: str
    options: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse one layer name; raise `ParnasError`, listing the allowed letters or options, if it is not valid."""
        letter, colon, listed = text.partition(":")
        if letter not in LETTERS:
            raise ParnasError(
                f"Unknown layer letter {_shorten(letter)}; give one of {', '.join(LETTERS)}. To add a layer of "
                "your own, see PARNAS_LAYERS and register_layer in docs/layers.md."
            )
        known = LETTERS[letter].options
        allowed = f"{letter} takes {', '.join(known)}" if known else f"{letter} takes no options"
        given: dict[str, int] = {}
        for option in listed.split(",") if colon else ():
            match = _OPTION.fullmatch(option)
            if not match:
                raise ParnasError(f"{_shorten(option)} is not of the form option=NUMBER, from 1 to 999999; {allowed}.")
            if match[1] not in known or match[1] in given:
                problem = "given twice" if match[1] in given else "unknown"
                raise ParnasError(f"Option {_shorten(match[1])} is {problem}; {allowed}.")
            given[match[1]] = int(match[2])
        name = cls(letter, tuple((option, given[option]) for option in known if option in given))
        if len(str(name)) > _MAX_NAME:
            raise ParnasError(f"The layer name {_shorten(str(name))} has more than {_MAX_NAME} characters; shorten it.")
        return name

    def __str__(self) -> str:
        listed = ",".join(f"{option}={value}" for option, value in self.options)
        return f"{self.letter}:{listed}" if listed else self.letter


def is_preset(text: str) -> bool:
    """Return whether a text has the form of a preset, such as `interleaved-12` (docs/layers.md)."""
    return _match_preset(text) is not None


def _match_preset(text: str) -> re.Match[str] | None:
    """Return the match of a preset, whose groups are its name and its numbers with hyphens; `None` if it is none."""
    match = _PRESET.fullmatch(text)
    return match if match and match[1] in _PRESETS else None


def drop_identity(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the layers without identity layers, which do not change what a network computes."""
    return tuple(layer for layer in layers if layer != IDENTITY)


def describe_layer(name: str) -> str:
    """Return a description such as `self-attention` for `s`, `self-attention heads=2` for `s:heads=2`."""
    letter, _, options = name.partition(":")
    return f"{LETTERS[letter].description} {options}".rstrip()


@dataclass(frozen=True, init=False)
class Architecture:
    """The layer names of a network, one per block; iterating yields them in order."""

    layers: tuple[str, ...]

    def __init__(self, layers: Sequence[str]) -> None:
        """Make an architecture from layer names or a string of letters; raise `ParnasError` if a name is not valid."""
        if not 1 <= len(layers) <= MAX_BLOCKS:
            raise ParnasError(f"An architecture has 1 to {MAX_BLOCKS} blocks, not {len(layers)}. {_HELP}")
        object.__setattr__(self, "layers", tuple(str(LayerName.parse(name)) for name in layers))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an expression or a preset; raise `ParnasError`, with the position of the error, if it is not valid."""
        if not isinstance(text, str):  # from a YAML file
            raise ParnasError(f"The architecture is {text!r:.40}, not a string. {_HELP}")
        text = text.strip()
        if len(text) > MAX_TEXT:
            raise ParnasError(f"The architecture is {len(text)} characters long; the limit is {MAX_TEXT}. {_HELP}")
        if preset := _match_preset(text):
            return cls(_preset(preset[1], [int(number) for number in preset[2][1:].split("-")], text))
        return cls(_expand(text))

    def canonical(self) -> Self:
        """Return the same network without identity blocks: `sifi` and `iisf` are both `sf`."""
        layers = drop_identity(self)
        if not layers:
            raise ParnasError(
                f"{self!s:.80} has no layer besides identity, so there is no network to train; add a layer."
            )
        return type(self)(layers)

    def counts(self) -> dict[str, int]:
        """Return the number of blocks of each layer name in the architecture."""
        return dict(Counter(self.layers))

    def __str__(self) -> str:
        """Return the layer names, separated by spaces if any of them has options; `parse` reads the result."""
        return (" " if any(len(name) > 1 for name in self) else "").join(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)


def _expand(text: str) -> list[str]:
    """Return the layer names of an expression with its groups and repeats written out."""
    groups: list[list[str]] = [[]]  # a stack of the open groups' names, so that deep nesting needs no recursion
    position = repeatable = 0  # `*` repeats this many names, the last ones; 0: it must not follow
    errors: list[str] = []  # about names; raised only if the expression itself is valid
    while position < len(text):
        token = _read_token(text, position)
        name, bracket, count = token.groups()
        if name:
            groups[-1].append(_read_name(name, token.start(1) + 1, errors))
            repeatable = 1
        elif bracket == "(":
            groups.append([])
            repeatable = 0
        elif bracket == ")":
            if len(groups) == 1:
                raise ParnasError(
                    f"The architecture has an unmatched closing bracket at character {token.end()}. {_HELP}"
                )
            inner = groups.pop()
            if not inner:
                raise ParnasError(f"The architecture has an empty group, at character {token.end()}. {_HELP}")
            groups[-1] += inner
            repeatable = len(inner)
        else:
            if not repeatable:
                raise ParnasError(
                    f"The architecture has nothing to repeat before '*', at character {token.start() + 1}. {_HELP}"
                )
            last = groups[-1][-repeatable:]
            if not 1 <= int(count) * repeatable <= MAX_BLOCKS:
                shown = "".join(last)[:12]
                raise ParnasError(
                    f"{shown!r} repeated {count} times gives {int(count) * repeatable} blocks; an architecture has 1 "
                    f"to {MAX_BLOCKS}. {_HELP}"
                )
            groups[-1] += last * (int(count) - 1)
            repeatable = 0
        if len(groups[-1]) > MAX_BLOCKS:
            raise ParnasError(f"The architecture has more than {MAX_BLOCKS} blocks. {_HELP}")
        position = token.end()
    if len(groups) > 1:
        raise ParnasError(f"The architecture leaves {len(groups) - 1} bracket(s) open. {_HELP}")
    if errors:
        raise ParnasError(errors[0])
    return groups[0]


def _read_token(text: str, position: int) -> re.Match[str]:
    """Return the regex match of the layer name, the bracket or the repeat that begins at `position`."""
    if token := _TOKEN.match(text, position):
        return token
    raise ParnasError(f"Cannot read the architecture at character {position + 1}: {text[position:][:12]!r}. {_HELP}")


def _read_name(text: str, position: int, errors: list[str]) -> str:
    """Return the layer name `text` with options in order; if it is not valid, append a message and return `text`."""
    try:
        return str(LayerName.parse(text))
    except ParnasError as error:
        errors.append(f"{error} This is at character {position} of the architecture. {_HELP}")
        return text


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 24 else f"{text[:21]}...")


def _preset(name: str, numbers: list[int], text: str) -> Sequence[str]:
    """Return the layers of a preset; `text` is the whole preset, for error messages."""
    expected = 2 if name in ("sandwich", "random") else 1
    if len(numbers) != expected:
        raise ParnasError(
            f"The preset {name} takes {expected} number(s), not {len(numbers)}, in {_shorten(text)}. {_HELP}"
        )
    blocks = numbers[0]
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ParnasError(f"The preset {text!r} has {blocks} blocks; give a number from 1 to {MAX_BLOCKS}.")
    if name == "all-f":
        return FEED_FORWARD * blocks
    if name == "random":
        # Always the same three letters, so that a registered letter does not change the architecture of a seed.
        return random.Random(numbers[1]).choices((ATTENTION, FEED_FORWARD, IDENTITY), k=blocks)
    if name == "sandwich":
        # Sandwich ordering, Press et al. 2020 (arXiv 1911.03864): s^K (sf)^(N/2-K) f^K.
        ends = numbers[1]
        if blocks % 2 or ends > blocks // 2:
            raise ParnasError(
                f"The preset sandwich-N-K needs an even N and a K of at most N/2; N is {blocks} and K is {ends}."
            )
        return ATTENTION * ends + (ATTENTION + FEED_FORWARD) * (blocks // 2 - ends) + FEED_FORWARD * ends
    # All others are pairs of a token mixer and a feed-forward layer; an odd N ends with a mixer.
    feed_forward, mixers = _PAIRS[name]
    return [feed_forward if block % 2 else mixers[block // 2 % len(mixers)] for block in range(blocks)]


_PAIRS: dict[str, tuple[str, Sequence[str]]] = {
    "interleaved": (FEED_FORWARD, ATTENTION),  # Transformer-XL, Dai et al. 2019 (arXiv 1901.02860)
    "compressive": (FEED_FORWARD, COMPRESSIVE),  # Compressive Transformer, Rae et al. 2020 (arXiv 1911.05507)
    "convolution": (FEED_FORWARD, CONVOLUTION),
    "recurrence": (FEED_FORWARD, RECURRENCE),
    "alternating": (FEED_FORWARD, CONVOLUTION + ATTENTION),
    "lfm2": (GATED_FEED_FORWARD, "kkskksks"),  # 6 of 16 mixers as in LFM2-1.2B, evenly spaced (arXiv 2511.23404)
    "jamba": (FEED_FORWARD, "rrrrsrrr"),  # arXiv 2403.19887; r and f replace Mamba layers and mixtures of experts
    "samba": (GATED_FEED_FORWARD, (RECURRENCE, f"{ATTENTION}:window=64")),  # arXiv 2406.07522; r replaces Mamba layers
}
"""Presets of pairs: the feed-forward layer, and the mixers of the pairs, which are repeated."""
_PRESETS = ("sandwich", "all-f", "random", *_PAIRS)
