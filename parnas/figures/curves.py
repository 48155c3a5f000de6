"""Learning curves of any number of runs in one figure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.figures.colours import RUN_COLOURS
from parnas.figures.style import (
    MARKERS,
    MONOSPACE,
    NOTE_SIZE,
    add_axes,
    drawable,
    format_step,
    new_figure,
    save_png,
    shorten,
    styled,
)
from parnas.runs.records import MetricsRecord
from parnas.runs.run import METRICS, Run, name_runs

__all__ = ["draw_learning_curves"]

_MOST_MARKERS = 12  # on one line
_LONGEST_NAME, _LONGEST_STRING = 44, 40
_WIDTH, _PLOT_HEIGHT = 8.0, 4.0  # inches
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.2, 0.2, 0.6  # inches around the plot
_ROW_HEIGHT = 0.143  # inches of a line of the legend, which lies below
_CHARACTER, _HANDLE = 0.0628, 0.4  # inches of a character and of a line sample in the legend
_CUT_ABOVE = 2.0  # times the highest validation, above which the first steps of training are cut off

Points = list[tuple[int, float]]  # step, perplexity


@dataclass(frozen=True)
class Curves:
    """Perplexities of a run over its steps.

    Attributes:
        name: Name in the legend.
        string: Architecture in the legend.
        train: Perplexity of training.
        valid: Perplexity of validation.
        argmax: For a search that validates the SuperNet weighted by pi: validation of the derived network inside it.
    """

    name: str
    string: str
    train: Points
    valid: Points
    argmax: Points

    @classmethod
    def from_run(cls, run: Run, name: str) -> Self:
        """Read the curves of a run; raises `ParnasError` if it logged no perplexity."""
        curves = cls.from_records(run.metrics(), name, _string(run))
        if not curves.train and not curves.valid:
            raise ParnasError(
                f"{run.folder / METRICS} holds no finite perplexity yet; training writes a line every "
                "train.log_every steps."
            )
        return curves

    @classmethod
    def from_records(cls, records: Sequence[MetricsRecord], name: str, string: str, key: str = "ppl") -> Self:
        """Take the curves of the measure `key` from the lines of `metrics.jsonl`."""
        train, valid = ([r for r in records if r.split == split] for split in ("train", "valid"))
        own, argmax = _points(valid, key), _points(valid, f"argmax_{key}")
        return cls(name, string, _points(train, key), own, argmax if argmax != own else [])

    @property
    def last(self) -> float:
        """The last validation perplexity, infinite before the first validation."""
        return self.valid[-1][1] if self.valid else math.inf


def draw_learning_curves(runs: Sequence[Run], path: Path) -> Path:
    """Write the validation perplexity of each run over its steps, on a log axis, with training as thin lines.

    The legend lists the runs with name and architecture, the lowest last validation first. Raises `ParnasError` if
    there is no run, or if one logged nothing.
    """
    if not runs:
        raise ParnasError("There is no run to draw; give at least one run folder.")
    curves = [Curves.from_run(run, name) for run, name in zip(runs, name_runs(runs), strict=True)]
    warnings = []
    if len({(data.corpus, data.tokenizer) for data in (run.config().data for run in runs)}) > 1:
        warnings.append("Corpora or tokenizers differ: perplexities per token are not comparable between these runs.")
    return draw_curves(curves, path, warnings)


@styled
def draw_curves(curves: Sequence[Curves], path: Path, warnings: Iterable[str] = ()) -> Path:
    """Write curves that were read before, with sentences of warning below them."""
    return save_png(plot_curves(curves, notes=[" ".join(curve_notes(curves)), *warnings]), path)


@styled
def plot_curves(
    curves: Sequence[Curves],
    label: str = "perplexity per token",
    log: bool = True,
    width: float = _WIDTH,
    notes: Sequence[str] = (),
) -> Figure:
    """Plot curves above a legend with the last validation, name and architecture of each run, the lowest first."""
    curves = sorted(curves, key=lambda run: run.last)
    legend_height = _ROW_HEIGHT * (len(curves) + len(notes) + 1.2)
    height = _TOP + min(_PLOT_HEIGHT, 0.7 * width) + _BOTTOM + legend_height
    figure = new_figure(width, height)
    axes = add_axes(figure, _LEFT, _RIGHT, _BOTTOM + legend_height, _TOP)
    handles = [_plot_run(axes, run, index) for index, run in enumerate(curves)]
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(max(2, int(width))))
    axes.xaxis.set_major_formatter(FuncFormatter(format_step))
    if log:
        _set_log_axis(axes)
    if (limit := _cut(curves)) is not None:
        axes.set_ylim(top=limit)
    _plot_legend(figure, handles, curves, legend_height / height)
    figure.text(_LEFT / width, 0.1 / height, "\n".join(notes), fontsize=NOTE_SIZE, linespacing=1.4)
    return figure


def curve_notes(curves: Sequence[Curves]) -> list[str]:
    """Explain the lines of a figure in sentences."""
    notes = ["Thick lines: validation, its last value in front of the name. Thin: training."]
    if any(run.argmax for run in curves):
        notes.append("Dotted: validation of a search's derived network.")
    if (limit := _cut(curves)) is not None:
        notes.append(f"Training above {limit:,.0f} is cut off.")
    return notes


def _cut(curves: Sequence[Curves]) -> float | None:
    """Return the upper end of the axis where training began far above every validation, else `None`."""
    validated = [value for run in curves for _, value in (*run.valid, *run.argmax)]
    limit = _CUT_ABOVE * max(validated, default=math.inf)
    return limit if any(value > limit for run in curves for _, value in run.train) else None


def _plot_run(axes: Axes, run: Curves, index: int) -> Line2D:
    """Plot the lines of one run; returns its entry for the legend."""
    colour = RUN_COLOURS[index % len(RUN_COLOURS)]
    marker = MARKERS[index % len(MARKERS)]
    every = max(1, len(run.valid) // _MOST_MARKERS)
    axes.plot(*_columns(run.train), _single_marker(run.train), color=colour, linewidth=0.6, alpha=0.5)
    axes.plot(*_columns(run.argmax), ":" + _single_marker(run.argmax), color=colour, linewidth=1)
    (line,) = axes.plot(
        *_columns(run.valid), color=colour, linewidth=1.5, marker=marker, markersize=4.5, markevery=every
    )
    return line


def _set_log_axis(axes: Axes) -> None:
    """Make the perplexity axis logarithmic, with ticks at 1, 2 and 5 times powers of ten, or closer ones."""
    axes.set_yscale("log")
    locator = LogLocator(subs=(1, 2, 5), numticks=12)
    low, high = axes.get_ylim()
    few = sum(low <= value <= high for value in locator.tick_values(low, high)) < 3
    axes.yaxis.set_major_locator(MaxNLocator(6) if few else locator)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _plot_legend(figure: Figure, handles: Sequence[Line2D], curves: Sequence[Curves], top: float) -> None:
    """Write a table below the plot: line, last validation perplexity, name and, where there is room, architecture."""
    width = figure.get_figwidth()
    narrow = width < _WIDTH
    left = 0.1 if narrow else _LEFT
    longest = int((width - left - _HANDLE) / _CHARACTER) - 10 if narrow else _LONGEST_NAME
    rows = [
        (
            f"{run.last:,.2f}" if run.valid else "–",
            shorten(run.name, longest),
            "" if narrow else shorten(run.string, _LONGEST_STRING),
        )
        for run in curves
    ]
    last_width, name_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    figure.legend(
        handles,
        [f"{last:>{last_width}}  {name:<{name_width}}  {string}" for last, name, string in rows],
        loc="upper left",
        bbox_to_anchor=(left / width, top),
        prop={"family": MONOSPACE, "size": NOTE_SIZE},
        borderpad=0,
        borderaxespad=0,
        labelspacing=0.35,
    )


def _string(run: Run) -> str:
    """Return the architecture that a run trained or that was derived from it, or the search space of its SuperNet."""
    if (run.folder / "arch.yaml").is_file():
        return run.derivation().arch
    config = run.config()
    if run.kind() == "search":
        return f"SuperNet, {config.search.blocks} blocks of {', '.join(config.search.candidates)}"
    return str(Architecture.parse(config.model.arch)) if config.model.arch else ""


def _points(records: Iterable[MetricsRecord], key: str) -> Points:
    """Return step and value of the lines where the value is a number that a log axis can show."""
    values = ((record.step, drawable(getattr(record, key, None))) for record in records)
    return [(step, value) for step, value in values if value is not None and value > 0]


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _single_marker(points: Points) -> str:
    """Return a marker for a single point, which no line would show."""
    return "." if len(points) == 1 else ""
