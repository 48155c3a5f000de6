"""The heatmap of pi that the page plays step by step, and the table of the chosen layers."""

from typing import Any

from parnas.figures.colours import LIGHT, candidate_colours, ink_on, mix, shade_of
from parnas.figures.report.data import RunData
from parnas.figures.style import drawable, thin
from parnas.runs.pi_history import PiHistory

_MOST_CELLS = 20_000  # of a heatmap
_MOST_VALUES = 400_000  # of all frames of an animation, about three bytes each
WIDE, NARROW, AREA = 58.0, 16.0, 760.0  # units of a column of the heatmap, and the width that many of them share
VALUE_WIDTH, NUMBER_WIDTH = 30.0, 22.0  # least column that holds a value; least distance between two numbers
CHARACTER, ROW = 7.5, 34  # width of a character of a layer name, height of a row


def make_player(history: PiHistory, most_frames: int) -> dict[str, Any] | None:
    """Return the animation with at most `most_frames` frames; `None` if a heatmap would have too many cells.

    `cells` show the last step, which the page shows without scripts; `data` holds all frames for the script.
    """
    space, blocks = history.space, range(history.blocks)
    if len(blocks) * len(space) > _MOST_CELLS:
        return None
    frames = thin(len(history), max(2, min(most_frames, _MOST_VALUES // (len(blocks) * len(space)))))
    column = min(WIDE, max(NARROW, AREA / len(blocks)))
    left = 12 + CHARACTER * max(map(len, space))
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * column >= NUMBER_WIDTH)
    shades = [shade_of(colour) for colour in candidate_colours(space).values()]
    cells = []
    for block in blocks:
        for row, name in enumerate(space):
            share = round(min(1.0, float(history.pi[-1, block, row])), 2)
            fill = mix(LIGHT, shades[row].light, share)
            cell = {"x": round(left + block * column, 1), "y": ROW * row + 4, "fill": fill, "ink": ink_on(fill)}
            text = f"{share:.2f}" if column >= VALUE_WIDTH else ""
            cells.append({**cell, "text": text, "chosen": history.derived[-1][block] == name})
    index = {name: number for number, name in enumerate(space)}
    data = {
        "shades": shades,
        "steps": history.steps[frames].tolist(),
        "taus": history.taus[frames].round(4).tolist(),
        "pi": [(100 * history.pi[frame].clip(0, 1)).round().astype(int).ravel().tolist() for frame in frames],
        "derived": [[index[name] for name in history.derived[frame]] for frame in frames],
        "strings": [history.string(frame) for frame in frames],
    }
    label = f"Heatmap of pi: {len(space)} candidates in rows, {len(blocks)} blocks in columns. The text above it gives "
    return {
        "label": label + "the step and the derived architecture.",
        "width": round(left + len(blocks) * column + 6, 1),
        "height": ROW * len(space) + 24,
        "left": left,
        "cell_width": round(column - 2, 2),
        "rows": [(ROW * (row + 0.5) + 4, name) for row, name in enumerate(space)],
        "numbers": [(round(left + (b + 0.5) * column, 1), b + 1) for b in blocks if (b + 1) % every == 0 or b == 0],
        "cells": cells,
        "logged": len(history),
        "step": f"{history.steps[-1]:,}",
        "tau": f"{history.taus[-1]:.3f}",
        "string": history.string(-1),
        "data": data,
    }


def choice_table(run: RunData) -> tuple[list[str], list[list[str]]] | None:
    """Return headings and rows of the choice for each block, `None` where `arch.yaml` does not hold it."""
    if run.derivation is None or run.history is None or not run.derivation.blocks:
        return None
    space = run.history.space
    rows = []
    for number, block in enumerate(run.derivation.blocks, 1):
        pi = [_format(block.pi.get(name)) for name in space]
        rows.append([str(number), block.layer, *pi, _format(block.entropy), _format(block.margin, "+.3f")])
    return ["block", "layer", *(f"pi of {name}" for name in space), "entropy", "lead"], rows


def _format(value: float | None, form: str = ".3f") -> str:
    number = drawable(value)
    return "–" if number is None else f"{number:{form}}"
