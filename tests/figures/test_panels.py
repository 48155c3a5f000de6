"""Small panels of a search: no two labels overlap, whatever the number of steps and the width of the page."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from parnas.figures.panels import MONITORED, plot_monitor, plot_pi_lines
from parnas.runs.pi_history import PiHistory


def make_history(last: int, blocks: int, space: tuple[str, ...]) -> PiHistory:
    pi = np.random.default_rng(0).dirichlet(np.ones(len(space)), (3, blocks))
    derived = tuple(tuple(space[i] for i in row) for row in pi.argmax(axis=2))
    return PiHistory(space, np.array([last // 100, last // 2, last]), np.ones(3), pi, derived)


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes meet, and texts that leave the figure."""
    figure.canvas.draw()
    hidden = set()  # labels of ticks beyond the ends of an axis, which matplotlib keeps and does not draw
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in found if text not in hidden]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [
        (text, "outside")
        for text, box in boxes
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    return outside + [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]


@pytest.mark.parametrize(("columns", "last"), [(8, 3_000), (8, 2**62), (6, 30_000), (2, 1_500_000), (2, 2**62)])
def test_labels_of_pi_do_not_overlap(columns: int, last: int) -> None:
    assert overlaps(plot_pi_lines(make_history(last, 11, ("s", "s:heads=2,d_head=16", "f", "i")), columns)) == []


@pytest.mark.parametrize("columns", [3, 1])
@pytest.mark.parametrize("last", [3_000, 2**62])
def test_labels_of_monitored_values_do_not_overlap(columns: int, last: int) -> None:
    values = {key: [(10, 0.25), (last, 1234.5)] for key in MONITORED}
    assert overlaps(plot_monitor(values, columns)) == []


def test_one_step_and_one_block_are_drawn() -> None:
    history = make_history(3_000, 1, ("s", "f"))
    single = PiHistory(history.space, history.steps[:1], history.taus[:1], history.pi[:1], history.derived[:1])
    assert overlaps(plot_pi_lines(single)) == []
    assert overlaps(plot_monitor({"tau": [(10, 1.0)]})) == []
