"""Heatmaps of block against candidate: pi as an animation and single frames, and the votes of several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
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
    thin,
)
from parnas.runs.files import atomic_file, read_json
from parnas.runs.pi_history import PiHistory

COLOURS = matplotlib.colormaps["Blues"]
NORM = Normalize(0, 1)
_WHITE_TEXT_ABOVE = 0.55
_GIF_DPI = 100
LAST_FRAME_MS = 2500

# Layout in points, so that one picture holds at every resolution.
LEFT, RIGHT, TOP, BOTTOM = 106.0, 62.0, 52.0, 38.0
LABEL_ADVANCE, LONGEST_LABEL = 5.5, 48  # width of a character in the names at the left, and the most of them
ROW_HEIGHT = 30.0
_COLUMN_WIDTH = 32.0
_AREA_WIDTHS = (250.0, 700.0)  # least and most of the heatmap itself
STRING_SIZE, VALUE_SIZE = 11.0, 7.5
_MONOSPACE_ADVANCE = 0.603  # width of a character as a share of its size
UPRIGHT_WIDTH, TURNED_WIDTH = 20.0, 10.0  # least column that holds a value upright, or turned by a quarter
NUMBER_WIDTH = 16.0  # least distance between two numbers of blocks

FRAME_MS = 80
_CONSENSUS = "#e69f00"  # the frame around the consensus, an orange that no layer has


@dataclass(frozen=True)
class AnimationOptions:
    """Frame time and size of the animation; raises `ParnasError` for values that a GIF cannot hold."""

    frame_ms: int = FRAME_MS
    """Time of a frame in milliseconds; GIF counts in steps of 10. The last frame is held longer."""
    width_px: int | None = None
    """Width of the picture in pixels; everything scales with it. `None` chooses it by the number of blocks."""
    max_frames: int = 200
    """Most frames shown; the first and the last logged step are always among them."""

    def __post_init__(self) -> None:
        if not 20 <= self.frame_ms <= 10_000:
            raise ParnasError(f"A frame time of {self.frame_ms} ms cannot be shown; give 20 to 10000.")
        if self.width_px is not None and not 200 <= self.width_px <= 4000:
            raise ParnasError(f"A picture {self.width_px} pixels wide cannot be read; give 200 to 4000.")
        if self.max_frames < 2:
            raise ParnasError(f"{self.max_frames} frame(s) show no change; give 2 or more.")


DEFAULTS = AnimationOptions()


class Heatmap:
    """A figure drawn once, on which only the cells, their values and the title change from frame to frame."""

    def __init__(self, history: PiHistory, width_px: int | None = None, dpi: float = _GIF_DPI) -> None:
        self._history = history
        candidates = len(history.space)
        left = max(LEFT, 12 + LABEL_ADVANCE * max(map(len, _row_labels(history.space))))
        area = float(np.clip(_COLUMN_WIDTH * history.blocks, *_AREA_WIDTHS))
        width, height = left + area + RIGHT, TOP + ROW_HEIGHT * candidates + BOTTOM
        figure = new_figure(width / 72, height / 72, dpi if width_px is None else 72 * width_px / width)
        bottom, inner_height = BOTTOM / height, 1 - (TOP + BOTTOM) / height
        self.axes = figure.add_axes((left / width, bottom, area / width, inner_height))
        _label_axes(self.axes, history.space, history.blocks, area / history.blocks)
        _draw_scale(figure.add_axes(((left + area + 16) / width, bottom, 9 / width, inner_height)), "pi")

        self.cells = self.axes.pcolormesh(
            history.pi[0].T, cmap=COLOURS, norm=NORM, edgecolors="white", linewidth=0.8, animated=True
        )
        self.title = self._title(29, LABEL_SIZE)
        self.string = self._title(10, STRING_SIZE, family=MONOSPACE, weight="bold")
        self._longest_string = int(area / (STRING_SIZE * _MONOSPACE_ADVANCE))
        self.values = self._value_texts(area / history.blocks)

        self._canvas = cast(Any, figure.canvas)  # Agg's, whose drawing methods carry no types
        self._canvas.draw()
        self._background = self._canvas.copy_from_bbox(figure.bbox)

    def picture(self, index: int) -> Image.Image:
        """Return the frame of one logged step as RGB."""
        self._show(index)
        self._canvas.restore_region(self._background)
        for artist in (self.cells, self.title, self.string, *self.values):
            self.axes.draw_artist(artist)
        return Image.fromarray(np.asarray(self._canvas.buffer_rgba())).convert("RGB")

    def _show(self, index: int) -> None:
        history = self._history
        pi = history.pi[index]  # [B, C]
        self.cells.set_array(pi.T)
        self.title.set_text(f"step {history.steps[index]:,}    tau {history.taus[index]:.3f}")
        self.string.set_text(shorten(history.string(index), self._longest_string))
        for block, text in enumerate(self.values):
            candidate = int(pi[block].argmax())
            value = float(pi[block, candidate])
            text.set_position((block + 0.5, candidate + 0.5))
            text.set_text(f"{value:.2f}")
            text.set_color("white" if value > _WHITE_TEXT_ABOVE else INK)

    def _title(self, above: float, size: float, **font: Any) -> Annotation:
        """Add a line of text `above` points over the heatmap."""
        return self.axes.annotate(
            "",
            (0, 1),
            (0, above),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=size,
            color=INK,
            animated=True,
            **font,
        )

    def _value_texts(self, column: float) -> list[Text]:
        """Add a text per block for its largest probability; nothing where a column is too narrow to hold it."""
        if column < TURNED_WIDTH:
            return []
        rotation = 0 if column >= UPRIGHT_WIDTH else 90
        font: dict[str, Any] = {
            "size": VALUE_SIZE,
            "ha": "center",
            "va": "center_baseline" if rotation == 0 else "center",
        }
        return [self.axes.text(0, 0, "", rotation=rotation, animated=True, **font) for _ in range(self._history.blocks)]


def draw_pi_animation(history: PiHistory, path: Path, options: AnimationOptions = DEFAULTS) -> Path:
    """Write the heatmap of every logged step, thinned to `options.max_frames`, as an endless GIF."""
    heatmap = Heatmap(history, options.width_px)
    indices = thin(len(history), options.max_frames)
    palette = _palette(history.space)
    frames = (heatmap.picture(i).quantize(palette=palette, dither=Image.Dither.NONE) for i in indices)
    times = [options.frame_ms] * (len(indices) - 1) + [max(LAST_FRAME_MS, options.frame_ms)]
    with atomic_file(path) as beside:
        next(frames).save(beside, save_all=True, append_images=frames, duration=times, loop=0)
    return path


def draw_pi_frames(history: PiHistory, folder: Path) -> list[Path]:
    """Write the heatmap of the first, the middle and the last logged step as `pi-first.png` and so on."""
    heatmap = Heatmap(history, dpi=PNG_DPI)
    last = len(history) - 1
    paths = []
    for name, index in {"first": 0, "middle": last // 2, "last": last}.items():
        with atomic_file(folder / f"pi-{name}.png") as beside:
            heatmap.picture(index).save(beside)
        paths.append(folder / f"pi-{name}.png")
    return paths


def draw_votes(folder: Path) -> Path:
    """Draw the `stability.json` of a folder as `votes.png`: votes of the seeds, and frames around the consensus."""
    content = read_json(folder / "stability.json")
    try:
        blocks, seeds, consensus = content["blocks"], len(content["seeds"]), str(Architecture(content["consensus"]))
        space = list(dict.fromkeys(candidate for block in blocks for candidate in block["votes"]))
        votes = np.array([[block["votes"].get(candidate, 0) for candidate in space] for block in blocks])  # [B, C]
        chosen = [space.index(block["consensus"]) for block in blocks]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParnasError(f"{folder / 'stability.json'} is not a file of parnas stability; run it again.") from error
    area = float(np.clip(_COLUMN_WIDTH * len(blocks), *_AREA_WIDTHS))
    column = area / len(blocks)
    width, height = LEFT + area + RIGHT, TOP + ROW_HEIGHT * len(space) + BOTTOM
    figure = new_figure(width / 72, height / 72)
    bottom, inner_height = BOTTOM / height, 1 - (TOP + BOTTOM) / height
    axes = figure.add_axes((LEFT / width, bottom, area / width, inner_height))
    axes.pcolormesh(votes.T / seeds, cmap=COLOURS, norm=NORM, edgecolors="white", linewidth=0.8)
    _label_axes(axes, space, len(blocks), column)
    _draw_scale(figure.add_axes(((LEFT + area + 16) / width, bottom, 9 / width, inner_height)), "share")
    for block, row in enumerate(votes):
        axes.add_patch(Rectangle((block, chosen[block]), 1, 1, fill=False, edgecolor=_CONSENSUS, linewidth=1.4))
        for candidate, count in enumerate(row if column >= TURNED_WIDTH else ()):
            if count:
                colour = "white" if count / seeds > _WHITE_TEXT_ABOVE else INK
                place = block + 0.5, candidate + 0.5
                axes.text(*place, str(count), size=VALUE_SIZE, ha="center", va="center_baseline", color=colour)
    longest = int(area / (STRING_SIZE * _MONOSPACE_ADVANCE))
    font: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "color": INK}
    axes.annotate(f"votes of {seeds} seeds; framed: the consensus", (0, 1), (0, 29), fontsize=LABEL_SIZE, **font)
    font |= {"fontsize": STRING_SIZE, "family": MONOSPACE, "weight": "bold"}
    axes.annotate(shorten(consensus, longest), (0, 1), (0, 10), **font)
    return save_png(figure, folder / "figures" / "votes.png")


def _row_labels(space: Sequence[str]) -> list[str]:
    """Return the text at the left of each candidate's row."""
    return [shorten(candidate_label(name), LONGEST_LABEL) for name in space]


