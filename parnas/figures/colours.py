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
            colours[name] = _pale({**LETTER_COLOURS, **own}[letter], white)
    return {name: colours[name] for name in space}


def _pale(colour: str, white: float) -> str:
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)
