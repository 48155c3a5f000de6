"""Figure of the perplexity of networks against their cost, with the Pareto front."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from parnas.errors import ParnasError
from parnas.figures.colours import RUN_COLOURS
from parnas.figures.style import (
    FRAME,
    GREY,
    MARKERS,
    NOTE_SIZE,
    SMALL_SIZE,
    new_figure,
    save_png,
    shorten,
    styled,
    tidy,
)

__all__ = ["FRONT_PERPLEXITY", "ParetoPoint", "draw_pareto", "front_points"]

FRONT_PERPLEXITY = "perplexity with the shared weights"  # axis label

_WIDTH, _HEIGHT = 6.4, 4.5  # inches
_LARGEST_LOSS = 700.0  # nats, whose exponential is still a number
_NOTE_HEIGHT = 0.16  # inches of a line below the plot
_LONGEST_NAME, _LONGEST_NOTE = 28, 75  # characters
# Places of a label: directions from its marker, and distances in points.
_DIRECTIONS = [(1, 0.4), (-1, 0.4), (1, -0.6), (-1, -0.6), (0, 1), (0, -1), (1, 1.5), (-1, 1.5), (1, -1.5), (-1, -1.5)]
_DISTANCES = (7.0, 16.0, 28.0, 42.0, 58.0)
_LEADER = 10.0  # distance of a label from its marker, in points, from which a line joins them
_THIN = 1.5  # points to each side of a line that a label should not touch


class ParetoPoint(NamedTuple):
    """Cost and perplexity of a network.

    Attributes:
        name: Label of the network.
        cost: Cost in any unit, the same for all networks of a figure.
        ppl: Perplexity; for several seeds the mean of their perplexities.
        sd: Standard deviation of the perplexity over the seeds, `None` for a single seed.
        random: Whether the network was sampled at random; such networks are small grey dots without a name.
    """

    name: str
    cost: float
    ppl: float
    sd: float | None = None
    random: bool = False


def front_points(rows: Iterable[Mapping[str, Any]]) -> list[ParetoPoint]:
    """Return the predicted cost and the perplexity with shared weights of the networks of a front (`Front.to_rows`).

    Networks that were not re-ranked have no loss and are left out.
    """
    return [
        ParetoPoint(str(row["arch"]), row["cost"], math.exp(min(row["loss"], _LARGEST_LOSS)))
        for row in rows
        if None not in (row["cost"], row["loss"])
    ]


@styled
def draw_pareto(
    rows: Sequence[ParetoPoint],
    path: Path,
    cost_label: str = "cost of the blocks, interleaved = 1",
    ppl_label: str = "validation perplexity per token",
) -> Path:
    """Draw perplexity against cost as a PNG, one marker per network, with the Pareto front as steps.

    Bars show ± one standard deviation. Networks whose perplexity or cost is not finite are named below the plot instead
    of drawn; raises `ParnasError` if no network is left to draw.
    """
    shown = [row for row in rows if math.isfinite(row.ppl) and math.isfinite(row.cost)]
    if not shown:
        raise ParnasError(
            "No network has a finite perplexity and cost, so none can be drawn; if trainings diverged, lower train.lr."
        )
    missing = ", ".join(row.name for row in rows if row not in shown)
    notes = [" ".join(pareto_notes(shown))]
    if missing:
        notes.append(shorten(f"Not finite: {missing}.", _LONGEST_NOTE))
    return save_png(plot_pareto(shown, cost_label, ppl_label, notes=notes), path)


@styled
def plot_pareto(
    rows: Sequence[ParetoPoint],
    cost_label: str,
    ppl_label: str = "validation perplexity per token",
    width: float = _WIDTH,
    notes: Sequence[str] = (),
) -> Figure:
    """Return a figure, `width` inches wide, of finite perplexities against costs; `notes` are lines below the plot."""
    figure = new_figure(width, min(_HEIGHT, 0.9 * width) + _NOTE_HEIGHT * len(notes))
    axes = tidy(figure.add_subplot())
    for row in rows:
        if row.random:
            _plot_point(axes, row, GREY, "o", 3.5)
    named = list(zip((row for row in rows if not row.random), cycle(RUN_COLOURS), cycle(MARKERS), strict=False))
    for row, colour, marker in named:
        _plot_point(axes, row, colour, marker, 6.5)
    axes.margins(0.1, 0.12)
    axes.xaxis.set_major_locator(MaxNLocator(int(width), steps=[1, 2, 5, 10]))
    _plot_front(axes, pareto_front(rows))
    axes.set_xlabel(cost_label)
    axes.set_ylabel(ppl_label)
    if notes:
        figure.supxlabel("\n".join(notes), x=0.02, ha="left", fontsize=NOTE_SIZE)
    # Names are placed by their distances in pixels, so the layout must be final before.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    _label_points(figure, axes, [(row, colour) for row, colour, _ in named], rows)
    return figure


def pareto_notes(rows: Sequence[ParetoPoint]) -> list[str]:
    """Return sentences that explain the grey dots, the bars and the stepped line in a figure of `rows`."""
    notes = []
    if count := sum(row.random for row in rows):
        notes.append(f"Grey dots: {count} random network{'s' * (count > 1)}.")
    if any(row.sd is not None for row in rows):
        notes.append("Bars: ± one standard deviation over seeds.")
    return [*notes, "Steps: Pareto front."]


def pareto_front(rows: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Return the Pareto-optimal points in cost and perplexity (the lower, the better), the cheapest first."""
    front: list[ParetoPoint] = []
    for row in sorted(rows, key=lambda each: (each.cost, each.ppl)):
        if not front or row.ppl < front[-1].ppl:
            front.append(row)
    return front


