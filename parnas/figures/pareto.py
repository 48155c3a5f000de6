"""What networks reach against what they cost."""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from parnas.errors import ParnasError
from parnas.figures.style import FRAME, INK, LABEL_SIZE, RUN_COLOURS, SMALL_SIZE, new_figure, save_png, shorten, tidy

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")  # with seven colours, the 64th network looks like the first
GREY = "#a6a6a6"
WIDTH, HEIGHT = 6.4, 4.5  # inches
LEFT, RIGHT, TOP, BOTTOM = 0.7, 0.2, 0.2, 0.82  # inches around the plot
NOTE_SIZE = 7.5
LONGEST_NAME, LONGEST_NOTE = 28, 75  # characters
# Where a label may stand: directions in which it leaves its marker, and how far in points.
DIRECTIONS = [(1, 0.4), (-1, 0.4), (1, -0.6), (-1, -0.6), (0, 1), (0, -1), (1, 1.5), (-1, 1.5), (1, -1.5), (-1, -1.5)]
DISTANCES = (7.0, 16.0, 28.0, 42.0, 58.0)
LEADER = 10.0  # points from the marker to its label from which on a line joins them
THIN = 1.5  # points to each side of a line that a label should not touch


class Marker(NamedTuple):
    """A network: its name, its cost in any unit, its perplexity, and over several seeds the standard deviation."""

    name: str
    cost: float
    ppl: float
    sd: float | None = None
    random: bool = False  # drawn small and grey, without its name


def draw_pareto(rows: Sequence[Marker], path: Path, cost_label: str = "cost of the blocks, interleaved = 1") -> Path:
    """Write perplexity against cost, one marker per network, with the Pareto front of all as steps.

    Bars show a standard deviation to both sides. Networks without a finite perplexity are left out, and named below;
    raises `ParnasError` if no other is left.
    """
    shown = [row for row in rows if math.isfinite(row.ppl) and math.isfinite(row.cost)]
    if not shown:
        raise ParnasError("There is no network with a finite perplexity to draw; train one first.")
    figure = new_figure(WIDTH, HEIGHT)
    inner = 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / HEIGHT, *inner))
    tidy(axes)
    for row in shown:
        if row.random:
            _draw(axes, row, GREY, "o", 3.5)
    named = list(zip((row for row in shown if not row.random), cycle(RUN_COLOURS), cycle(MARKERS), strict=False))
    for row, colour, marker in named:
        _draw(axes, row, colour, marker, 6.5)
    axes.margins(0.1, 0.12)
    _draw_front(axes, front(shown))
    axes.set_xlabel(cost_label, fontsize=LABEL_SIZE, color=INK)
    axes.set_ylabel("validation perplexity per token", fontsize=LABEL_SIZE, color=INK)
    missing = [row.name for row in rows if row not in shown]
    note = figure.text(LEFT / WIDTH, 0.08 / HEIGHT, _note(shown, missing), fontsize=NOTE_SIZE, color=INK)
    note.set_parse_math(False)  # a network may be called $x$
    _label(figure, axes, [(row, colour) for row, colour, _ in named], shown)
    return save_png(figure, path)


def front(rows: Sequence[Marker]) -> list[Marker]:
    """The rows that no other beats in one of cost and perplexity without losing in the other, the cheapest first."""
    found: list[Marker] = []
    for row in sorted(rows, key=lambda each: (each.cost, each.ppl)):
        if not found or row.ppl < found[-1].ppl:
            found.append(row)
    return found


def _draw(axes: Axes, row: Marker, colour: str, marker: str, size: float) -> None:
    axes.errorbar(
        [row.cost],
        [row.ppl],
        yerr=None if row.sd is None or not math.isfinite(row.sd) else [row.sd],
        color=colour,
        marker=marker,
        markersize=size,
        markeredgecolor="white",
        markeredgewidth=0.5,
        elinewidth=1,
        capsize=2.5,
        zorder=2 if row.random else 3,
    )


