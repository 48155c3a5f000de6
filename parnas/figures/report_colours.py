"""Colours of the report page, each for light and dark: contrasts as WCAG 2.2 measures them."""

from collections.abc import Sequence
from typing import NamedTuple

from parnas.figures.colours import candidate_colours, channels, mix
from parnas.figures.style import RUN_COLOURS

LIGHT, DARK = "#ffffff", "#171b22"  # what lies behind the charts
LEAST_LIGHT, LEAST_DARK = 3.2, 5.0  # contrast of lines with that; WCAG asks for 3, and thin lines on dark need more


class Shade(NamedTuple):
    """A colour, as it is on a light and on a dark page."""

    light: str
    dark: str


def shade_of(colour: str) -> Shade:
    """A colour with enough contrast for lines: darkened for the light page, brightened for the dark one."""
    return Shade(_until(colour, "#000000", LIGHT, LEAST_LIGHT), _until(colour, "#ffffff", DARK, LEAST_DARK))


def run_shade(index: int) -> Shade:
    """The colour of a run by its place in the list."""
    return shade_of(RUN_COLOURS[index % len(RUN_COLOURS)])


def candidate_shades(space: Sequence[str]) -> dict[str, Shade]:
    """The colour of each layer name."""
    return {name: shade_of(colour) for name, colour in candidate_colours(space).items()}


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read better on a colour."""
    return max(("#ffffff", "#000000"), key=lambda ink: contrast(ink, colour))


def contrast(one: str, other: str) -> float:
    """From 1, for equal colours, to 21 (WCAG 2.2, contrast ratio)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _until(colour: str, towards: str, behind: str, least: float) -> str:
    mixed = (mix(colour, towards, step / 20) for step in range(21))
    return next(found for found in mixed if contrast(found, behind) >= least)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear(part / 255) for part in channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


GREY = shade_of("#808080")
