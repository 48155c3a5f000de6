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
    drawable,
    format_step,
    new_figure,
    save_png,
    shorten,
    styled,
    tidy,
)
from parnas.runs.records import MetricsRecord
from parnas.runs.run import ARCH_FILE, METRICS, Run, name_runs

__all__ = ["draw_learning_curves"]

_MOST_MARKERS = 12  # on one line
_LONGEST_NAME, _LONGEST_STRING = 44, 40
_WIDTH, _PLOT_HEIGHT = 8.0, 4.0  # inches
_ROW_HEIGHT = 0.143  # inches of a line of the legend, which lies below
_CHARACTER, _HANDLE = 0.0628, 0.5  # inches of a character, and of a line sample with its margin, in the legend
_CUT_ABOVE = 2.0  # multiple of the highest validation above which training curves are cut off

Points = list[tuple[int, float]]  # step, perplexity


@dataclass(frozen=True)
class Curves:
    """Learning curves of a run: perplexity, or another measure, by step.

    Attributes:
        name: Name in the legend.
        string: Architecture in the legend.
        train: Perplexity of the training batches.
        valid: Perplexity of the validation split.
        argmax: Validation perplexity of a search's derived network with the shared weights; empty if `valid` holds
            the same values. Otherwise `valid` is the perplexity of the SuperNet with candidates weighted by pi.
        first: Number of steps that trained the weights from which the run started; the curves begin there.
    """

    name: str
    string: str
    train: Points
    valid: Points
    argmax: Points
    first: int = 0

    @classmethod
    def from_run(cls, run: Run, name: str) -> Self:
        """Read the curves of a run; raises `ParnasError` if it logged no perplexity."""
        curves = cls.from_records(run.metrics(), name, _architecture_text(run), first=first_step(run))
        if not curves.train and not curves.valid:
            raise ParnasError(
                f"{run.folder / METRICS} holds no finite perplexity yet; wait until the training has logged one, "
                "which it does every train.log_every steps."
            )
        return curves

    @classmethod
    def from_records(
        cls, records: Sequence[MetricsRecord], name: str, string: str, key: str = "ppl", first: int = 0
    ) -> Self:
        """Return the curves of the measure `key`, such as `ppl`, from the lines of `metrics.jsonl`."""
        records = [record.model_copy(update={"step": record.step + first}) for record in records]
        train, valid = ([r for r in records if r.split == split] for split in ("train", "valid"))
        own, argmax = _points(valid, key), _points(valid, f"argmax_{key}")
        return cls(name, string, _points(train, key), own, argmax if argmax != own else [], first)

    @property
    def last(self) -> float:
        """The last validation perplexity; infinity before the first validation."""
        return self.valid[-1][1] if self.valid else math.inf


def first_step(run: Run) -> int:
    """Return the number of steps that trained the weights from which a run started; 0 if it started from scratch."""
    inherited = run.inherited()
    return 0 if inherited is None else inherited.steps


