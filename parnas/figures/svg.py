"""Figures as inline SVG for the HTML page: text stays text, and the page's CSS variables colour it."""

import io
import re
import warnings
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from parnas.figures.colours import LINE_CONTRAST, TEXT_CONTRAST, shade_of
from parnas.figures.style import FRAME, INK, PALE, styled

# Colours with a meaning on the page; any other colour gets two variables, for lines and for text, see `colour_rules`.
_PAGE_COLOURS = {INK: "--ink", PALE: "--grid", FRAME: "--line", "#ffffff": "--card"}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}  # equal figures give equal text
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_VARIABLE = re.compile(r"--(line|text)-([0-9a-f]{6})")
_REFERENCE = re.compile(r"^(?:url\()?#([^)]+)\)?$")
_NUMBER = re.compile(r"-?\d+\.\d+")  # written with one decimal, a seventh of a pixel on the page
_INVALID = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML does not allow


@styled
def inline_svg(figure: Figure, name: str, label: str, style: str = "") -> str:
    """Return a figure as an `<svg>` element.

    Args:
        figure: The figure; its backgrounds become transparent.
        name: Prefix of the ids in the element; no other figure of the page may have it.
        label: Text for screen readers.
        style: CSS class of the element.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.sans-serif": ["DejaVu Sans"]}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore")  # a character that the font lacks; the browser has other fonts
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    root = ElementTree.fromstring(_INVALID.sub("", buffer.getvalue()))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}style", "}metadata")):  # matplotlib's style sheet would reach the whole page
                parent.remove(child)
    _shorten_attributes(root, name)
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib |= {"class": style, "viewBox": view, "role": "img", "aria-label": _INVALID.sub("", label)}
    root.set("style", f"--width:{view.split()[2]}px;fill:{_variable('#000000', 'line')}")
    return ElementTree.tostring(root, encoding="unicode")


def colour_rules(page: str) -> tuple[str, str]:
    """Return CSS declarations of the colour variables in the text of a page, for light mode and for dark mode."""
    least = {"line": LINE_CONTRAST, "text": TEXT_CONTRAST}
    shades = {(kind, code): shade_of(f"#{code}", least[kind]) for kind, code in sorted(set(_VARIABLE.findall(page)))}
    light, dark = (
        ";".join(f"--{kind}-{code}:{shade[page_mode]}" for (kind, code), shade in shades.items())
        for page_mode in (0, 1)
    )
    return light, dark


def _variable(colour: str, kind: str) -> str:
    return f"var({_PAGE_COLOURS.get(colour) or f'--{kind}-{colour[1:]}'})"


def _shorten_attributes(root: ElementTree.Element, name: str) -> None:
    """Shorten an SVG tree in place: drop namespaces and unused ids, and round numbers.

    Ids that are used get the prefix `name`, and colours become CSS variables.
    """
    references = {
        match[1] for each in root.iter() for value in each.attrib.values() if (match := _REFERENCE.match(value))
    }
    for each in root.iter():
        each.tag = each.tag.rpartition("}")[2]
        each.text = each.text if (each.text or "").strip() else None
        each.tail = None
        attributes = {key.rpartition("}")[2]: value for key, value in each.attrib.items()}
        each.attrib.clear()
        for key, value in attributes.items():
            if key == "id":
                if value in references:
                    each.set(key, f"{name}-{value}")
            elif reference := _REFERENCE.match(value):
                each.set(key, value.replace(reference[1], f"{name}-{reference[1]}"))
            elif key == "style":
                kind = "text" if each.tag == "text" else "line"
                black = "fill: #000000; " if kind == "text" and "fill:" not in value else ""  # which matplotlib omits
                style = black + value
                for colour in set(_COLOUR.findall(style)):
                    style = style.replace(colour, _variable(colour, kind))
                each.set(key, style)
            elif key in ("d", "transform", "x", "y", "points"):
                rounded = _NUMBER.sub(lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
                each.set(key, rounded.replace("\n", " "))
            else:
                each.set(key, value)
