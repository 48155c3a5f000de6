"""Colours of runs and candidates, shared by figures, HTML report and terminal; does not import matplotlib."""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

from parnas.architecture import (
    ATTENTION,
    COMPRESSIVE,
    CONVOLUTION,
    FEED_FORWARD,
    GATED_FEED_FORWARD,
    IDENTITY,
    RECURRENCE,
)

__all__ = ["candidate_colours"]

# The palette of Okabe & Ito (2008) without its yellow, too pale for lines on white.
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
# Colours of the same palette, which people with any common colour blindness can tell apart.
LETTER_COLOURS = {
    ATTENTION: "#0072b2",
    COMPRESSIVE: "#009e73",
    CONVOLUTION: "#cc79a7",
    RECURRENCE: "#56b4e9",
    FEED_FORWARD: "#d55e00",
    GATED_FEED_FORWARD: "#e69f00",
    IDENTITY: "#6e6e6e",
}
_OTHER_COLOURS = ("#882255", "#999933", "#332288", "#000000")  # for registered layers
_PALEST = 0.5  # share of white in the palest colour of layers with the same letter
LIGHT, DARK = "#ffffff", "#171b22"  # backgrounds of the page
# Least contrast with the background on the light and the dark page; WCAG 2.2 AA asks for 3 for lines and 4.5 for text,
# and thin lines on dark need more.
LINE_CONTRAST, TEXT_CONTRAST = (3.2, 5.0), (4.6, 5.0)


class _Shade(NamedTuple):
    """Two shades `#rrggbb` of a colour, for the light and the dark mode of the HTML report."""

    light: str
    dark: str


def candidate_colours(space: Sequence[str]) -> dict[str, str]:
    """Return a colour `#rrggbb` by layer name: layers of one letter share a hue, each paler than the one before."""
    variants: dict[str, list[str]] = {}
    for name in space:
        variants.setdefault(name[0], []).append(name)
    others = [letter for letter in variants if letter not in LETTER_COLOURS]
    letter_colours = LETTER_COLOURS | dict(zip(others, cycle(_OTHER_COLOURS), strict=False))
    colours = {
        name: _mix(letter_colours[letter], "#ffffff", _PALEST * number / max(1, len(names) - 1))
        for letter, names in variants.items()
        for number, name in enumerate(names)
    }
    return {name: colours[name] for name in space}


def shade_of(colour: str, least: tuple[float, float] = LINE_CONTRAST) -> _Shade:
    """Return two shades of a colour with enough contrast: darkened for the light page, brightened for the dark page.

    `least` holds the smallest allowed contrast ratio to the light background, and that to the dark background.
    """
    return _Shade(_with_contrast(colour, "#000000", LIGHT, least[0]), _with_contrast(colour, "#ffffff", DARK, least[1]))


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours as in WCAG 2.2: 1 for equal colours, 21 for black and white."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _mix(first: str, second: str, share: float) -> str:
    """Return a mixture of two colours `#rrggbb`: a `share` (0 to 1) of the second, the rest of the first."""
    pairs = zip(_channels(first), _channels(second), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue (0 to 255) of a colour `#rrggbb`."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _with_contrast(colour: str, towards: str, background: str, least: float) -> str:
    mixed = (_mix(colour, towards, step / 20) for step in range(21))
    return next(each for each in mixed if contrast(each, background) >= least)


def _luminance(colour: str) -> float:
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
