"""The figure of perplexity against cost: front, labels, and networks left out."""

import itertools
import math
import random
from pathlib import Path

import pytest
from matplotlib.text import Annotation, Text
from PIL import Image

from parnas.errors import ParnasError
from parnas.figures import pareto
from parnas.figures.pareto import ParetoPoint, draw_pareto, pareto_front


def test_no_point_dominates_the_front() -> None:
    draw = random.Random(0)
    for _ in range(300):
        points = {(draw.randint(0, 5), draw.randint(0, 5)) for _ in range(draw.randint(1, 12))}
        rows = [ParetoPoint(f"{cost} {ppl}", cost, ppl) for cost, ppl in points]
        draw.shuffle(rows)
        expected = [row for row in rows if not any(o != row and o.cost <= row.cost and o.ppl <= row.ppl for o in rows)]
        assert pareto_front(rows) == sorted(expected, key=lambda row: row.cost)


def test_the_front_names_one_of_equal_networks() -> None:
    assert pareto_front([ParetoPoint("one", 1, 2), ParetoPoint("other", 1, 2)]) == [ParetoPoint("one", 1, 2)]


SIX = [
    ParetoPoint("derived", 0.648, 63.2, 0.31),
    ParetoPoint("interleaved", 1.0, 62.95, 0.22),
    ParetoPoint("sandwich-6-1", 1.0, 63.05, 0.4),
    ParetoPoint("shallower", 0.61, 66.1, 0.5),
    ParetoPoint("all-f-12", 0.42, 81.0, 0.2),
    ParetoPoint("uniform, seed 2", 0.652, 63.6, 0.25),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are saved, laid out."""
    figures: list = []
    original = pareto.save_png

    def save(figure: object, path: Path) -> Path:
        figures.append(figure)
        return original(figure, path)  # type: ignore[arg-type]

    monkeypatch.setattr(pareto, "save_png", save)
    return figures


def labels(figure) -> list[Annotation]:
    return [text for text in figure.axes[0].texts if isinstance(text, Annotation)]


def boxes(figure) -> list:
    """Boxes of the labels without their lines, in pixels."""
    return [Text.get_window_extent(label) for label in labels(figure)]


@pytest.mark.parametrize("seed", range(2))
def test_labels_are_whole_and_hide_neither_each_other_nor_markers(seed: int, tmp_path: Path, drawn: list) -> None:
    draw = random.Random(seed)
    others = [
        ParetoPoint(f"random-{number}", 0.648 * draw.uniform(0.97, 1.03), draw.gauss(66, 1.6), random=True)
        for number in range(8)
    ]
    path = draw_pareto([*SIX, *others], tmp_path / "pareto.png")
    with Image.open(path) as picture:
        width, height = picture.size
    figure = drawn[0]
    assert sorted(label.get_text() for label in labels(figure)) == sorted(row.name for row in SIX)
    for one, other in itertools.combinations(boxes(figure), 2):
        assert not one.overlaps(other)
    points = [figure.axes[0].transData.transform((row.cost, row.ppl)) for row in [*SIX, *others]]
    for box in boxes(figure):
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
        assert not any(box.contains(x, y) for x, y in points)


def test_networks_without_a_finite_perplexity_are_named_below(tmp_path: Path, drawn: list) -> None:
    rows = [*SIX, ParetoPoint("broken", 0.5, math.inf), ParetoPoint("random-3", 0.6, math.nan, random=True)]
    draw_pareto(rows, tmp_path / "pareto.png")
    note = drawn[0].texts[0].get_text()
    assert drawn[0].texts[0].get_window_extent().y1 < drawn[0].axes[0].xaxis.label.get_window_extent().y0
    assert "Not finite: broken, random-3." in note
    assert "random network" not in note, "none is drawn"
    assert "broken" not in [label.get_text() for label in labels(drawn[0])]
    draw_pareto([ParetoPoint("one", 0.5, 3.0), ParetoPoint("r", 0.6, 4.0, random=True)], tmp_path / "pareto.png")
    assert drawn[1].texts[0].get_text() == "Grey dots: 1 random network. Steps: Pareto front."


def test_nothing_finite_is_an_error_that_leaves_the_old_picture(tmp_path: Path) -> None:
    path = draw_pareto([ParetoPoint("one", 0.5, 3.0)], tmp_path / "pareto.png")
    before = path.read_bytes()
    with pytest.raises(ParnasError, match="finite"):
        draw_pareto([ParetoPoint("one", 0.5, math.inf)], path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["$x$", "$\\frac{$", "a_b^c", "$", "<b>", "ä" * 200])
def test_any_name_can_be_drawn(name: str, tmp_path: Path, drawn: list) -> None:
    draw_pareto([ParetoPoint(name, 0.5, 3.0), ParetoPoint("broken " + name, 0.5, math.inf)], tmp_path / "pareto.png")
    (box,) = boxes(drawn[0])
    assert 0 <= box.x0 < box.x1 <= drawn[0].bbox.width
    note = drawn[0].texts[0].get_window_extent()
    assert note.x1 <= drawn[0].bbox.width
