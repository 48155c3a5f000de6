"""The picture of a derived network."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from parnas.figures import diagram, style
from parnas.figures.colours import candidate_colours
from parnas.figures.diagram import draw_network
from parnas.runs.records import BlockRecord, CostRecord, DerivationRecord

PI = {"s:heads=2": 0.5, "f": 0.3, "i": 0.2}
COSTS = {"s:heads=2": 4.0, "f": 1.0, "i": 0.0}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were written."""
    saved: list[Figure] = []

    def save(figure: Figure, path: Path) -> Path:
        saved.append(figure)
        return style.save_png(figure, path)

    monkeypatch.setattr(diagram, "save_png", save)
    return saved


def derivation(*layers: str, costs: dict[str, float] = COSTS, pi: dict[str, float] = PI) -> DerivationRecord:
    blocks = [BlockRecord(layer=name, pi=pi, cost=costs.get(name)) for name in layers]
    cost = CostRecord(metric="latency", unit="ms", blocks=5.0, interleaved=10.0, share=0.5) if costs else None
    return DerivationRecord(arch=" ".join(layers), blocks=blocks, cost=cost)


def boxes(figure: Figure) -> list[FancyBboxPatch]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def test_each_layer_has_a_box_of_its_colour_that_is_as_high_as_its_cost(figures: list[Figure], tmp_path: Path) -> None:
    path = draw_network(derivation("s:heads=2", "i", "f", "f"), tmp_path)
    assert path == tmp_path / "figures" / "network.png"
    assert path.stat().st_size > 1000
    (figure,) = figures
    places = [box.get_x() + box.get_width() / 2 for box in boxes(figure)]
    assert places == pytest.approx([0, 2, 3])
    assert [box.get_height() for box in boxes(figure)] == pytest.approx([1, 0.25, 0.25])
    colours = candidate_colours([*PI])
    assert [style.matplotlib.colors.to_hex(box.get_facecolor()) for box in boxes(figure)] == [
        colours[name] for name in ("s:heads=2", "f", "f")
    ]
    assert texts(figure) == ["embedding", "softmax", "s", "heads=2", "f", "f"]
    assert figure.axes[0].get_title(loc="left") == "height of a layer: its latency"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "s:heads=2  self-attention",
        "f  feed-forward",
        "i  identity",
    ]


def test_the_probabilities_of_a_block_are_stacked_and_its_layer_is_framed(
    figures: list[Figure], tmp_path: Path
) -> None:
    draw_network(derivation("f", "i"), tmp_path)
    bars = [patch for patch in figures[0].axes[1].patches if isinstance(patch, Rectangle)]
    framed = [bar for bar in bars if not bar.get_fill()]
    assert len(bars) == 2 * len(PI) + len(framed)
    assert [(bar.get_y(), bar.get_height()) for bar in framed] == [pytest.approx((0.5, 0.3)), pytest.approx((0.8, 0.2))]
    assert [bar.get_x() + bar.get_width() / 2 for bar in framed] == pytest.approx([0, 1])


def test_the_letter_of_a_layer_that_costs_next_to_nothing_is_above_it(figures: list[Figure], tmp_path: Path) -> None:
    draw_network(derivation("s:heads=2", "f", costs={"s:heads=2": 1000.0, "f": 0.0}), tmp_path)
    high, low = boxes(figures[0])
    assert (high.get_height(), low.get_height()) == (1.0, 0.0)
    places = {text.get_text(): text.get_position()[1] for text in figures[0].axes[0].texts}
    assert places["s"] == 0.0
    assert places["f"] > 0.0


@pytest.mark.parametrize(
    "record",
    [
        DerivationRecord(arch="sfi", cost=3.0),
        derivation("s:heads=2", "f", costs={}, pi={}),
        derivation("s:heads=2", "f").model_copy(update={"arch": "sf"}),
        derivation("s:heads=2", "f", pi={"unknown": 0.5, "": 0.5}),
        derivation("s:heads=2", "f", costs={"s:heads=2": math.nan, "f": 1.0}),
        derivation("i", "i"),
    ],
    ids=["black box", "neither pi nor costs", "changed by hand", "unknown layers", "no finite cost", "identity alone"],
)
def test_without_costs_all_layers_are_equally_high(
    record: DerivationRecord, figures: list[Figure], tmp_path: Path
) -> None:
    draw_network(record, tmp_path)
    (figure,) = figures
    assert {box.get_height() for box in boxes(figure)} <= {1.0}
    assert not figure.axes[0].get_title(loc="left")
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()][:2] == ["1", "2"]


@pytest.mark.parametrize("layers", [["s:heads=2"], ["s:heads=2", "f"], ["f"] * 300])
def test_the_picture_of_any_number_of_blocks_has_a_size_that_can_be_written(
    layers: list[str], figures: list[Figure], tmp_path: Path
) -> None:
    draw_network(derivation(*layers), tmp_path)
    (figure,) = figures
    (legend,), (width, height) = figure.legends, figure.canvas.get_width_height()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= width
    assert width < 2**15
    assert box.y1 <= height / 2
