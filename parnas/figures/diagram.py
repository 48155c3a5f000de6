"""A picture of a derived network: its layers in order, and below each the probabilities of its block."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from parnas.architecture import IDENTITY, LETTERS, Architecture
from parnas.figures.colours import LIGHT, candidate_colours, contrast
from parnas.figures.style import (
    INK,
    LABEL_SIZE,
    MONOSPACE,
    SMALL_SIZE,
    drawable,
    legend_columns,
    legend_label,
    new_figure,
    save_png,
    shorten,
    styled,
    thin,
    tidy,
)
from parnas.runs.records import BlockRecord, CostRecord, DerivationRecord

__all__ = ["draw_network"]

_COLUMN, _SIDES = 0.62, 1.9  # inches: width of a block, and of the places left and right of the blocks
_LEAST_WIDTH, _MOST_WIDTH = 3.6, 60.0  # inches
_HEIGHTS = 1.5, 1.4  # inches: of the layers and of the probabilities
_LEGEND_LINE, _LEGEND_MARGIN = 0.19, 0.6  # inches
_BOX, _CORNER = 0.8, 0.03  # width of a layer in blocks, and the radius of its corners
_TEXT_HEIGHT = 0.2  # of a layer's letter, relative to the highest layer
_LETTER_SIZE, _OPTIONS_SIZE = LABEL_SIZE + 3, 6.0  # points
_LETTER_COLUMN, _OPTIONS_COLUMN = 0.12, 0.4  # inches that a column needs for the letter and the options of its layer
_LONGEST = 12  # characters of a layer's options
_TEXT_CONTRAST = 4.5
_MOST_NUMBERS = 60  # of blocks below the picture


@styled
def draw_network(derivation: DerivationRecord, folder: Path) -> Path:
    """Draw a derived network, and below each block the probabilities pi of its candidates, as `figures/network.png`.

    Layers are in order from left to right. The height of a layer is its predicted cost, if that is known, relative to
    the dearest layer of the network; an identity is an empty place.

    Args:
        derivation: the content of `arch.yaml`; only `arch` is drawn if its blocks contradict it.
        folder: of `arch.yaml`, in which the picture is written.
    """
    layers = Architecture.parse(derivation.arch).layers
    blocks = derivation.blocks if _describes(derivation.blocks, layers) else []
    probable = any(block.pi for block in blocks)
    names = list(dict.fromkeys([*(name for block in blocks for name in block.pi), *layers]))
    colours = candidate_colours(names)
    labels = [legend_label(name) for name in names]
    # Sizes: a column for each block, and below them a legend in as many columns as fit.
    width = min(_MOST_WIDTH, max(_LEAST_WIDTH, _SIDES + _COLUMN * len(layers)))
    columns = legend_columns(labels, width)
    heights = _HEIGHTS if probable else _HEIGHTS[:1]
    height = sum(heights) + _LEGEND_MARGIN + _LEGEND_LINE * -(-len(names) // columns)
    figure = new_figure(width, height)
    ratios = {"height_ratios": heights}
    axes: list[Axes] = [*figure.subplots(len(heights), sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]]
    # The layers, and the probabilities below them.
    relative = _relative_costs(blocks)
    _draw_layers(axes[0], layers, colours, relative, (width - _SIDES) / len(layers))
    if relative and isinstance(derivation.cost, CostRecord):
        axes[0].set_title(f"height of a layer: its {derivation.cost.metric}", loc="left", color=INK)
    if probable:
        _draw_probabilities(axes[1], blocks, colours)
    shown = thin(len(layers), _MOST_NUMBERS)
    axes[-1].set_xticks(shown, [str(block + 1) for block in shown], fontsize=SMALL_SIZE)
    axes[-1].set_xlabel("block")
    handles = [Patch(color=colours[name], label=label) for name, label in zip(names, labels, strict=True)]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    return save_png(figure, folder / "figures" / "network.png")


def _describes(blocks: Sequence[BlockRecord], layers: Sequence[str]) -> bool:
    """Return whether the blocks are those of an architecture; a person may have changed the file."""
    known = all(name[:1] in LETTERS for block in blocks for name in block.pi)
    return known and [block.layer for block in blocks] == list(layers)


def _relative_costs(blocks: Sequence[BlockRecord]) -> list[float]:
    """Return the cost of the layer of each block relative to the dearest; empty if a cost is missing."""
    costs = [cost for block in blocks if (cost := drawable(block.cost)) is not None and cost >= 0]
    dearest = max(costs, default=0.0)
    return [cost / dearest for cost in costs] if dearest and len(costs) == len(blocks) else []


def _draw_layers(
    axes: Axes, layers: Sequence[str], colours: Mapping[str, str], heights: Sequence[float], column: float
) -> None:
    """Draw a line from the embedding to the softmax, and a box on it for each layer that is no identity.

    Args:
        axes: where to draw.
        layers: of the network.
        colours: of the layers, by name.
        heights: of the boxes, at most 1; empty: all are 1.
        column: inches of a block; letters and options of layers are written where they fit.
    """
    axes.spines[:].set_visible(False)
    axes.yaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlim(-1.1, len(layers) + 0.1)
    axes.set_ylim(-0.7, 0.55)
    ends: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_SIZE, "rotation": 90}
    axes.text(-0.95, 0, "embedding", **ends)
    axes.text(len(layers) - 0.05, 0, "softmax", **ends)
    line = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (len(layers) - 0.2, 0), (-0.8, 0), arrowprops=line, zorder=1)
    for block, name in enumerate(layers):
        if name == IDENTITY:
            continue
        height, colour = heights[block] if heights else 1.0, colours[name]
        style = f"round,pad=0,rounding_size={min(_CORNER, height / 2)}"
        place = (block - _BOX / 2, -height / 2)
        axes.add_patch(FancyBboxPatch(place, _BOX, height, boxstyle=style, color=colour, linewidth=0, zorder=2))
        # The letter is in the box or, if that is too low, above it; the options are below it.
        inside = height >= _TEXT_HEIGHT
        ink = "white" if inside and contrast(colour, LIGHT) >= _TEXT_CONTRAST else INK
        letter, _, options = name.partition(":")
        centred: dict[str, Any] = {"ha": "center", "family": MONOSPACE, "zorder": 3}
        above = 0 if inside else height / 2 + _CORNER
        if column >= _LETTER_COLUMN:
            va = "center" if inside else "bottom"
            axes.text(block, above, letter, color=ink, va=va, size=_LETTER_SIZE, **centred)
        if options and column >= _OPTIONS_COLUMN:
            lines = "\n".join(shorten(option, _LONGEST) for option in options.split(","))
            axes.text(block, -height / 2 - _CORNER, lines, va="top", size=_OPTIONS_SIZE, **centred)


def _draw_probabilities(axes: Axes, blocks: Sequence[BlockRecord], colours: Mapping[str, str]) -> None:
    """Draw the probabilities of each block as a stacked bar, and a frame around that of the network's layer."""
    tidy(axes)
    axes.set_ylabel("pi")
    axes.set_ylim(0, 1)
    bottoms = [0.0] * len(blocks)
    for name, colour in colours.items():
        values = [drawable(block.pi.get(name, 0.0)) or 0.0 for block in blocks]
        axes.bar(range(len(blocks)), values, _BOX, bottoms, color=colour, alpha=0.8)
        for number, block in enumerate(blocks):
            if name == block.layer:
                corner, size = (number - _BOX / 2, bottoms[number]), (_BOX, values[number])
                axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=INK, linewidth=1.6, zorder=3))
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
