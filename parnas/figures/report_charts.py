"""Charts of the report page: shares of a plot area, which the page stretches to its width in any colours.

Everything is measured on a square of 1000 units, y down. Lines keep their width when it is stretched, and labels are
text of the page, so that a chart can be read on a phone as well as on paper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from parnas.figures.heatmap import thin
from parnas.figures.pareto import Marker, front
from parnas.figures.report_colours import GREY, Shade, run_shade

SIZE = 1000
MOST_POINTS = 300  # of a line
MOST_TOLD = 8  # lines or networks that the text for screen readers tells
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "1 4")
MARGIN = 0.06  # of the range, around the points


class Tick(NamedTuple):
    """A label at a share of the axis, in per cent."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A line, or dots, of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    shade: Shade
    dash: str = ""
    weak: bool = False
    dots: bool = False
    told: str = ""  # in the legend, besides the name


class Stroke(NamedTuple):
    """A path of the plot area and how it is drawn."""

    path: str
    shade: Shade
    kind: str
    dash: str = ""


class Badge(NamedTuple):
    """A number at a place, in per cent from the left and from below."""

    x: float
    y: float
    text: str
    shade: Shade


class Entry(NamedTuple):
    """A line of the legend."""

    name: str
    shade: Shade
    told: str = ""
    number: str = ""
    dash: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """All that the template draws."""

    title: str
    label: str  # for screen readers
    x_name: str
    y_name: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    strokes: list[Stroke]
    legend: list[Entry]
    badges: list[Badge] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """From values to shares of an axis."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return 0.5 if high == low else (value - low) / (high - low)

    def ticks(self, most: int = 5) -> list[Tick]:
        """Round values within the range, each with its place."""
        values = _log_values(self.low, self.high) if self.log else []
        if len(values) < 4:
            values = _round_values(self.low, self.high, most)
        digits = _digits(values)
        return [Tick(round(100 * self(value), 2), f"{value:,.{digits}f}") for value in values]


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_name: str = "step",
    y_name: str = "",
    *,
    log: bool = False,
    within: tuple[float, float] | None = None,
    ticks: int = 5,
) -> Chart:
    """Lines over steps; `within` fixes the range of y, which otherwise follows the points. Some line has a point."""
    shown = [line for line in lines if line.points]
    xs, ys = zip(*(point for line in shown for point in line.points), strict=True)
    x, y = Scale(min(xs), max(xs)), Scale(*(within or _widen(min(ys), max(ys), log)), log)
    strokes = []
    for line in shown:
        places = [(SIZE * x(a), SIZE * (1 - y(b))) for a, b in _thinned(line.points)]
        if len(places) > 1:
            strokes.append(Stroke(_path(places), line.shade, "weak" if line.weak else "line", line.dash))
        if line.dots or len(places) == 1:
            strokes.append(Stroke(_dots(places), line.shade, "dots"))
    legend = [Entry(line.name, line.shade, line.told, "", line.dash, line.dots) for line in shown if not line.weak]
    x_ticks = x.ticks(min(4, ticks + 1)) if x.high > x.low else [Tick(50, f"{x.low:,.0f}")]
    label = f"{title}. {_tell_lines(shown, x_name)}"
    return Chart(title, label, x_name, y_name, x_ticks, y.ticks(ticks), strokes, legend)


def scatter_chart(title: str, rows: Sequence[Marker], x_name: str, y_name: str) -> Chart:
    """Networks by cost and perplexity, numbered, with the Pareto front as steps; random ones are grey dots."""
    x = Scale(*_widen(min(row.cost for row in rows), max(row.cost for row in rows), margin=0.1))
    spread = [row.ppl + sign * (row.sd or 0) for row in rows for sign in (-1, 1)]
    y = Scale(*_widen(min(spread), max(spread), margin=0.1))

    def place(cost: float, ppl: float) -> tuple[float, float]:
        return SIZE * x(cost), SIZE * (1 - y(ppl))

    best = front(rows)
    steps = [place(best[0].cost, best[0].ppl)]
    for before, after in pairwise(best):
        steps += [place(after.cost, before.ppl), place(after.cost, after.ppl)]
    steps.append((SIZE, steps[-1][1]))
    strokes = [Stroke(_path(steps), GREY, "front")]
    strokes += [
        Stroke(_path([place(row.cost, row.ppl - row.sd), place(row.cost, row.ppl + row.sd)]), GREY, "bar")
        for row in rows
        if row.sd
    ]
    if chance := [place(row.cost, row.ppl) for row in rows if row.random]:
        strokes.append(Stroke(_dots(chance), GREY, "dots"))
    badges, legend = [], []
    for index, row in enumerate(row for row in rows if not row.random):
        shade, (left, top) = run_shade(index), place(row.cost, row.ppl)
        badges.append(Badge(round(left / 10, 2), round(100 - top / 10, 2), str(index + 1), shade))
        sd = f" ± {row.sd:,.2f}" if row.sd else ""
        legend.append(Entry(row.name, shade, f"{row.ppl:,.2f}{sd} at {row.cost:,.3g}", str(index + 1)))
    if chance:
        legend.append(Entry(f"{len(chance)} random network{'s' * (len(chance) > 1)}", GREY, dots=True))
    told = [f"{entry.name}: {entry.told}" for entry in legend if entry.told]
    label = f"{title}: {y_name} against {x_name}. {_list(told)} On the Pareto front: {_list([r.name for r in best])}"
    return Chart(title, label, x_name, y_name, x.ticks(4), y.ticks(), strokes, legend, badges)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [points[index] for index in thin(len(points), MOST_POINTS)]


def _path(places: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in places)


def _dots(places: Iterable[tuple[float, float]]) -> str:
    """Lines of no length, which round ends make dots, however the plot is stretched."""
    return "".join(f"M{x:.0f} {y:.0f}h.01" for x, y in places)


def _widen(low: float, high: float, log: bool = False, margin: float = MARGIN) -> tuple[float, float]:
    """A range with room around the points, and some width where they are one."""
    if log:
        low, high = _widen(math.log(low), math.log(high), margin=margin)
        return math.exp(low), math.exp(high)
    room = margin * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _round_values(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 values at steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    return [value for value in MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= value <= high]


def _log_values(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or the powers alone where they are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    within = [value for value in values if low <= value <= high]
    return within if len(within) < 8 else [value for value in within if math.log10(value) % 1 < 1e-9]


def _digits(values: Sequence[float]) -> int:
    """Decimals that tell the values apart."""
    return next((d for d in range(7) if all(abs(round(v, d) - v) <= 1e-9 * abs(v) + 1e-12 for v in values)), 6)


def _tell_lines(lines: Sequence[Line], x_name: str) -> str:
    told = []
    for line in (line for line in lines if not line.weak):
        (first_x, first), (last_x, last) = line.points[0], line.points[-1]
        one = f"{line.name}: {last:,.4g} at {x_name} {last_x:,.0f}"
        more = f"{line.name}: from {first:,.4g} at {x_name} {first_x:,.0f} to {last:,.4g} at {x_name} {last_x:,.0f}"
        told.append(one if len(line.points) == 1 else more)
    return _list(told)


def _list(told: Sequence[str]) -> str:
    further = f"; and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    return "; ".join(told[:MOST_TOLD]) + further + "."
