"""Heatmaps of attention weights, queries by keys: a row of maps for each layer, with a map for each head."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from numpy.typing import NDArray

from parnas.errors import ParnasError
from parnas.figures.heatmap import COLOURS
from parnas.figures.style import FRAME, INK, MONOSPACE, PNG_DPI, SMALL_SIZE, new_figure, save_png, styled

__all__ = ["AttentionMap"]

_NORM, _TICKS = PowerNorm(0.5, 0, 1), [0, 0.05, 0.2, 0.5, 1]  # square root scale, because most weights are small
_TOKEN, _TOKEN_SIZE = 0.13, 6.5  # inches per token in a map; font size of a token's name in points
_LEAST, _LARGEST = 1.0, 4.0  # least side of a map, and largest side of a map without token names, in inches
_MOST = 64  # tokens in a map up to which their names are written
_MOST_PIXELS, _LONGEST_SIDE = 100_000_000, 30_000  # of a picture, and of its width or height
_AROUND, _GAP = 1.5, 0.22  # inches for labels and scale around all maps, and between two maps


@dataclass(frozen=True)
class AttentionMap:
    """The attention weights of one layer on one text."""

    block: int  # position in the architecture string, from 1
    layer: str
    weights: NDArray[np.float32]  # [H, T, K], by head, query and key; each query's weights add up to 1
    queries: tuple[str, ...]  # [T] tokens of the text
    keys: tuple[str, ...]  # [K] names of compressed memory, then tokens of memory, then `queries`


@styled
def draw_attention_maps(maps: Sequence[AttentionMap], path: Path) -> Path:
    """Draw the attention weights of every head of `maps` as a PNG; a line divides keys in memory from keys in the text.

    Raises `ParnasError` if `maps` is empty or the picture would be too large.
    """
    if not maps:
        raise ParnasError(
            "There are no attention maps to draw; give at least one, of a network that has attention layers."
        )
    heads = max(len(each.weights) for each in maps)
    cell = _inches(max(len(each.keys) for each in maps)), _inches(max(len(each.queries) for each in maps))
    written = [name for each in maps if len(each.keys) <= _MOST for name in each.keys]
    names = 0.057 * max(map(len, written), default=0)  # inches of the longest name of a key or query
    width = _AROUND + names + heads * (cell[0] + _GAP)
    height = 0.7 + names + len(maps) * (cell[1] + _GAP)
    across, down = round(width * PNG_DPI), round(height * PNG_DPI)
    if max(across, down) > _LONGEST_SIDE or across * down > _MOST_PIXELS:
        raise ParnasError(
            f"{len(maps)} layers of up to {heads} heads would make a picture of {across:,} × {down:,} pixels, "
            "which is too large; draw fewer layers at once, or use a shorter text."
        )
    figure = new_figure(width, height)
    grid = figure.subplots(len(maps), heads, squeeze=False)
    for row, each in enumerate(maps):
        for head, axes in enumerate(grid[row]):
            if head < len(each.weights):
                _draw_map(axes, each, each.weights[head], row == len(maps) - 1, head == 0)
            else:
                axes.set_axis_off()
        label = f"block {each.block}\n{each.layer}".replace(":", "\n").replace(",", "\n")
        grid[row, 0].set_ylabel(label, fontsize=SMALL_SIZE, rotation=0, ha="right", va="center")
    for head, axes in enumerate(grid[0], 1):
        axes.set_title(f"head {head}", pad=4)
    scale = figure.colorbar(ScalarMappable(_NORM, COLOURS), ax=grid, ticks=_TICKS, format="%g", fraction=0.15 / width)
    scale.outline.set_edgecolor(FRAME)
    scale.ax.tick_params(labelsize=_TOKEN_SIZE, color=FRAME, labelcolor=INK)
    scale.ax.set_title("weight", pad=6, loc="left")
    figure.supxlabel("keys, the oldest at the left")
    return save_png(figure, path)


def _inches(tokens: int) -> float:
    """Return the width in inches of a map with `tokens` keys, and the height of a map with `tokens` queries."""
    return min(max(_LEAST, _TOKEN * tokens), _LARGEST if tokens > _MOST else math.inf)


def _draw_map(axes: Axes, each: AttentionMap, weights: NDArray[np.float32], lowest: bool, first: bool) -> None:
    """Draw the weights [T, K] of one head, the first query at the top.

    Keys are named below the maps of the `lowest` row, queries at the left of the `first` map of each row.
    """
    axes.pcolormesh(weights, cmap=COLOURS, norm=_NORM)
    axes.invert_yaxis()
    axes.spines[:].set_color(FRAME)
    axes.tick_params(length=0, labelsize=_TOKEN_SIZE, labelcolor=INK, pad=1)
    axes.axvline(len(each.keys) - len(each.queries), color=FRAME, linewidth=0.8)
    for shown, tokens, axis in ((lowest, each.keys, axes.xaxis), (first, each.queries, axes.yaxis)):
        written = shown and len(tokens) <= _MOST
        axis.set_ticks(np.arange(len(tokens)) + 0.5 if written else [])
        if written:
            axis.set_ticklabels([_readable(token) for token in tokens], family=MONOSPACE)
    if lowest:
        axes.tick_params(axis="x", rotation=90)


def _readable(token: str) -> str:
    return token.replace("\n", "↵").strip() or "␣"
