"""Charts of the page: the figures of `parnas.figures` as inline SVG, and the animated heatmap of pi."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure

from parnas.figures.colours import candidate_colours
from parnas.figures.curves import Curves, Points, curve_notes, first_step, plot_curves
from parnas.figures.panels import MONITORED, plot_monitor, plot_pi_lines
from parnas.figures.pareto import ParetoPoint, pareto_front, pareto_notes, plot_pareto
from parnas.figures.report.data import ComparisonData, CostFront, RunData, finite_values
from parnas.figures.report.result import PERPLEXITIES, shared_perplexity
from parnas.figures.style import drawable, thin
from parnas.figures.svg import inline_svg
from parnas.runs.pi_history import PiHistory

_WIDE, _NARROW = 8.6, 3.4  # inches
_MOST_CELLS = 20_000  # of a heatmap
_MOST_VALUES = 400_000  # of all frames of an animation, about three bytes each
_MOST_COLUMNS_WITH_VALUES = 24  # blocks up to which the cells of a heatmap are wide enough for their values
_MOST_PANELS = 64  # blocks whose pi is drawn
_MOST_PANEL_POINTS = 30_000  # of all lines of pi
_MOST_DESCRIBED = 8  # lines or networks in the text for screen readers


class Chart(NamedTuple):
    """A figure of the page: title, SVG drawings for wide and narrow screens (empty if none), and notes below them."""

    title: str
    svg: Markup
    notes: list[str]


def make_player(history: PiHistory, most_frames: int) -> dict[str, Any] | None:
    """Return the template values of the animated heatmap of pi; `None` above `_MOST_CELLS` cells (blocks × candidates).

    `columns` holds the last step, for browsers without scripts; `data` holds all frames, at most `most_frames`.
    """
    candidates = len(history.space)
    if history.blocks * candidates > _MOST_CELLS:
        return None
    frames = thin(len(history), max(2, min(most_frames, _MOST_VALUES // (history.blocks * candidates))))
    percent = (100 * history.pi[frames].clip(0, 1)).round().astype(int)  # [frames, B, C]
    derived = [[history.space.index(name) for name in history.derived[frame]] for frame in frames]
    return {
        "rows": [(name, colour[1:]) for name, colour in candidate_colours(history.space).items()],
        "columns": [
            [(share, candidate == chosen) for candidate, share in enumerate(shares)]
            for shares, chosen in zip(percent[-1].tolist(), derived[-1], strict=True)
        ],
        "dense": history.blocks > _MOST_COLUMNS_WITH_VALUES,
        "logged": len(history),
        "step": f"{history.steps[-1]:,}",
        "tau": f"{history.taus[-1]:.3f}",
        "string": history.string(-1),
        "data": {
            "candidates": candidates,
            "steps": history.steps[frames].tolist(),
            "taus": history.taus[frames].round(4).tolist(),
            "pi": percent.reshape(len(frames), -1).tolist(),
            "derived": derived,
            "strings": [history.string(frame) for frame in frames],
        },
    }


def pi_chart(run: RunData, name: str) -> Chart | None:
    """Draw pi of each block over the steps; return `None` without logged pi or above `_MOST_PANELS` blocks."""
    history = run.history
    if history is None or history.blocks > _MOST_PANELS:
        return None
    most = max(2, _MOST_PANEL_POINTS // (history.blocks * len(history.space)))
    label = f"pi of each candidate over the steps, by block. Derived at the end: {history.string(-1)}."

    def plot(width: float) -> Figure:
        return plot_pi_lines(history, 6 if width == _WIDE else 2, most)

    return Chart("pi of each block over the steps", _draw(plot, name, label), [])


def monitor_chart(run: RunData, name: str) -> Chart | None:
    """Draw the values of `MONITORED`, such as the entropy of pi, that a search logged; `None` if it logged none."""
    values: dict[str, Points] = {}
    for key in MONITORED:
        by_step = {line.step: value for line in run.metrics if (value := drawable(getattr(line, key))) is not None}
        if by_step:
            values[key] = list(by_step.items())
    if not values:
        return None
    label = _join([_describe_line(MONITORED[key][0], points) for key, points in values.items()])
    svg = _draw(lambda width: plot_monitor(values, 3 if width == _WIDE else 1), name, label)
    return Chart("Progress of the search", svg, [])


def learning_chart(runs: Sequence[RunData]) -> Chart | None:
    """Draw the learning curves of runs in a measure that is comparable between them; `None` if no run logged it."""
    validated = [(run, lines[-1]) for run in runs if (lines := [v for v in run.validations if v.loss > 0])]
    key: str | None = "ppl"
    if len({run.tokens for run in runs}) > 1 and validated:
        key = shared_perplexity([finite_values(line.to_dict()) for _, line in validated], [run for run, _ in validated])
    key = key or "bits_per_byte"
    read = [
        Curves.from_records(run.metrics, run.name, str(run.architecture or ""), key, first_step(run.run))
        for run in runs
    ]
    curves = [each for each in read if each.train or each.valid]
    if not curves:
        return None
    title = f"{PERPLEXITIES[key].capitalize()} over the steps"
    described = [_describe_line(each.name, each.valid or each.train) for each in curves]

    def plot(width: float) -> Figure:
        return plot_curves(curves, PERPLEXITIES[key], key == "ppl", width)

    return Chart(title, _draw(plot, "curves", f"{title}. {_join(described)}"), [" ".join(curve_notes(curves))])


def latency_chart(comparison: ComparisonData, name: str) -> Chart:
    """Draw perplexity against latency for a comparison; the chart has only a note if no network has both values."""
    title = "Perplexity against latency"
    known = [[key for key in PERPLEXITIES if {key, "latency_ms"} <= row.figures.keys()] for row in comparison.rows]
    key = next((key for key in PERPLEXITIES if any(key in keys for keys in known)), None)
    if key is None:
        return Chart(title, Markup(), ["No network has both a finite perplexity and a latency."])
    drawn = [row for row, keys in zip(comparison.rows, known, strict=True) if key in keys]
    points = [ParetoPoint(row.name, row.figures["latency_ms"], row.figures[key]) for row in drawn]
    missing = ", ".join(row.name for row in comparison.rows if row not in drawn)
    notes = [f"Not drawn, without a finite perplexity or a latency: {missing}."] if missing else []
    return pareto_chart(title, points, "milliseconds per segment", PERPLEXITIES[key], name, notes)


def front_chart(front: CostFront, name: str) -> Chart:
    """Draw perplexity against cost for the networks of a study; a note lists the values because no table shows them."""
    notes = list(front.answers)
    if front.diverged:
        notes.append(f"Not finite, so not drawn: {', '.join(front.diverged)}.")
    if not front.points:
        return Chart(front.title, Markup(), notes or ["No network of this study has a finite perplexity."])
    notes.append(_describe_points(front.points, len(front.points)))
    return pareto_chart(front.title, front.points, front.cost, front.perplexity, name, notes)


def pareto_chart(
    title: str, points: Sequence[ParetoPoint], cost: str, perplexity: str, name: str, notes: Sequence[str]
) -> Chart:
    """Draw perplexity against cost for some networks, with the Pareto front and `notes` below it."""
    best = _join([point.name for point in pareto_front(points)])
    label = f"{title}: {perplexity} against {cost}. {_describe_points(points)} On the Pareto front: {best}"
    svg = _draw(lambda width: plot_pareto(points, cost, perplexity, width), name, label)
    explained = " ".join(["Further down and further left is better.", *pareto_notes(points)])
    return Chart(title, svg, [explained, *notes])


def _draw(plot: Callable[[float], Figure], name: str, label: str) -> Markup:
    """Return a wide and a narrow drawing of a plot as HTML, which is safe because `inline_svg` escapes texts."""
    widths = {"wide": _WIDE, "narrow": _NARROW}
    return Markup("".join(inline_svg(plot(width), f"{name}-{size}", label, size) for size, width in widths.items()))


def _describe_line(name: str, points: Points) -> str:
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{name}: {last:,.4g} at step {last_step:,}"
    return f"{name}: from {first:,.4g} at step {first_step:,} to {last:,.4g} at step {last_step:,}"


def _describe_points(points: Sequence[ParetoPoint], most: int = _MOST_DESCRIBED) -> str:
    named = [point for point in points if not point.random]
    values = [f"{point.ppl:,.2f}" + (f" ± {point.sd:,.2f}" if point.sd else "") for point in named]
    return _join(
        [f"{point.name}: {value} at {point.cost:,.3g}" for point, value in zip(named, values, strict=True)], most
    )


def _join(parts: Sequence[str], most: int = _MOST_DESCRIBED) -> str:
    further = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + further + "."
