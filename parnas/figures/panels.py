"""Figures with many small panels over the steps of a search: pi of each block, and values such as entropy of pi."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from parnas.figures.colours import RUN_COLOURS, candidate_colours
from parnas.figures.style import (
    LABEL_SIZE,
    candidate_handles,
    format_step,
    legend_columns,
    line_style,
    new_figure,
    save_png,
    shorten,
    styled,
    thin,
    tidy,
)
from parnas.runs.pi_history import PiHistory

_MOST_COLUMNS = 8
# Inches; each panel's size includes the room for its title and labels.
_PANEL_WIDTH, _PANEL_HEIGHT = 1.5, 1.35
_MONITOR_WIDTH, _MONITOR_HEIGHT = 2.9, 1.7
_MARGIN, _LEGEND_ROW = 0.5, 0.17  # labels beside the panels, and a row of the legend above them
_LONGEST_TITLE = 19  # characters of the title of a panel


MONITORED = {
    "entropy": ("Entropy of pi", "nats, mean over blocks"),
    "identity_share": ("Share of identity", "pi of identity, mean over blocks"),
    "argmax_changes": ("Changes of the architecture", "number of changes so far"),
    "expected_cost": ("Expected cost", "share"),
    "gap": ("Mixture minus derived network", "validation loss in nats"),
    "tau": ("Temperature", "tau"),
}
"""Title and unit of the values in `metrics.jsonl` that show how a search proceeds."""


@styled
def draw_pi_lines(history: PiHistory, path: Path) -> Path:
    """Draw pi of every candidate over the steps as a PNG, with a panel per block that names its derived layer."""
    return save_png(plot_pi_lines(history), path)


@styled
def plot_pi_lines(history: PiHistory, columns: int = _MOST_COLUMNS, most_points: int | None = None) -> Figure:
    """Return a figure of pi of every candidate over the steps, with a panel per block in up to `columns` columns.

    The lines show at most `most_points` steps, evenly spread, or all steps for `None`.
    """
    columns = min(columns, -(-history.blocks // -(-history.blocks // columns)))  # fills the last row as far as possible
    handles, colours = candidate_handles(history.space), candidate_colours(history.space)
    entries = legend_columns([str(handle.get_label()) for handle in handles], _MARGIN + _PANEL_WIDTH * columns)
    legend_height = _LEGEND_ROW * -(-len(handles) // entries)
    figure, panels = _panel_grid(history.blocks, columns, (_PANEL_WIDTH, _PANEL_HEIGHT), legend_height, sharey=True)
    shown = thin(len(history), most_points or len(history))
    marker = "o" if len(shown) == 1 else ""  # a line would not show a single step
    for block, axes in enumerate(panels):
        derived = history.derived[-1][block]
        for candidate, name in enumerate(history.space):
            values = history.steps[shown], history.pi[shown, block, candidate]
            style = line_style(candidate)
            axes.plot(*values, color=colours[name], linestyle=style, linewidth=1.3, marker=marker, markersize=4)
        title = shorten(f"block {block + 1}: {derived}", _LONGEST_TITLE)
        axes.set_title(title, color=colours[derived], loc="left")
        _label_steps(axes, int(history.steps[0]), int(history.steps[-1]))
    panels[0].set_ylim(-0.03, 1.03)
    panels[0].set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    figure.supylabel("pi")
    figure.legend(handles=handles, loc="outside upper center", ncols=entries, fontsize=LABEL_SIZE)
    return figure


@styled
def plot_monitor(values: Mapping[str, Sequence[tuple[int, float]]], columns: int = 3) -> Figure:
    """Return a figure with one panel per key; `values` holds (step, value) pairs by keys of `MONITORED`."""
    figure, panels = _panel_grid(len(values), min(columns, len(values)), (_MONITOR_WIDTH, _MONITOR_HEIGHT))
    ends = [step for points in values.values() for step in (points[0][0], points[-1][0])]
    for axes, (key, points) in zip(panels, values.items(), strict=True):
        steps, ys = zip(*points, strict=True)
        axes.plot(steps, ys, color=RUN_COLOURS[0], linewidth=1.3, marker="o" if len(points) < 20 else "", markersize=3)
        axes.set_title("\n".join(MONITORED[key]), loc="left")
        axes.yaxis.set_major_locator(MaxNLocator(3))
        _label_steps(axes, min(ends), max(ends))
    return figure


def _panel_grid(
    count: int, columns: int, panel: tuple[float, float], legend_height: float = 0, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure of `count` panels in `columns` columns, with room for a legend; return it and its panels.

    `panel` is the width and height of a panel with its labels, and `legend_height` that of the legend, in inches.
    With `sharey` all panels have the same y axis.
    """
    rows = -(-count // columns)
    figure = new_figure(_MARGIN + panel[0] * columns, _MARGIN + panel[1] * rows + legend_height)
    grid = figure.subplots(rows, columns, sharey=sharey, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[:count]:
        tidy(axes).grid(False, axis="x")
    for axes in grid[: max(0, count - columns)]:
        axes.tick_params(labelbottom=False)
    figure.supxlabel("step")
    return figure, list(grid[:count])


def _label_steps(axes: Axes, first: int, last: int) -> None:
    """Label the first and the last step, aligned inwards so that the labels of adjacent panels do not overlap."""
    steps = [first] if first == last else [first, last]
    axes.set_xticks(steps)
    axes.xaxis.set_major_formatter(FuncFormatter(format_step))
    if len(steps) == 2:
        start, end = axes.xaxis.get_major_ticks()
        start.label1.set_horizontalalignment("left")
        end.label1.set_horizontalalignment("right")
