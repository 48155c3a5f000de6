"""Figures as inline SVG: text as text, colours as variables of the page, nothing that reaches beyond the element."""

import re
from xml.etree import ElementTree

import pytest

from parnas.figures.colours import DARK, LIGHT, contrast
from parnas.figures.curves import Curves, plot_curves
from parnas.figures.pareto import ParetoPoint, plot_pareto
from parnas.figures.svg import colour_rules, inline_svg

TAGS = {"svg", "g", "defs", "path", "use", "text", "tspan", "clipPath", "rect"}
EVIL = '</text></svg><script>alert("1")</script> $\\frac{$ & \x01 \n'


def make_svg(name: str = "chart", run: str = "derived") -> str:
    curves = [Curves(run, "sfs", [(1, 90.0), (2, 80.0)], [(1, 70.0), (2, 60.0)], [])]
    return inline_svg(plot_curves(curves), name, f"Curves of {run}")


def test_text_is_text_and_the_element_has_a_name() -> None:
    root = ElementTree.fromstring(make_svg())
    assert (root.get("role"), root.get("aria-label")) == ("img", "Curves of derived")
    texts = ["".join(text.itertext()) for text in root.iter("text")]
    assert {"step", "perplexity per token"} <= set(texts)
    assert any("60.00" in text and "derived" in text for text in texts)


def test_black_is_a_variable_too() -> None:
    points = [ParetoPoint(str(number), number, 10 - number) for number in range(7)]
    root = ElementTree.fromstring(inline_svg(plot_pareto(points, "cost"), "chart", "Front"))
    assert "fill:var(--line-000000)" in root.get("style", "")
    assert all("fill: var(--" in text.get("style", "") for text in root.iter("text"))


def test_ids_are_unique_on_the_page_and_every_reference_is_met() -> None:
    page = make_svg("one") + make_svg("two")
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids) > 2
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', page)) <= set(ids)


def test_equal_figures_give_equal_text_without_a_date() -> None:
    assert make_svg() == make_svg()
    assert not re.search(r"metadata|<style|http", make_svg())


def test_colours_are_variables_with_contrast_in_both_modes() -> None:
    svg = inline_svg(plot_pareto([ParetoPoint("one", 1, 2), ParetoPoint("other", 2, 1)], "cost"), "chart", "Front")
    assert not re.search(r"#[0-9a-f]{6}", svg)
    rules = colour_rules(svg)
    for declarations, background in zip(rules, (LIGHT, DARK), strict=True):
        shades = dict(each.split(":") for each in declarations.split(";"))
        assert set(shades) == set(re.findall(r"--(?:line|text)-[0-9a-f]{6}", svg))
        for name, colour in shades.items():
            assert contrast(colour, background) >= (4.5 if name.startswith("--text") else 3)


@pytest.mark.parametrize("name", [EVIL, "$x$", "名前", "", "x" * 500])
def test_any_name_can_be_shown_and_stays_text(name: str) -> None:
    root = ElementTree.fromstring(make_svg("chart", name))
    assert {each.tag for each in root.iter()} <= TAGS
    point = inline_svg(plot_pareto([ParetoPoint(name, 1, 2)], name), "chart", name)
    assert "<script" not in point
