"""How many seeds chose each candidate, block against candidate."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.figures.heatmap import (
    AREA_WIDTHS,
    BOTTOM,
    COLOURS,
    COLUMN_WIDTH,
    LEFT,
    MONOSPACE_ADVANCE,
    NORM,
    RIGHT,
    ROW_HEIGHT,
    STRING_SIZE,
    TOP,
    TURNED_WIDTH,
    VALUE_SIZE,
    WHITE_TEXT_ABOVE,
    draw_scale,
    label_axes,
)
from parnas.figures.style import INK, LABEL_SIZE, MONOSPACE, new_figure, save_png, shorten
from parnas.files import read_json

CONSENSUS = "#e69f00"  # the frame around the consensus, an orange that no layer has


def draw_votes(folder: Path) -> Path:
    """Draw the `stability.json` of a folder as `votes.png`: shares of the seeds, and frames around the consensus."""
    content = read_json(folder / "stability.json")
    try:
        blocks, seeds, consensus = content["blocks"], len(content["seeds"]), str(Architecture(content["consensus"]))
        space = list(dict.fromkeys(candidate for block in blocks for candidate in block["votes"]))
        votes = np.array([[block["votes"].get(candidate, 0) for candidate in space] for block in blocks])  # [B, C]
        chosen = [space.index(block["consensus"]) for block in blocks]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParnasError(f"{folder / 'stability.json'} is not what parnas stability wrote; give it again.") from error
    area = float(np.clip(COLUMN_WIDTH * len(blocks), *AREA_WIDTHS))
    column = area / len(blocks)
    width, height = LEFT + area + RIGHT, TOP + ROW_HEIGHT * len(space) + BOTTOM
    figure = new_figure(width / 72, height / 72)
    bottom, inner_height = BOTTOM / height, 1 - (TOP + BOTTOM) / height
    axes = figure.add_axes((LEFT / width, bottom, area / width, inner_height))
    axes.pcolormesh(votes.T / seeds, cmap=COLOURS, norm=NORM, edgecolors="white", linewidth=0.8)
    label_axes(axes, space, len(blocks), column)
    draw_scale(figure.add_axes(((LEFT + area + 16) / width, bottom, 9 / width, inner_height)), "share")
    for block, row in enumerate(votes):
        axes.add_patch(Rectangle((block, chosen[block]), 1, 1, fill=False, edgecolor=CONSENSUS, linewidth=1.4))
        for candidate, count in enumerate(row if column >= TURNED_WIDTH else ()):
            if count:
                colour = "white" if count / seeds > WHITE_TEXT_ABOVE else INK
                place = block + 0.5, candidate + 0.5
                axes.text(*place, str(count), size=VALUE_SIZE, ha="center", va="center_baseline", color=colour)
    longest = int(area / (STRING_SIZE * MONOSPACE_ADVANCE))
    font: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "color": INK}
    axes.annotate(f"votes of {seeds} seeds; framed: the consensus", (0, 1), (0, 29), fontsize=LABEL_SIZE, **font)
    font |= {"fontsize": STRING_SIZE, "family": MONOSPACE, "weight": "bold"}
    axes.annotate(shorten(consensus, longest), (0, 1), (0, 10), **font)
    return save_png(figure, folder / "figures" / "votes.png")
