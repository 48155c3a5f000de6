"""Learning curves of any number of runs in one picture."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.figures.style import (
    INK,
    LABEL_SIZE,
    MONOSPACE,
    RUN_COLOURS,
    new_figure,
    save_png,
    shorten,
    tidy,
)
from parnas.run import METRICS, Run, name_runs

# Nine markers and seven colours: only the 64th run looks like the first.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
MOST_MARKERS = 12
LONGEST_NAME, LONGEST_STRING = 44, 40
WIDTH, PLOT_HEIGHT = 8.0, 4.0  # inches
LEFT, RIGHT, TOP, BOTTOM = 0.75, 0.2, 0.2, 0.6  # inches around the plot
ROW_HEIGHT = 0.143  # inches of a line in the legend, which stands below
LEGEND_SIZE = 7.5

Points = list[tuple[int, float]]  # step, perplexity


@dataclass(frozen=True)
class Curves:
    """The perplexities of one run over its steps, and what the legend calls it."""

    name: str
    string: str
    train: Points
    valid: Points
    argmax: Points  # of a search that validates a mixture: the network that derive would take, inside the SuperNet

    @classmethod
    def from_run(cls, run: Run, name: str) -> Self:
        """Read a run that the legend calls `name`; raises `ParnasError` if it logged no perplexity."""
        records = run.records(METRICS)
        train, valid = ([r for r in records if r.get("split") == split] for split in ("train", "valid"))
        own, argmax = (_points(valid, key) for key in ("ppl", "argmax_ppl"))
        curves = cls(name, _string(run), _points(train, "ppl"), own, argmax if argmax != own else [])
        if not curves.train and not curves.valid:
            raise ParnasError(
                f"{run.folder / METRICS} holds no finite perplexity yet; training writes a line every "
                "train.log_every steps."
            )
        return curves

    @property
    def last(self) -> float:
        """The last validation perplexity, infinite before the first validation."""
        return self.valid[-1][1] if self.valid else math.inf


def draw_learning_curves(runs: Sequence[Run], path: Path) -> Path:
    """Write the validation perplexity of each run over its steps, on a log axis, with training as thin lines.

    The legend lists the runs with name and architecture, the best last validation first. Raises `ParnasError` if
    there is no run, or if one logged nothing.
    """
    if not runs:
        raise ParnasError("There is no run to draw; give at least one run folder.")
    curves = [Curves.from_run(run, name) for run, name in zip(runs, name_runs(runs), strict=True)]
    return draw_curves(curves, path, _warnings(runs))


def draw_curves(curves: Sequence[Curves], path: Path, warnings: Iterable[str] = ()) -> Path:
    """The same of curves that were read before, with sentences of warning below them."""
    curves = sorted(curves, key=lambda run: run.last)
    notes = [*_notes(curves), *warnings]
    legend_height = ROW_HEIGHT * (len(curves) + len(notes) + 1.2)
    height = TOP + PLOT_HEIGHT + BOTTOM + legend_height
    figure = new_figure(WIDTH, height)
    bottom = (legend_height + BOTTOM) / height
    axes = figure.add_axes((LEFT / WIDTH, bottom, 1 - (LEFT + RIGHT) / WIDTH, PLOT_HEIGHT / height))
    handles = [_draw_run(axes, run, index) for index, run in enumerate(curves)]
    _label_axes(axes)
    _draw_legend(figure, handles, curves, legend_height / height)
    figure.text(LEFT / WIDTH, 0.1 / height, "\n".join(notes), fontsize=LEGEND_SIZE, color=INK, linespacing=1.4)
    return save_png(figure, path)


def _draw_run(axes: Axes, run: Curves, index: int) -> Line2D:
    """Draw the lines of one run; returns its entry for the legend."""
    colour = RUN_COLOURS[index % len(RUN_COLOURS)]
    marker = MARKERS[index % len(MARKERS)]
    every = max(1, len(run.valid) // MOST_MARKERS)
    axes.plot(*_columns(run.train), _mark_single(run.train), color=colour, linewidth=0.6, alpha=0.5)
    axes.plot(*_columns(run.argmax), ":" + _mark_single(run.argmax), color=colour, linewidth=1)
    (line,) = axes.plot(
        *_columns(run.valid), color=colour, linewidth=1.5, marker=marker, markersize=4.5, markevery=every
    )
    return line


def _label_axes(axes: Axes) -> None:
    tidy(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("step", fontsize=LABEL_SIZE, color=INK)
    axes.set_ylabel("perplexity per token", fontsize=LABEL_SIZE, color=INK)


def _draw_legend(figure: Figure, handles: Sequence[Line2D], curves: Sequence[Curves], top: float) -> None:
    """A table below the plot: line, last validation perplexity, name and architecture."""
    rows = [
        (f"{run.last:,.2f}" if run.valid else "–", shorten(run.name, LONGEST_NAME), shorten(run.string, LONGEST_STRING))
        for run in curves
    ]
    last_width, name_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    legend = figure.legend(
        handles,
        [f"{last:>{last_width}}  {name:<{name_width}}  {string}" for last, name, string in rows],
        loc="upper left",
        bbox_to_anchor=(LEFT / WIDTH, top),
        prop={"family": MONOSPACE, "size": LEGEND_SIZE},
        labelcolor=INK,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        labelspacing=0.35,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a run may be called $x$


def _notes(curves: Sequence[Curves]) -> Iterator[str]:
    """What the lines mean."""
    yield "Thick lines: validation, its last value in front of the name. Thin: training." + (
        " Dotted: validation of a search's derived network." if any(run.argmax for run in curves) else ""
    )


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence where the perplexities of runs do not compare."""
    if len({(data.corpus, data.tokenizer) for data in (run.config().data for run in runs)}) > 1:
        yield "Corpora or tokenizers differ: perplexities per token do not compare between these runs."


def _string(run: Run) -> str:
    """The architecture that a run trained or that was derived from it, or what its SuperNet chooses from."""
    if (run.folder / "arch.yaml").is_file():
        return str(run.arch_file()["arch"])
    config = run.config()
    if run.kind() == "search":
        return f"SuperNet, {config.search.blocks} blocks of {', '.join(config.search.candidates)}"
    return str(Architecture.parse(config.model.arch)) if config.model.arch else ""


def _points(records: Iterable[Mapping[str, Any]], key: str) -> Points:
    """Step and value of the lines where the value is a number that a log axis can show."""
    found = ((record["step"], record.get(key)) for record in records)
    return [(step, value) for step, value in found if isinstance(value, float | int) and 0 < value < math.inf]


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _mark_single(points: Points) -> str:
    """A marker where there is one point alone, of which no line would show."""
    return "." if len(points) == 1 else ""
