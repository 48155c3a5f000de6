"""The figures and marks in the sentences of docs/evidence.md, for given results."""

import re
import runpy
from pathlib import Path
from typing import Any

import goals
import pytest

MAKERS = Path(__file__).resolve().parents[2] / "docs" / "make"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of docs/make/evidence.py, by name."""
    monkeypatch.syspath_prepend(str(MAKERS))
    return runpy.run_path(str(MAKERS / "evidence.py"))


def timed(network: str, string: str, share: float, whole: float, ppl: float = 50.0) -> dict[str, Any]:
    times = {"stack, share of interleaved": share, "whole network, ms": whole}
    return {"network": network, "string": string, "valid ppl": ppl, **times}


def comparison(share: float, *random: float) -> dict[str, Any]:
    rows = [timed("derived", "sff", share, 56, 50.0), timed("interleaved", "sfsf", 1, 80, 50.0)]
    rows += [timed("shallower", "sf", 0.6, 55, 50.0), timed("interleaved, longer", "sfsf", 1, 80, 9.0)]
    rows += [timed(f"random-{number}", "ff", 0.6, 50, ppl) for number, ppl in enumerate(random, 1)]
    return {"networks": rows, "answers": ["better", "worse"]}


def test_latency_is_a_share_of_the_interleaved_network(page: dict[str, Any]) -> None:
    first, *answers = page["judge_comparison"](comparison(0.6254))
    assert all(part in first for part in ("`sff`", "0.625", "0.700"))
    assert answers == ["better", "worse"]


def test_the_derived_network_is_judged_by_latency_and_by_the_baselines() -> None:
    figures = [(goal.value, goal.reached) for goal in goals.judge_comparison(comparison(0.661, 90.0, 40.0, 60.0))]
    assert figures == [("0.661", False), ("50.00", True), ("50.00", False), ("50.00", True)]


def test_errors_of_the_sum_of_layers(page: dict[str, Any]) -> None:
    layers = {"s": {"median_ms": 6.0}, "f": {"median_ms": 4.0}}
    check = {"median_error": 0.1234, "largest_error": 0.456, "networks": [{}] * 7}
    profile = {"depth": 9, "inference": {"layers": layers}, "check": check}
    line = page["describe_profile"](profile)
    assert all(part in line for part in ("12.3%", "45.6%", "7 random", "9 blocks", "1.5 feed-forward"))
    (goal,) = goals.judge_profile(profile)
    assert (goal.value, goal.reached) == ("12.3%", False)


def ranked(by: str, target: str, *taus: float) -> dict[str, Any]:
    names = ("all", "one training", "with attention", "attention alone", "equal latency")
    return {"ranked by": by, "target": target} | dict(zip([f"tau, {name}" for name in names], taus, strict=True))


def test_rankings_stand_beside_the_ceiling_and_the_counts(page: dict[str, Any]) -> None:
    rows = [
        ranked("parameters", "", 0.60, 0.11, 0.72, 0.13, 0.14),
        ranked("multiply-adds", "", 0.61, 0.21, 0.22, 0.83, 0.24),
        ranked("latency", "", 0.99, 0.99, 0.99, 0.99, 0.99),
        ranked("uniform: pi", "none", 0.98, 0.98, 0.98, 0.98, 0.98),
        ranked("soft: estimate", "none", 0.97, 0.97, 0.97, 0.97, 0.97),
        ranked("uniform: estimate", "none", 0.73, 0.74, 0.42, 0.43, 0.44),
        ranked("uniform: estimate", "0.65", 0.71, 0.70, 0.52, 0.53, 0.54),
    ]
    result = {"ceiling": {"all": 0.8, "with attention": 0.4}, "ranks": rows}
    lines = [re.findall(r"0\.\d\d", line) for line in page["judge_ranking"](result)]
    assert lines == [["0.80"], ["0.73", "0.74"], ["0.65", "0.71", "0.70"]]
    judged = [(goal.value, goal.reached) for goal in goals.judge_table({**result, "derived": []})]
    assert judged == [
        ("0.80", True),
        *(("0.74", True), ("0.73", True), ("0.42", False), ("0.43", False), ("0.44", True)),
        *(("0.70", False), ("0.71", True), ("0.52", False), ("0.53", False), ("0.54", True)),
    ]


def test_derived_networks_of_the_default_estimator_within_a_target(page: dict[str, Any]) -> None:
    def row(estimator: str, target: str, behind: str, own: str, by: str = "search and derive") -> dict[str, str]:
        figures = {"behind the best": behind, "seed deviation": "0.30 %", "of the best": own}
        return {"estimator": estimator, "target": target, "by": by, "at least as good as": "92 % of 63"} | figures

    rows = [row("uniform", "none", "5 %", "5 %"), row("soft", "0.65", "5 %", "5 %")]
    rows += [row("uniform", "0.65", "5 %", "5 %", "pi alone")]
    rows += [row("uniform", "0.65", "0.20 %", "0.10 %"), row("uniform", "0.8", "0.40 %", "0.50 %")]
    near, far = page["judge_derived"]({"derived": rows})
    assert re.findall(r"[\d.]*\d %", near) == ["0.20 %", "92 %"]
    assert re.findall(r"[\d.]*\d %", far) == ["0.40 %", "92 %"]
    table = {"ceiling": {"all": 0.5}, "ranks": [ranked(by, "", *[0.0] * 5) for by in ("parameters", "multiply-adds")]}
    _, *judged = goals.judge_table({**table, "derived": rows})
    assert [(goal.value, goal.reached) for goal in judged] == [
        *(("0.20 %", True), ("0.20 %", False)),
        *(("0.40 %", False), ("0.40 %", True)),
    ]


def test_a_black_box_search_has_as_many_steps(page: dict[str, Any]) -> None:
    records = [
        {"target": target, "trainings": trainings, "behind the best": f"{trainings}.{target} %"}
        for target, trainings in ((65, 2), (65, 4), (80, 2), (80, 4))
    ]
    lines = list(page["judge_blackbox"]({"trainings_of_a_search": 4.0, "records": records}))
    assert [re.findall(r"[\d.]*\d %", line) for line in lines] == [["4.65 %"], ["4.80 %"]]


def test_remedies_are_judged_by_the_derived_network(page: dict[str, Any]) -> None:
    def record(estimator: str, against: str, share: float, bits: str) -> dict[str, Any]:
        return {"estimator": estimator, "against": against, "identity share": share, "bits per byte": bits}

    records = [record("gdas", "nothing", 0.7, "1.7440"), record("gdas", "late alpha", 0.2, "1.7202")]
    records += [record("gdas", "entropy", 0.3, "1.7507"), record("uniform", "nothing", 0.1, "1.6250")]
    (line,) = page["judge_collapse"]({"records": records})
    assert "`gdas` to identity (mean probability 0.70)" in line
    assert line.endswith("or more: `late alpha`; these do not: `entropy`.")
