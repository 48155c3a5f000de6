"""Figures of `parnas evaluate --analyse`: attention by position age, perplexity by word frequency and memory length."""

import math
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from parnas.figures.colours import RUN_COLOURS
from parnas.figures.style import (
    INK,
    LABEL_SIZE,
    MARKERS,
    SMALL_SIZE,
    new_figure,
    save_png,
    shorten,
    styled,
    tidy,
)

__all__ = ["DRAW"]

_PART_COLOURS = {"compressed memory": "#009e73", "memory": "#0072b2", "segment": "#d55e00"}
_LONGEST_NAME = 40


@styled
def draw_attention(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw the average attention weight of a position by its age, as a PNG per run; return the paths.

    The age of a position is its distance before the query. A picture has a panel for each block with attention.
    """
    runs = [(str(run), rows) for run, rows in table.groupby("run", sort=False)]
    names = [_file_name(run) for run, _ in runs]
    if len(set(names)) < len(names):
        names = [f"{number}-{name}" for number, name in enumerate(names, 1)]
    paths = [folder / (f"attention-{name}.png" if len(runs) > 1 else "attention.png") for name in names]
    return [_draw_ages(run, rows, path) for (run, rows), path in zip(runs, paths, strict=True)]


def _file_name(run: str) -> str:
    """Return the name of a run with a hyphen for each sequence of characters outside A-Z, a-z, 0-9, `_`, `.`, `-`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", run)


def _draw_ages(run: str, table: pd.DataFrame, path: Path) -> Path:
    blocks = list(table.groupby(["block", "layer"], sort=False))
    columns = min(4, len(blocks))
    rows = math.ceil(len(blocks) / columns)
    figure = new_figure(max(4.2, 0.85 + 2.1 * columns), 0.9 + 1.6 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, (_, ages) in zip(grid, blocks, strict=False):
        tidy(axes).grid(False, axis="x")
        colours = [_PART_COLOURS[part] for part in ages["part"]]
        axes.bar(range(len(ages)), ages["per_position"], color=colours, width=0.85)
        axes.set_title(f"block {ages['block'].iloc[0]}: {ages['layer'].iloc[0]}")
        axes.set_xticks([])
    for axes in grid[len(blocks) :]:
        axes.remove()
    parts = [part for part in _PART_COLOURS if part in set(table["part"])]
    handles = [Patch(color=_PART_COLOURS[part]) for part in parts]
    title = shorten(run, _LONGEST_NAME)
    figure.legend(handles, parts, ncols=3, loc="outside upper left", title=title, alignment="left")
    figure.supylabel("mean weight of a position", fontsize=SMALL_SIZE)
    figure.supxlabel("the oldest at the left")
    return save_png(figure, path)


@styled
def draw_frequency(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw perplexity per word for groups of words that are rare to frequent in the training text, as `frequency.png`.

    For several runs a second panel shows by how many per cent each run's perplexity is below the first run's.
    """
    runs = [(str(run), rows) for run, rows in table.groupby("run", sort=False)]
    panels = 1 if len(runs) == 1 else 2
    figure = new_figure(4.6 * panels, 3.2 + 0.18 * len(runs))
    grid = figure.subplots(1, panels, squeeze=False)[0]
    labels, first = list(runs[0][1]["occurrences"]), runs[0][1]["ppl"].to_numpy()
    bar = 0.8 / len(runs)
    for number, ((_, rows), colour) in enumerate(zip(runs, cycle(RUN_COLOURS), strict=False)):
        places = np.arange(len(labels)) + bar * (number - (len(runs) - 1) / 2)
        grid[0].bar(places, rows["ppl"], width=bar, color=colour)
        if panels == 2:
            grid[1].bar(places, 100 * (1 - rows["ppl"].to_numpy() / first), width=bar, color=colour)
    grid[0].set_yscale("log")
    grid[0].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    titles = ["perplexity per word, by occurrences in training", f"per cent better than {shorten(runs[0][0], 30)}"]
    for axes, title in zip(grid, titles, strict=False):
        tidy(axes).grid(False, axis="x")
        axes.set_xticks(range(len(labels)), [label.replace(" ", "\n", 1) for label in labels], fontsize=SMALL_SIZE)
        axes.set_title(title, fontsize=LABEL_SIZE, pad=6)
    if panels == 2:
        grid[1].axhline(0, color=INK, linewidth=0.6)
    handles = [Patch(color=colour) for _, colour in zip(runs, cycle(RUN_COLOURS), strict=False)]
    figure.legend(handles, [shorten(run, _LONGEST_NAME) for run, _ in runs], loc="outside lower left")
    return [save_png(figure, folder / "frequency.png")]


@styled
def draw_memory(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw perplexity per token by the number of memory positions that attention sees, as `memory.png`.

    The x axis is logarithmic, so the perplexity at 0 positions is written in the legend instead of drawn.
    """
    lines = list(table.groupby(["run", "varied"], sort=False))
    figure = new_figure(6.6, 3.7 + 0.18 * len(lines))
    axes = tidy(figure.add_subplot())
    handles, names = [], []
    for (_, rows), colour, marker in zip(lines, cycle(RUN_COLOURS), cycle(MARKERS), strict=False):
        seen, unseen = rows[rows["sees"] > 0], rows[rows["sees"] == 0]
        handles += axes.plot(seen["sees"], seen["ppl"], color=colour, marker=marker, markersize=4, linewidth=1.2)
        without = f", {unseen['ppl'].iloc[0]:.2f} without memory" if len(unseen) else ""
        names.append(f"{shorten(str(rows['run'].iloc[0]), _LONGEST_NAME)}, {rows['varied'].iloc[0]} varied{without}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    axes.set_xlabel("positions of memory that attention sees")
    axes.set_ylabel("perplexity per token")
    figure.legend(handles, names, loc="outside lower left")
    return [save_png(figure, folder / "memory.png")]


DRAW: dict[str, Callable[[pd.DataFrame, Path], list[Path]]] = {
    "attention": draw_attention,
    "frequency": draw_frequency,
    "memory": draw_memory,
}
