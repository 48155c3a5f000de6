"""What the page of evidence states of results, whose figures are chosen by hand here."""

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
REACHED, MISSED = "reached", "**missed**"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of docs/make_evidence.py, by name."""
    monkeypatch.syspath_prepend(str(DOCS))
    return runpy.run_path(str(DOCS / "make_evidence.py"))


def timed(network: str, string: str, share: float, whole: float, ppl: float = 50.0) -> dict[str, Any]:
    times = {"stack, share of interleaved": share, "whole network, ms": whole}
    return {"network": network, "string": string, "valid ppl": ppl, **times}


@pytest.mark.parametrize(("share", "told", "mark"), [(0.6254, "0.625", REACHED), (0.661, "0.661", MISSED)])
def test_latency_is_told_as_a_share_of_the_interleaved_networks(
    page: dict[str, Any], share: float, told: str, mark: str
) -> None:
    rows = [timed("shallower", "sf", 0.4, 20), timed("interleaved", "sfsf", 1, 80), timed("derived", "sff", share, 56)]
    rows.append(timed("random-1", "ff", 0.6, 50))
    first, _, *answers = page["judge_comparison"]({"networks": rows, "answers": ["better", "worse"]})
    assert f"the derived `sff` take {told} of the interleaved" in first
    assert f", {mark})" in first
    assert first.endswith("the whole network 0.700.")
    assert answers == ["better", "worse"]


def test_perplexities_are_told_beside_those_of_guesses_and_of_chance(page: dict[str, Any]) -> None:
    rows = [timed("derived", "sff", 0.6, 56, 50.0), timed("interleaved", "sfsf", 1, 80, 50.0)]
    rows += [timed("shallower", "sf", 0.6, 55, 50.0), timed("interleaved, longer", "sfsf", 1, 80, 9.0)]
    rows += [timed(f"random-{number}", "ff", 0.6, 50, ppl) for number, ppl in enumerate((90.0, 40.0, 60.0), 1)]
    _, told = page["judge_comparison"]({"networks": rows, "answers": []})
    assert "perplexity is 50.00: the interleaved network's 50.00 (aim: at or below it, reached)" in told
    assert "latency 50.00 (aim: below it, **missed**), the median of random ones of its cost 60.00" in told
    assert told.endswith("(aim: below it, reached).")


def test_errors_of_the_sum_of_layers_are_told(page: dict[str, Any]) -> None:
    layers = {"s": {"median_ms": 6.0}, "f": {"median_ms": 4.0}}
    check = {"median_error": 0.1234, "largest_error": 0.456, "networks": [{}] * 7}
    (told,) = page["judge_profile"]({"depth": 9, "inference": {"layers": layers}, "check": check})
    assert f"12.3% in the median of 7 random networks of 9 blocks (aim: 10 % at most, {MISSED}), 45.6%" in told
    assert "attention costs 1.5 feed-forward layers" in told


def ranked(by: str, target: str, *taus: float) -> dict[str, Any]:
    names = ("all", "one training", "with attention", "attention alone", "equal latency")
    return {"ranked by": by, "target": target} | dict(zip([f"tau, {name}" for name in names], taus, strict=True))


def test_rankings_are_told_beside_the_ceiling_and_the_counts(page: dict[str, Any]) -> None:
    rows = [
        ranked("parameters", "", 0.60, 0.11, 0.72, 0.13, 0.14),
        ranked("multiply-adds", "", 0.61, 0.21, 0.22, 0.83, 0.24),
        ranked("latency", "", 0.99, 0.99, 0.99, 0.99, 0.99),
        ranked("uniform: pi", "none", 0.98, 0.98, 0.98, 0.98, 0.98),
        ranked("soft: estimate", "none", 0.97, 0.97, 0.97, 0.97, 0.97),
        ranked("uniform: estimate", "none", 0.73, 0.41, 0.42, 0.43, 0.44),
        ranked("uniform: estimate", "0.65", 0.71, 0.51, 0.52, 0.53, 0.54),
    ]
    result = {"ceiling": {"all": 0.8, "with attention": 0.4}, "ranks": rows}
    reliability, *told = page["judge_ranking"](result)
    assert f"Kendall's tau of 0.80 from seed to seed (aim: 0.8, {REACHED})" in reliability
    assert f"target none: tau 0.73 (aim: 0.72, {REACHED}), and 0.41 with one training" in told[0]
    assert f"target 0.65: tau 0.71 (aim: 0.72, {MISSED}), and 0.51 with one training" in told[5]
    for line, (among, own, parameters, products, mark) in zip(
        told[1:5],
        [
            ("all networks", 0.73, "0.60", "0.61", REACHED),
            ("those with attention", 0.42, "0.72", "0.22", MISSED),
            ("those of attention alone", 0.43, "0.13", "0.83", MISSED),
            ("those of equal latency", 0.44, "0.14", "0.24", REACHED),
        ],
        strict=True,
    ):
        assert f"among {among}: {own}, by parameters {parameters}, by multiply-adds {products} " in line
        assert mark in line
    assert len(told) == 10


def test_the_default_estimators_networks_within_a_target_are_told(page: dict[str, Any]) -> None:
    def row(estimator: str, target: str, behind: str, own: str, by: str = "search and derive") -> dict[str, str]:
        figures = {"behind the best": behind, "seed deviation": "0.30 %", "of the best": own}
        return {"estimator": estimator, "target": target, "by": by, "at least as good as": "92 % of 63"} | figures

    rows = [row("uniform", "none", "5 %", "5 %"), row("soft", "0.65", "5 %", "5 %")]
    rows += [row("uniform", "0.65", "5 %", "5 %", "pi alone")]
    rows += [row("uniform", "0.65", "0.20 %", "0.10 %"), row("uniform", "0.8", "0.40 %", "0.50 %")]
    near, far = page["judge_derived"]({"derived": rows})
    assert near.startswith("Derived within 0.65: 0.20 % behind the best")
    assert "at least as good as 92 % of 63" in near
    assert f"0.30 % (aim: no further behind, {REACHED}), those of the best by 0.10 % ({MISSED})" in near
    assert far.startswith("Derived within 0.8: 0.40 % behind the best")
    assert f"0.30 % (aim: no further behind, {MISSED}), those of the best by 0.50 % ({REACHED})" in far


def test_a_black_box_search_is_told_at_as_many_steps(page: dict[str, Any]) -> None:
    records = [
        {"target": target, "trainings": trainings, "behind the best": f"{trainings}.{target} %"}
        for target, trainings in ((65, 2), (65, 4), (80, 2), (80, 4))
    ]
    told = list(page["judge_blackbox"]({"trainings_of_a_search": 4.0, "records": records}))
    assert len(told) == 2
    for line, target in zip(told, (65, 80), strict=True):
        assert f"4 trainings, within {target}: 4.{target} % behind" in line


def test_countermeasures_are_told_beside_the_search_without_any(page: dict[str, Any]) -> None:
    def record(estimator: str, against: str, share: float) -> dict[str, Any]:
        return {"estimator": estimator, "against": against, "identity share": share}

    records = [record("gdas", "late alpha", 0.2), record("soft", "late alpha", 0.37)]
    records += [record("gdas", "nothing", 0.7), record("soft", "nothing", 0.4), record("uniform", "nothing", 0.3)]
    gdas, soft = page["judge_collapse"]({"records": records})
    assert "by gdas, with late alpha: 0.20, 0.70 with nothing" in gdas
    assert "it matters" in gdas
    assert "by soft, with late alpha: 0.37, 0.40 with nothing" in soft
    assert "no difference" in soft