def _draw_front(axes: Axes, rows: Sequence[Marker]) -> None:
    """Steps from the first of the front to the last and on to the right edge: what is reached within a cost."""
    edge = axes.get_xlim()
    costs, perplexities = [row.cost for row in rows], [row.ppl for row in rows]
    axes.plot(
        [*costs, edge[1]], [*perplexities, perplexities[-1]], color=FRAME, linewidth=1, drawstyle="steps-post", zorder=1
    )
    axes.set_xlim(edge)


def _note(shown: Sequence[Marker], missing: Sequence[str]) -> str:
    notes = []
    if count := sum(row.random for row in shown):
        notes.append(f"Grey dots: {count} random network{'s' * (count > 1)}.")
    if any(row.sd is not None for row in shown):
        notes.append("Bars: ± one standard deviation over seeds.")
    notes.append("Steps: Pareto front.")
    below = [shorten(f"Not finite: {', '.join(missing)}.", LONGEST_NOTE)] if missing else []
    return "\n".join([" ".join(notes), *below])


def _label(figure: Figure, axes: Axes, named: Sequence[tuple[Marker, str]], shown: Sequence[Marker]) -> None:
    """Write each name in its colour where it hides least, nearest first; names further off get a line to their marker.

    Of equal costs the upper one chooses first, since the places above come first.
    """
    area, renderer = axes.get_window_extent(), figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken = [*_marker_boxes(axes, shown), *_front_boxes(axes, front(shown))]
    for row, colour in sorted(named, key=lambda each: (each[0].cost, -each[0].ppl)):
        best: tuple[float, Annotation, Bbox] | None = None
        for text in _places(axes, row, colour):
            text.update_positions(renderer)  # or the box would be that of text without a transform
            box = Text.get_window_extent(text, renderer)  # Annotation's own would include the line
            hidden = sum(_overlap(box, other) for other in taken) + 10 * (_size(box) - _overlap(box, area))
            if best is not None and hidden >= best[0] - 1e-6:
                text.remove()
                continue
            if best is not None:
                best[1].remove()
            best = hidden, text, box
            if hidden <= 0:
                break
        assert best is not None, "there are places"
        taken.append(best[2])


def _places(axes: Axes, row: Marker, colour: str) -> Iterator[Annotation]:
    """The label of a row, at one place after the other."""
    leader = {"arrowstyle": "-", "color": FRAME, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
    for distance, (right, up) in product(DISTANCES, DIRECTIONS):
        text = axes.annotate(
            shorten(row.name, LONGEST_NAME),
            (row.cost, row.ppl),
            (distance * right, distance * up),
            textcoords="offset points",
            ha=("right", "center", "left")[right + 1],
            va="center",
            fontsize=SMALL_SIZE,
            color=colour,
            arrowprops=leader if distance * math.hypot(right, up) > LEADER else None,
        )
        text.set_parse_math(False)
        yield text


def _marker_boxes(axes: Axes, rows: Sequence[Marker]) -> Iterator[Bbox]:
    """The pixels of the markers and of their bars."""
    for row in rows:
        corner = (row.cost, row.ppl)
        yield _box(axes, corner, corner, 3 if row.random else 5)
        if row.sd:
            yield _box(axes, (row.cost, row.ppl - row.sd), (row.cost, row.ppl + row.sd), THIN)


def _front_boxes(axes: Axes, rows: Sequence[Marker]) -> Iterator[Bbox]:
    """The pixels of the steps."""
    edge = Marker("", axes.get_xlim()[1], rows[-1].ppl)
    for row, after in pairwise([*rows, edge]):
        yield _box(axes, (row.cost, row.ppl), (after.cost, row.ppl), THIN)
        yield _box(axes, (after.cost, after.ppl), (after.cost, row.ppl), THIN)


def _box(axes: Axes, low: tuple[float, float], high: tuple[float, float], margin: float) -> Bbox:
    """Pixels between two points of the data, and `margin` points around."""
    (left, bottom), (right, top) = axes.transData.transform([low, high])
    pixels = margin * axes.figure.dpi / 72
    return Bbox.from_extents(left - pixels, bottom - pixels, right + pixels, top + pixels)


def _size(box: Bbox) -> float:
    return float(box.width * box.height)


def _overlap(one: Bbox, other: Bbox) -> float:
    """Pixels that two boxes share."""
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else _size(shared)
