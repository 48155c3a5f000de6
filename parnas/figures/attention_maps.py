"""Attention weights of each head: a row for each layer, a column for each head, queries against keys."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from numpy.typing import NDArray

from parnas.errors import ParnasError
from parnas.figures.heatmap import COLOURS
from parnas.figures.style import FRAME, INK, LABEL_SIZE, MONOSPACE, PNG_DPI, SMALL_SIZE, new_figure, save_png

NORM, TICKS = PowerNorm(0.5, 0, 1), [0, 0.05, 0.2, 0.5, 1]  # square root: most weights of many are small
TOKEN, TOKEN_SIZE = 0.13, 6.5  # inches for a token, and points of its name
LEAST, LARGEST = 1.0, 4.0  # inches of a map; the larger one where names are not written
_MOST = 64  # tokens whose names are written
MOST_PIXELS, LONGEST_SIDE = 100_000_000, 30_000  # of a picture, and of a side of it
LEFT, RIGHT, TOP, GAP = 0.95, 0.65, 0.45, 0.22  # inches


class LayerMap(Protocol):
    """Attention weights of a layer [heads, queries, keys]; see `parnas.evaluation.attention`."""

    @property
    def block(self) -> int:
        """Number of the block."""

    @property
    def layer(self) -> str:
        """Name of the layer."""

    @property
    def weights(self) -> NDArray[np.float32]:
        """Weights of each head [H, T, K]."""

    @property
    def queries(self) -> tuple[str, ...]:
        """Tokens of the T queries."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Tokens of the K keys, memory first."""


def draw_attention_maps(maps: Sequence[LayerMap], path: Path) -> Path:
    """Draw the heads of layers; a line divides memory from the text.

    Raises `ParnasError` where there is no map, or too many for a picture.
    """
    if not maps:
        raise ParnasError("There are no attention maps to draw.")
    heads = max(len(each.weights) for each in maps)
    cell = _inches(max(len(each.keys) for each in maps)), _inches(max(len(each.queries) for each in maps))
    written = [name for each in maps if len(each.keys) <= _MOST for name in each.keys]
    names = 0.1 + 0.057 * max(map(len, written), default=0)  # inches below the lowest row
    width = LEFT + heads * cell[0] + (heads - 1) * GAP + RIGHT
    height = TOP + len(maps) * cell[1] + (len(maps) - 1) * GAP + names + 0.3
    across, down = round(width * PNG_DPI), round(height * PNG_DPI)
    if max(across, down) > LONGEST_SIDE or across * down > MOST_PIXELS:
        raise ParnasError(
            f"{len(maps)} layers of up to {heads} heads would make a picture of {across:,} × {down:,} pixels; draw "
            "fewer of the maps at once, or a shorter text."
        )
    figure = new_figure(width, height)
    for row, each in enumerate(maps):
        bottom = height - TOP - (row + 1) * cell[1] - row * GAP
        for head, weights in enumerate(each.weights):
            left = LEFT + head * (cell[0] + GAP)
            axes = figure.add_axes((left / width, bottom / height, cell[0] / width, cell[1] / height))
            _draw_map(axes, each, weights, row == len(maps) - 1, head == 0)
            if row == 0:
                axes.set_title(f"head {head + 1}", fontsize=SMALL_SIZE, color=INK, pad=4)
        label = f"block {each.block}\n{each.layer}".replace(":", "\n").replace(",", "\n")
        figure.text(0.06 / width, (bottom + cell[1]) / height, label, fontsize=SMALL_SIZE, color=INK, va="top")
    place = (width - RIGHT + 0.15) / width, (height - TOP - cell[1]) / height, 0.1 / width, cell[1] / height
    scale = figure.add_axes(place)
    figure.colorbar(ScalarMappable(NORM, COLOURS), cax=scale, ticks=TICKS).outline.set_edgecolor(FRAME)
    scale.set_yticklabels([f"{tick:g}" for tick in TICKS])
    scale.tick_params(labelsize=TOKEN_SIZE, color=FRAME, labelcolor=INK)
    scale.set_title("weight", fontsize=SMALL_SIZE, color=INK, pad=4)
    figure.text(0.5, 0.06 / height, "keys, the oldest at the left", fontsize=LABEL_SIZE, color=INK, ha="center")
    return save_png(figure, path)


def _inches(tokens: int) -> float:
    """Return the side in inches of a map with `tokens` tokens along it."""
    return min(max(LEAST, TOKEN * tokens), LARGEST if tokens > _MOST else math.inf)


def _draw_map(axes: Axes, each: LayerMap, weights: NDArray[np.float32], lowest: bool, first: bool) -> None:
    """Draw the weights of a head [T, K], the first query at the top."""
    axes.pcolormesh(weights, cmap=COLOURS, norm=NORM)
    axes.invert_yaxis()
    axes.spines[:].set_color(FRAME)
    axes.tick_params(length=0, labelsize=TOKEN_SIZE, labelcolor=INK, pad=1)
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
