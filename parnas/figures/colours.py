"""The colour of each candidate, the same in every picture and on the terminal; knows no matplotlib."""

from collections.abc import Sequence

from parnas.architecture import ATTENTION, COMPRESSIVE, FEED_FORWARD, IDENTITY

# Blue and vermilion of Okabe & Ito (2008), which no common colour blindness confuses, their green, and grey for
# "nothing here".
LETTER_COLOURS = {ATTENTION: "#0072b2", COMPRESSIVE: "#009e73", FEED_FORWARD: "#d55e00", IDENTITY: "#6e6e6e"}
OTHER_COLOURS = ("#cc79a7", "#e69f00", "#56b4e9", "#000000")  # of the same authors, for other letters
PALEST = 0.5  # share of white in the last variant of a letter


def candidate_colours(space: Sequence[str]) -> dict[str, str]:
    """A colour `#rrggbb` for each layer name: its letter's, paler from variant to variant (`s`, `s:heads=2`, …)."""
    variants: dict[str, list[str]] = {}
    for name in space:
        variants.setdefault(name[0], []).append(name)
    others = [letter for letter in variants if letter not in LETTER_COLOURS]
    own = {letter: OTHER_COLOURS[number % len(OTHER_COLOURS)] for number, letter in enumerate(others)}
    colours = {}
    for letter, names in variants.items():
        for number, name in enumerate(names):
            white = PALEST * number / max(1, len(names) - 1)
            colours[name] = mix({**LETTER_COLOURS, **own}[letter], "#ffffff", white)
    return {name: colours[name] for name in space}


def mix(one: str, other: str, share: float) -> str:
    """`share` of the other colour in the one, all three `#rrggbb`."""
    pairs = zip(channels(one), channels(other), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
