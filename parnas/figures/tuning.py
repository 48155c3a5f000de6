"""Figures of a tuning study: the losses of its trials in order, and the importance of each setting."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from parnas.errors import ParnasError
from parnas.figures.colours import RUN_COLOURS
from parnas.figures.style import GREY, INK, SMALL_SIZE, new_figure, save_png, shorten, styled, tidy
from parnas.runs.files import read_json_object
from parnas.runs.run import TUNING

__all__ = ["draw_tuning"]

_WIDTH, _HEIGHT = 6.4, 3.6  # inches
_BAR_HEIGHT, _AXIS_HEIGHT = 0.32, 0.6  # inches
_LONGEST_NAME = 30  # characters
_BLUE, _VERMILION = RUN_COLOURS[:2]
_FAR = 1.5  # interquartile ranges above the upper quartile, beyond which a loss is drawn at the upper edge


def draw_tuning(folder: Path) -> list[Path]:
    """Draw the `tuning.json` of a study as `history.png` and `importance.png` in its folder `figures`."""
    path = folder / TUNING
    content = read_json_object(path)
    try:
        history = draw_history(content["trials"], content["configured"], folder / "figures" / "history.png")
        states = [each["state"] for each in content["trials"] if each["state"] != "skipped"]
        counts = len(states), states.count("complete")
        shares = draw_importance(content["importance"], counts, folder / "figures" / "importance.png")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParnasError(f"{path} was not written by parnas tune; run parnas tune again.") from error
    return [history, shares]


@styled
def draw_history(trials: Sequence[Mapping[str, Any]], configured: Mapping[str, Any] | None, path: Path) -> Path:
    """Draw the validation loss of each trial by its number as a PNG, and the least loss so far as steps.

    A trial that was pruned is drawn grey, at its last loss. A trial that diverged, was skipped or lies far above the
    others is drawn at the upper edge.

    Args:
        trials: `number`, `state` and `loss` (nats per token) of each trial.
        configured: `state` and `loss` of the trial with the settings of the configuration, drawn as a dotted line;
            `None` if there is no such trial.
        path: The PNG to write.
    """
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = tidy(figure.add_subplot())
    complete = [(each["number"], float(each["loss"])) for each in trials if each["state"] == "complete"]
    early = [(each["number"], float(each["loss"])) for each in trials if each["state"] == "pruned"]
    edge = _upper_edge([loss for _, loss in complete], [loss for _, loss in early])
    low = min((loss for _, loss in complete + early), default=0.0)
    margin = 0.06 * (edge - low) or 0.1
    axes.set_ylim(low - margin, edge + margin)
    lost = [(each["number"], math.inf) for each in trials if each["state"] in ("diverged", "skipped")]
    handles = [
        _plot_points(axes, complete, edge, "o", _BLUE, "whole training"),
        _plot_points(axes, early, edge, "v", GREY, "ended early"),
        _plot_points(axes, lost, edge, "x", _VERMILION, "no finite loss"),
    ]
    if complete:
        numbers, losses = zip(*complete, strict=True)
        least = np.minimum.accumulate(losses)
        last = max(each["number"] for each in trials)
        (line,) = axes.plot(
            [*numbers, last], [*least, least[-1]], color=_BLUE, linewidth=1.4, drawstyle="steps-post", zorder=2
        )
        handles.append(line)
        line.set_label("least so far")
    if configured is not None and configured["state"] == "complete":
        line = axes.axhline(configured["loss"], color=INK, linewidth=0.9, linestyle=":", zorder=1)
        line.set_label("as configured")
        handles.append(line)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel("validation loss, nats per token")
    figure.legend(
        handles=[handle for handle in handles if handle is not None],
        loc="outside upper center",
        ncols=len(handles),
        handlelength=1.4,
        handletextpad=0.4,
        columnspacing=1.2,
    )
    return save_png(figure, path)


def _upper_edge(complete: Sequence[float], early: Sequence[float]) -> float:
    """Return the upper end of the loss axis: the largest loss of complete or pruned trials that is no outlier."""
    losses = sorted(complete) or sorted(early) or [1.0]
    lower, middle, upper = np.quantile(losses, [0.25, 0.5, 0.75])
    bound = upper + _FAR * max(upper - lower, 0.02 * middle)
    return float(max(loss for loss in [*losses, *early] if loss <= bound))


def _plot_points(
    axes: Axes, points: Sequence[tuple[int, float]], edge: float, marker: str, colour: str, label: str
) -> Line2D | None:
    """Plot (trial, loss) points, hollow and at `edge` if above it; return a legend entry, `None` without points."""
    if not points:
        return None
    for hollow in (False, True):
        shown = [(number, min(loss, edge)) for number, loss in points if (loss > edge) is hollow]
        x, y = [number for number, _ in shown], [loss for _, loss in shown]
        face = "white" if hollow else colour
        axes.plot(x, y, linestyle="", marker=marker, color=colour, markerfacecolor=face, markersize=5, zorder=3)
    return Line2D([], [], linestyle="", marker=marker, color=colour, markersize=5, label=label)


@styled
def draw_importance(shares: Mapping[str, float] | None, counts: tuple[int, int], path: Path) -> Path:
    """Draw the importance of each tuned setting as a bar in a PNG, the most important first.

    Args:
        shares: Importance (0 to 1) by setting; `None` or empty if there are too few trials to estimate it.
        counts: Number of trials, and number of trials that were trained to the end.
        path: The PNG to write.
    """
    ordered = sorted((shares or {}).items(), key=lambda each: -each[1])
    figure = new_figure(_WIDTH, _AXIS_HEIGHT + _BAR_HEIGHT * max(2, len(ordered)))
    if not ordered:
        message = "{} trials, {} of them trained to the end, are too few to estimate\n".format(*counts)
        message += "which settings matter; 20 trials, 5 of them trained to the end, are needed."
        figure.text(0.5, 0.5, message, ha="center", va="center")
        return save_png(figure, path)
    axes = tidy(figure.add_subplot())
    axes.grid(False, axis="y")
    places = range(len(ordered))
    bars = axes.barh(places, [share for _, share in ordered], height=0.62, color=_BLUE)
    axes.bar_label(bars, fmt="{:.0%}", padding=4, fontsize=SMALL_SIZE)
    axes.set_yticks(places, [shorten(name, _LONGEST_NAME) for name, _ in ordered])
    axes.invert_yaxis()
    axes.set_xlim(0, max(share for _, share in ordered) * 1.05 or 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("importance")
    return save_png(figure, path)