def _label_axes(axes: Axes, space: Sequence[str], blocks: int, column: float) -> None:
    """Write the candidates' names at the left, in their colours, and the block numbers below, `column` points apart."""
    axes.set_xlim(0, blocks)
    axes.set_ylim(len(space), 0)
    axes.spines[:].set_visible(False)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * column >= NUMBER_WIDTH)
    numbers = [n for n in range(1, blocks + 1) if n % every == 0 or n == 1]
    axes.set_xticks([n - 0.5 for n in numbers], [str(n) for n in numbers], fontsize=SMALL_SIZE, color=INK)
    axes.set_xlabel("block", fontsize=LABEL_SIZE, color=INK, labelpad=2)
    axes.set_yticks(np.arange(len(space)) + 0.5, _row_labels(space), fontsize=LABEL_SIZE)
    for label, colour in zip(axes.get_yticklabels(), candidate_colours(space).values(), strict=True):
        label.set_color(colour)
    axes.tick_params(length=0)


def _draw_scale(axes: Axes, title: str) -> None:
    """Draw the colour scale from 0 to 1."""
    bar = axes.figure.colorbar(ScalarMappable(NORM, COLOURS), cax=axes, ticks=[0, 0.5, 1])
    bar.outline.set_edgecolor(FRAME)
    axes.tick_params(labelsize=SMALL_SIZE, color=FRAME, labelcolor=INK)
    axes.set_title(title, fontsize=LABEL_SIZE, color=INK, pad=6)


def _palette(space: Sequence[str]) -> Image.Image:
    """Return the 256 colours of all frames: the scale, greys, and the candidates' colours fading into white."""
    # Pillow looks colours up coarsely: greys closer together than this would turn white into the next grey.
    ramps = [np.linspace(to_rgb(INK), (1, 1, 1), 28)]
    steps = min(16, 96 // len(space))
    ramps += [np.linspace(to_rgb(colour), (1, 1, 1), steps) for colour in candidate_colours(space).values()]
    ramps.append(COLOURS(np.linspace(0, 1, 256 - sum(map(len, ramps))))[:, :3])
    palette = Image.new("P", (1, 1))
    palette.putpalette((255 * np.concatenate(ramps)).round().astype(np.uint8).tobytes())
    return palette
