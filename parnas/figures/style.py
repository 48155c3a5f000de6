"""What all pictures share: colours, sizes and bare axes."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from parnas.architecture import LETTERS
from parnas.figures.colours import candidate_colours
from parnas.files import file_in_one_piece

# The palette of Okabe & Ito (2008) without its yellow, too pale for lines on white.
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
INK, PALE, FRAME = "#222222", "#e6e6e6", "#9a9a9a"
MONOSPACE = "DejaVu Sans Mono"
LABEL_SIZE, SMALL_SIZE = 9.0, 8.0  # points
PNG_DPI = 150


def new_figure(width: float, height: float, dpi: float = PNG_DPI) -> Figure:
    """A figure of `width` × `height` inches with an Agg canvas of its own, outside pyplot's global state."""
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> None:
    """Small dark labels, a pale grid behind the data, and no frame at the top and right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FRAME)
    axes.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, color=FRAME, labelsize=SMALL_SIZE)


def candidate_label(name: str) -> str:
    """What the letter stands for, and the layer's name: `self-attention  s:heads=2`."""
    return f"{LETTERS[name[0]].description}  {name}"


def candidate_handles(space: Sequence[str]) -> list[Line2D]:
    """Legend entries of the candidates: name, what the letter stands for, and colour."""
    return [
        Line2D([], [], color=colour, linewidth=2, label=f"{name}  {LETTERS[name[0]].description}")
        for name, colour in candidate_colours(space).items()
    ]


def shorten(text: str, longest: int) -> str:
    """`text` with its middle replaced by an ellipsis where it is longer than `longest` characters."""
    if len(text) <= longest:
        return text
    front = longest // 2
    return f"{text[:front]}…{text[len(text) - (longest - front - 1) :]}"


def save_png(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, whole or not at all."""
    with file_in_one_piece(path) as beside:
        figure.savefig(beside, format="png")
    return path