def draw_learning_curves(runs: Sequence[Run], path: Path) -> Path:
    """Draw the perplexity of runs over their steps as a PNG with a log axis: validation thick, training thin.

    The legend lists the runs, the one with the lowest last validation perplexity first. Raises `ParnasError` if
    `runs` is empty or a run logged no perplexity.
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
    """Draw curves as a PNG; text below them explains the lines and repeats the sentences of `warnings`."""
    return save_png(plot_curves(curves, notes=[*curve_notes(curves), *warnings]), path)


@styled
def plot_curves(
    curves: Sequence[Curves],
    label: str = "perplexity per token",
    log: bool = True,
    width: float = _WIDTH,
    notes: Sequence[str] = (),
) -> Figure:
    """Return a figure of curves above a legend with the last validation value, name and architecture of each run.

    Args:
        curves: One for each run; the legend begins with the run whose last validation value is lowest.
        label: Label of the y axis.
        log: Whether the y axis is logarithmic.
        width: Width of the figure in inches.
        notes: Lines of text between the plot and the legend.
    """
    curves = sorted(curves, key=lambda run: run.last)
    figure = new_figure(width, min(_PLOT_HEIGHT, 0.8 * width) + _ROW_HEIGHT * (len(curves) + len(notes) + 1))
    axes = tidy(figure.add_subplot())
    handles = [_plot_run(axes, run, index) for index, run in enumerate(curves)]
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(max(2, int(width))))
    axes.xaxis.set_major_formatter(FuncFormatter(format_step))
    if log:
        _set_log_axis(axes)
    if (limit := _cut(curves)) is not None:
        lowest = min(value for run in curves for _, value in (*run.train, *run.valid, *run.argmax))
        axes.set_ylim(0.95 * lowest, limit)
    _plot_legend(figure, handles, curves, notes)
    return figure


def curve_notes(curves: Sequence[Curves]) -> list[str]:
    """Return sentences that explain the lines in a figure of `curves`."""
    notes = ["Thick lines: validation, with its last value before the name. Thin lines: training."]
    if any(run.argmax for run in curves):
        notes.append("Dotted lines: validation of a search's derived network.")
    if any(run.first for run in curves):
        notes.append("Curves of networks with inherited weights begin after the steps that trained these weights.")
    if (limit := _cut(curves)) is not None:
        notes.append(f"Training curves are cut off above {limit:,.0f}.")
    return notes


def _cut(curves: Sequence[Curves]) -> float | None:
    """Return the value at which the y axis of a figure of `curves` ends, or `None` if it shows all values.

    Training values far above all validation values would squeeze the other curves together.
    """
    validated = [value for run in curves for _, value in (*run.valid, *run.argmax)]
    limit = _CUT_ABOVE * max(validated, default=math.inf)
    return limit if any(value > limit for run in curves for _, value in run.train) else None


def _plot_run(axes: Axes, run: Curves, index: int) -> Line2D:
    """Plot the curves of one run; return the validation line, for the legend."""
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
    """Make the y axis logarithmic, with ticks at 1, 2 and 5 times powers of ten, or evenly spaced if fewer than 3."""
    axes.set_yscale("log")
    locator = LogLocator(subs=(1, 2, 5), numticks=12)
    low, high = axes.get_ylim()
    few = sum(low <= value <= high for value in locator.tick_values(low, high)) < 3
    axes.yaxis.set_major_locator(MaxNLocator(6) if few else locator)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _plot_legend(figure: Figure, handles: Sequence[Line2D], curves: Sequence[Curves], notes: Sequence[str]) -> None:
    """Write below the plot the notes and a table of the runs: line, last validation, name, architecture.

    The architectures are left out if the figure is narrower than `_WIDTH`.
    """
    width = figure.get_figwidth()
    narrow = width < _WIDTH
    longest = int((width - _HANDLE) / _CHARACTER) - 10 if narrow else _LONGEST_NAME
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
        loc="outside lower left",
        title="\n".join(notes),
        title_fontproperties={"size": NOTE_SIZE},
        alignment="left",
        prop={"family": MONOSPACE, "size": NOTE_SIZE},
        labelspacing=0.35,
    )


def _architecture_text(run: Run) -> str:
    """Return the trained architecture of a run; for a search the derived one or, before derive, the search space."""
    if (run.folder / ARCH_FILE).is_file():
        return run.derivation().arch
    config = run.config()
    if run.kind() == "search":
        return f"SuperNet, {config.search.blocks} blocks of {', '.join(config.search.candidates)}"
    return str(Architecture.parse(config.model.arch)) if config.model.arch else ""


def _points(records: Iterable[MetricsRecord], key: str) -> Points:
    """Return the step and the value `key` of each line in which that value is positive and finite."""
    values = ((record.step, drawable(getattr(record, key, None))) for record in records)
    return [(step, value) for step, value in values if value is not None and value > 0]


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _single_marker(points: Points) -> str:
    """Return the marker for a curve: a dot for a single point, which a line would not show, else no marker."""
    return "." if len(points) == 1 else ""
