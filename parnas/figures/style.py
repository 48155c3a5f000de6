"""Text sizes, colours, axes and PNG files that all figures share."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from parnas.architecture import LETTERS
from parnas.figures.colours import candidate_colours
from parnas.runs.files import atomic_file

INK, PALE, FRAME, GREY = "#222222", "#e6e6e6", "#9a9a9a", "#808080"
MONOSPACE = "DejaVu Sans Mono"
LABEL_SIZE, SMALL_SIZE, NOTE_SIZE = 9.0, 8.0, 7.5  # points
PNG_DPI = 150
# Nine markers and seven colours: only the 64th run looks like the first.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LEGEND_CHARACTER, _LEGEND_HANDLE = 0.08, 0.55  # inches: about a character of a legend, and its handle with margins
_LINE_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_LARGEST, _SMALLEST = 1e15, 1e-15  # larger values come from diverged runs and would overflow the axis of a figure

styled = matplotlib.rc_context(
    {
        "text.parse_math": False,  # a run may be called `$x$`
        "text.color": INK,
        "font.size": LABEL_SIZE,
        "figure.labelsize": LABEL_SIZE,
        "figure.constrained_layout.w_pad": 0.08,  # inches
        "figure.constrained_layout.h_pad": 0.08,
        "axes.labelsize": LABEL_SIZE,
        "axes.labelcolor": INK,
        "axes.titlesize": SMALL_SIZE,
        "axes.titlepad": 3.0,
        "legend.fontsize": SMALL_SIZE,
        "legend.frameon": False,
    }
)
"""Decorator of functions that draw: sets the sizes and colours of all text while they run."""


def new_figure(width: float, height: float, dpi: float = PNG_DPI) -> Figure:
    """Create a figure of `width` × `height` inches with an Agg canvas of its own, outside pyplot's global state.

    matplotlib's constrained layout places the axes so that labels and legends fit beside them.
    """
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> Axes:
    """Give axes the common style and return them: small dark tick labels, a pale grid, no frame at top and right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FRAME)
    axes.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, color=FRAME, labelsize=SMALL_SIZE)
    return axes


def candidate_label(name: str) -> str:
    """Return the description of a layer and its name, such as `self-attention  s:heads=2`."""
    return f"{LETTERS[name[0]].description}  {name}"


def legend_label(name: str) -> str:
    """Return a layer's name and description, such as `s:heads=2  self-attention`."""
    return f"{name}  {LETTERS[name[0]].description}"


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return the number of columns, at least one, in which a legend fits into `width` inches."""
    entry = _LEGEND_HANDLE + _LEGEND_CHARACTER * max(map(len, labels))
    return min(len(labels), max(1, int(width / entry)))


def candidate_handles(space: Sequence[str]) -> list[Line2D]:
    """Return the legend entries of the candidates: colour, line style, name and description."""
    return [
        Line2D(
            *([], []),
            color=colour,
            linestyle=line_style(index),
            linewidth=2,
            label=legend_label(name),
        )
        for index, (name, colour) in enumerate(candidate_colours(space).items())
    ]


def line_style(index: int) -> Literal["-", "--", ":", "-."]:
    """Return the line style of the candidate at `index`, so that candidates differ by more than colour."""
    return _LINE_STYLES[index % len(_LINE_STYLES)]


def shorten(text: str, longest: int) -> str:
    """Replace the middle of a text by an ellipsis if the text is longer than `longest` characters."""
    if len(text) <= longest:
        return text
    front = longest // 2
    return f"{text[:front]}…{text[len(text) - (longest - front - 1) :]}"


def thin(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0 to `count` - 1, evenly spread, including the first and the last."""
    return [round(i) for i in np.linspace(0, count - 1, min(count, most)).tolist()]


def drawable(value: Any) -> float | None:
    """Return `value` if it is a finite number that an axis can show, 0 if it is tiny, `None` for anything else."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _LARGEST:
        return None
    return value if abs(value) >= _SMALLEST else 0


def format_step(step: float, _position: int | None = None) -> str:
    """Return a step with thousands separators, from 10^8 in scientific notation; matplotlib passes `_position`."""
    return f"{step:,.0f}" if abs(step) < 1e8 else f"{step:.1e}"


@styled
def save_png(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG, either completely or not at all, and return its path."""
    with atomic_file(path) as beside:
        figure.savefig(beside, format="png")
    return path
