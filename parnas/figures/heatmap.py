"""Heatmaps of candidates (rows) by blocks (columns): pi over the steps, and how many seeds chose each candidate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from PIL import Image

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.figures.colours import candidate_colours
from parnas.figures.style import (
    FRAME,
    INK,
    LABEL_SIZE,
    MONOSPACE,
    PNG_DPI,
    SMALL_SIZE,
    candidate_label,
    new_figure,
    save_png,
    shorten,
    styled,
    thin,
)
from parnas.runs.files import atomic_file, read_json
from parnas.runs.pi_history import PiHistory

__all__ = ["FRAME_MS", "AnimationOptions", "Heatmap", "draw_votes"]

COLOURS = matplotlib.colormaps["Blues"]
_NORM = Normalize(0, 1)
_WHITE_TEXT_ABOVE = 0.55
_LEAST_NATS = 1e-3  # smaller costs have the lightest colour
_FEW_NATS = 0.1  # smaller costs are written with three decimals
_GIF_DPI = 100
LAST_FRAME_MS = 2500

# Layout in points, so that it is the same at every resolution.
_LEFT, _RIGHT, _TOP, _BOTTOM = 106.0, 62.0, 52.0, 38.0
_LABEL_ADVANCE, _LONGEST_LABEL = 5.5, 48  # width of a character in the names at the left; their longest in characters
_ROW_HEIGHT = 30.0
_COLUMN_WIDTH = 32.0
_AREA_WIDTHS = (250.0, 700.0)  # least and largest width of the cells together
_STRING_SIZE, _VALUE_SIZE = 11.0, 7.5
_MONOSPACE_ADVANCE = 0.603  # width of a character as a share of its size
_UPRIGHT_WIDTH, _TURNED_WIDTH = 20.0, 10.0  # least width of a column with upright, or vertical, values
_NUMBER_WIDTH = 16.0  # least distance between two block numbers

FRAME_MS = 80
_CONSENSUS = "#e69f00"  # the frame around the consensus, an orange that no layer has


@dataclass(frozen=True)
class AnimationOptions:
    """Frame time, width and number of frames of the animation; raises `ParnasError` for a value out of range."""

    frame_ms: int = FRAME_MS
    """Duration of a frame in milliseconds; GIF stores multiples of 10. The last frame is shown longer."""
    width_px: int | None = None
    """Width of the picture in pixels; everything scales with it. `None` chooses it by the number of blocks."""
    max_frames: int = 200
    """Largest number of frames; the first and the last logged step are always among them."""

    def __post_init__(self) -> None:
        if not 20 <= self.frame_ms <= 10_000:
            raise ParnasError(f"A frame time of {self.frame_ms} ms is out of range; give 20 to 10000 milliseconds.")
        if self.width_px is not None and not 200 <= self.width_px <= 4000:
            raise ParnasError(f"A width of {self.width_px} pixels is out of range; give 200 to 4000 pixels.")
        if self.max_frames < 2:
            raise ParnasError(
                f"An animation of {self.max_frames} frame(s) shows no change; give max_frames of 2 or more."
            )


DEFAULTS = AnimationOptions()


class Heatmap:
    """The heatmap of pi with the layers of the derived architecture framed.

    It is drawn once; each picture redraws only the cells, their values, the frames and the titles.
    """

    @styled
    def __init__(self, history: PiHistory, width_px: int | None = None, dpi: float = _GIF_DPI) -> None:
        self._history = history
        self.axes, column = _new_axes(history.space, history.blocks, "pi", dpi, width_px)
        figure = self.axes.figure
        self.cells = self.axes.pcolormesh(
            history.pi[0].T, cmap=COLOURS, norm=_NORM, edgecolors="white", linewidth=0.8, animated=True
        )
        self.title = _title(self.axes, "", animated=True)
        self.string = _architecture_title(self.axes, "", animated=True)
        self._longest_string = _longest_title(history.blocks * column)
        self.values = self._value_texts(column)
        outline: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.2, "animated": True}
        self.frames = [Rectangle((block, 0), 1, 1, **outline) for block in range(history.blocks)]
        for frame in self.frames:
            self.axes.add_patch(frame)

        self._canvas = cast(Any, figure.canvas)  # Agg's, whose drawing methods carry no types
        self._canvas.draw()
        self._background = self._canvas.copy_from_bbox(figure.bbox)

    def picture(self, index: int) -> Image.Image:
        """Return the heatmap of one logged step as an RGB picture; `index` counts the logged steps from 0."""
        self._show(index)
        self._canvas.restore_region(self._background)
        for artist in (self.cells, self.title, self.string, *self.frames, *self.values):
            self.axes.draw_artist(artist)
        return Image.fromarray(np.asarray(self._canvas.buffer_rgba())).convert("RGB")

    def _show(self, index: int) -> None:
        history = self._history
        pi = history.pi[index]  # [B, C]
        self.cells.set_array(pi.T)
        self.title.set_text(f"step {history.steps[index]:,}    tau {history.taus[index]:.3f}")
        self.string.set_text(shorten(history.string(index), self._longest_string))
        for block, (frame, layer) in enumerate(zip(self.frames, history.derived[index], strict=True)):
            frame.set_xy((block, history.space.index(layer)))
        for block, text in enumerate(self.values):
            candidate = int(pi[block].argmax())
            value = float(pi[block, candidate])
            text.set_position((block + 0.5, candidate + 0.5))
            text.set_text(f"{value:.2f}")
            text.set_color("white" if value > _WHITE_TEXT_ABOVE else INK)

    def _value_texts(self, column: float) -> list[Text]:
        """Return an empty text for the largest pi of each block; none if the column width, in points, is too narrow."""
        if column < _TURNED_WIDTH:
            return []
        rotation = 0 if column >= _UPRIGHT_WIDTH else 90
        font: dict[str, Any] = {
            "size": _VALUE_SIZE,
            "ha": "center",
            "va": "center_baseline" if rotation == 0 else "center",
        }
        return [self.axes.text(0, 0, "", rotation=rotation, animated=True, **font) for _ in range(self._history.blocks)]


def draw_pi_animation(history: PiHistory, path: Path, options: AnimationOptions = DEFAULTS) -> Path:
    """Write the heatmaps of at most `options.max_frames` logged steps, evenly spread, as a GIF that repeats."""
    heatmap = Heatmap(history, options.width_px)
    indices = thin(len(history), options.max_frames)
    palette = _palette(history.space)
    frames = (heatmap.picture(i).quantize(palette=palette, dither=Image.Dither.NONE) for i in indices)
    times = [options.frame_ms] * (len(indices) - 1) + [max(LAST_FRAME_MS, options.frame_ms)]
    with atomic_file(path) as beside:
        next(frames).save(beside, save_all=True, append_images=frames, duration=times, loop=0)
    return path


def draw_pi_frames(history: PiHistory, folder: Path) -> list[Path]:
    """Write heatmaps of the first, middle and last logged step: `pi-first.png`, `pi-middle.png`, `pi-last.png`."""
    heatmap = Heatmap(history, dpi=PNG_DPI)
    last = len(history) - 1
    paths = []
    for name, index in {"first": 0, "middle": last // 2, "last": last}.items():
        with atomic_file(folder / f"pi-{name}.png") as beside:
            heatmap.picture(index).save(beside)
        paths.append(folder / f"pi-{name}.png")
    return paths


@styled
def draw_votes(folder: Path) -> Path:
    """Draw `stability.json` as `figures/votes.png`: votes of the seeds by layer and block, consensus framed."""
    content = read_json(folder / "stability.json")
    try:
        blocks, seeds, consensus = content["blocks"], len(content["seeds"]), str(Architecture(content["consensus"]))
        space = list(dict.fromkeys(candidate for block in blocks for candidate in block["votes"]))
        votes = np.array([[block["votes"].get(candidate, 0) for candidate in space] for block in blocks])  # [B, C]
        chosen = [space.index(block["consensus"]) for block in blocks]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParnasError(
            f"{folder / 'stability.json'} was not written by parnas stability; run parnas stability again."
        ) from error
    axes, column = _new_axes(space, len(blocks), "share")
    axes.pcolormesh(votes.T / seeds, cmap=COLOURS, norm=_NORM, edgecolors="white", linewidth=0.8)
    for block, row in enumerate(votes):
        axes.add_patch(Rectangle((block, chosen[block]), 1, 1, fill=False, edgecolor=_CONSENSUS, linewidth=1.4))
        for candidate, count in enumerate(row if column >= _TURNED_WIDTH else ()):
            if count:
                colour = "white" if count / seeds > _WHITE_TEXT_ABOVE else INK
                place = block + 0.5, candidate + 0.5
                axes.text(*place, str(count), size=_VALUE_SIZE, ha="center", va="center_baseline", color=colour)
    _title(axes, f"votes of {seeds} seeds; framed: the consensus")
    _architecture_title(axes, shorten(consensus, _longest_title(len(blocks) * column)))
    return save_png(cast(Figure, axes.figure), folder / "figures" / "votes.png")


@styled
def draw_losses(
    losses: Sequence[Mapping[str, float]], space: Sequence[str], path: Path, title: str, below: str = ""
) -> Path:
    """Draw what it costs to replace each layer of a model by another, in nats per token.

    Args:
        losses: for each layer of the model the cost of each replacement, by name.
        space: the replacements, from top to bottom.
        path: of the PNG.
        title: written above the cells.
        below: a second line above the cells, such as the layers of the model.
    """
    cells = np.array([[layer.get(name, math.nan) for name in space] for layer in losses])  # [layers, replacements]
    top = max(_LEAST_NATS * 10, float(np.nanmax(cells)))
    norm = LogNorm(_LEAST_NATS, top)
    axes, column = _new_axes(
        space, len(losses), "nats", norm=norm, ticks=[_LEAST_NATS, math.sqrt(_LEAST_NATS * top), top]
    )
    axes.set_xlabel("layer", labelpad=2)
    shown = np.ma.masked_invalid(cells.clip(_LEAST_NATS, top))
    axes.pcolormesh(shown.T, cmap=COLOURS, norm=norm, edgecolors="white", linewidth=0.8)
    if column >= _TURNED_WIDTH:
        rotation = 0 if column >= _UPRIGHT_WIDTH else 90
        font: dict[str, Any] = {"size": _VALUE_SIZE, "ha": "center", "va": "center", "rotation": rotation}
        for (layer, candidate), value in np.ndenumerate(cells):
            if math.isfinite(value):
                colour = "white" if norm(max(value, _LEAST_NATS)) > _WHITE_TEXT_ABOVE else INK
                digits = 3 if value < _FEW_NATS else 2 if value < 10 else 0
                text = f"{value:.{digits}f}".removeprefix("0")
                axes.text(layer + 0.5, candidate + 0.5, text, color=colour, **font)
    _title(axes, title)
    _architecture_title(axes, shorten(below, _longest_title(len(losses) * column)))
    return save_png(cast(Figure, axes.figure), path)


def _new_axes(
    space: Sequence[str],
    blocks: int,
    scale: str,
    dpi: float = PNG_DPI,
    width_px: int | None = None,
    norm: Normalize = _NORM,
    ticks: Sequence[float] = (0, 0.5, 1),
) -> tuple[Axes, float]:
    """Create a figure with empty axes for a heatmap, and beside them a colour scale with the title `scale`.

    Returns:
        The axes, labelled with the candidates at the left and the block numbers below, and the width of a column in
        points.
    """
    labels = [shorten(candidate_label(name), _LONGEST_LABEL) for name in space]
    left = max(_LEFT, 12 + _LABEL_ADVANCE * max(map(len, labels)))
    area = float(np.clip(_COLUMN_WIDTH * blocks, *_AREA_WIDTHS))
    width, height = left + area + _RIGHT, _TOP + _ROW_HEIGHT * len(space) + _BOTTOM
    figure = new_figure(width / 72, height / 72, dpi if width_px is None else 72 * width_px / width)
    figure.set_layout_engine("none")  # the width of a column decides which values are written into its cells
    bottom, inner_height = _BOTTOM / height, 1 - (_TOP + _BOTTOM) / height
    axes = figure.add_axes((left / width, bottom, area / width, inner_height))
    axes.set_xlim(0, blocks)
    axes.set_ylim(len(space), 0)
    axes.spines[:].set_visible(False)
    column = area / blocks
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * column >= _NUMBER_WIDTH)
    numbers = [n for n in range(1, blocks + 1) if n % every == 0 or n == 1]
    axes.set_xticks([n - 0.5 for n in numbers], [str(n) for n in numbers], fontsize=SMALL_SIZE)
    axes.set_xlabel("block", labelpad=2)
    axes.set_yticks(np.arange(len(space)) + 0.5, labels, fontsize=LABEL_SIZE)
    for label, colour in zip(axes.get_yticklabels(), candidate_colours(space).values(), strict=True):
        label.set_color(colour)
    axes.tick_params(length=0)
    scale_axes = figure.add_axes(((left + area + 16) / width, bottom, 9 / width, inner_height))
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), cax=scale_axes)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks], minor=False)
    bar.minorticks_off()
    bar.outline.set_edgecolor(FRAME)
    scale_axes.tick_params(labelsize=SMALL_SIZE, color=FRAME, labelcolor=INK)
    scale_axes.set_title(scale, fontsize=LABEL_SIZE, pad=6)
    return axes, column


def _title(axes: Axes, text: str, above: float = 29, **font: Any) -> Annotation:
    """Write a line of text `above` points above the upper edge of the heatmap."""
    return axes.annotate(text, (0, 1), (0, above), xycoords="axes fraction", textcoords="offset points", **font)


def _architecture_title(axes: Axes, architecture: str, **font: Any) -> Annotation:
    return _title(axes, architecture, 10, fontsize=_STRING_SIZE, family=MONOSPACE, weight="bold", **font)


def _longest_title(width: float) -> int:
    """Return how many characters of an architecture fit above a heatmap that is `width` points wide."""
    return int(width / (_STRING_SIZE * _MONOSPACE_ADVANCE))


def _palette(space: Sequence[str]) -> Image.Image:
    """Return the palette of the GIF, 256 colours: colour scale, greys, and each candidate's colour mixed with white."""
    # Pillow looks colours up coarsely: greys closer together than this would turn white into the next grey.
    ramps = [np.linspace(to_rgb(INK), (1, 1, 1), 28)]
    steps = min(16, 96 // len(space))
    ramps += [np.linspace(to_rgb(colour), (1, 1, 1), steps) for colour in candidate_colours(space).values()]
    ramps.append(COLOURS(np.linspace(0, 1, 256 - sum(map(len, ramps))))[:, :3])
    palette = Image.new("P", (1, 1))
    palette.putpalette((255 * np.concatenate(ramps)).round().astype(np.uint8).tobytes())
    return palette