def _plot_point(axes: Axes, row: ParetoPoint, colour: str, marker: str, size: float) -> None:
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


def _plot_front(axes: Axes, front: Sequence[ParetoPoint]) -> None:
    """Plot the Pareto front as steps: for each cost, the lowest perplexity among networks of at most this cost."""
    edge = axes.get_xlim()
    costs, perplexities = [row.cost for row in front], [row.ppl for row in front]
    axes.plot(
        [*costs, edge[1]], [*perplexities, perplexities[-1]], color=GREY, linewidth=1, drawstyle="steps-post", zorder=1
    )
    axes.set_xlim(edge)


def _label_points(
    figure: Figure, axes: Axes, named: Sequence[tuple[ParetoPoint, str]], shown: Sequence[ParetoPoint]
) -> None:
    """Write the name of each network at the nearest place where it hides no marker, line or other name.

    Without such a place, the name is written where it hides least. A line joins a distant name to its marker. Names
    are placed by rising cost and, for equal cost, by falling perplexity, as places above a marker are tried first.
    """
    area, renderer = axes.get_window_extent(), figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken = [*_marker_boxes(axes, shown), *_front_boxes(axes, pareto_front(shown))]
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


def _places(axes: Axes, row: ParetoPoint, colour: str) -> Iterator[Annotation]:
    """Draw and yield the label of a point at each possible place, the nearest first; the caller removes all but one."""
    leader = {"arrowstyle": "-", "color": FRAME, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
    for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
        yield axes.annotate(
            shorten(row.name, _LONGEST_NAME),
            (row.cost, row.ppl),
            (distance * right, distance * up),
            textcoords="offset points",
            ha=("right", "center", "left")[right + 1],
            va="center",
            fontsize=SMALL_SIZE,
            color=colour,
            arrowprops=leader if distance * math.hypot(right, up) > _LEADER else None,
        )


def _marker_boxes(axes: Axes, rows: Sequence[ParetoPoint]) -> Iterator[Bbox]:
    """Yield the bounding boxes, in pixels, of the markers and of their bars of standard deviation."""
    for row in rows:
        corner = (row.cost, row.ppl)
        yield _box(axes, corner, corner, 3 if row.random else 5)
        if row.sd:
            yield _box(axes, (row.cost, row.ppl - row.sd), (row.cost, row.ppl + row.sd), _THIN)


def _front_boxes(axes: Axes, front: Sequence[ParetoPoint]) -> Iterator[Bbox]:
    """Yield the bounding boxes, in pixels, of the steps of the Pareto front."""
    edge = ParetoPoint("", axes.get_xlim()[1], front[-1].ppl)
    for row, after in pairwise([*front, edge]):
        yield _box(axes, (row.cost, row.ppl), (after.cost, row.ppl), _THIN)
        yield _box(axes, (after.cost, after.ppl), (after.cost, row.ppl), _THIN)


def _box(axes: Axes, low: tuple[float, float], high: tuple[float, float], margin: float) -> Bbox:
    """Return the box, in pixels, that spans two points in data coordinates, with a margin of `margin`/72 inch."""
    (left, bottom), (right, top) = axes.transData.transform([low, high])
    pixels = margin * axes.figure.dpi / 72
    return Bbox.from_extents(left - pixels, bottom - pixels, right + pixels, top + pixels)


def _size(box: Bbox) -> float:
    return float(box.width * box.height)


def _overlap(one: Bbox, other: Bbox) -> float:
    """Return the area that two boxes share, in square pixels."""
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else _size(shared)
