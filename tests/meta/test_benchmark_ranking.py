"""The table of all networks of a small space, and how searches are compared with it."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import blackbox_quality
import ground_truth
import pytest
import search_quality
from ground_truth import Row, Study, draw_stratified, missing, networks
from search_quality import Job, Score, Search, Truth, agreement_in_strata, derived_table, read_truth, subsets
from trainings import append_rows, make_tiny, read_rows, work_off

from parnas.config.loader import Config, load_config
from parnas.errors import ParnasError
from parnas.nas.cost import make_costs
from parnas.nas.latency_table import read_profile
from parnas.studies.blackbox import EvaluatedNetwork

COSTS = make_costs("macs", {"s": 2.0, "f": 1.0, "i": 0.0}, 2)


def test_strings_of_one_network_count_once() -> None:
    found = networks(5, ("s", "f", "i"))
    strings = ("".join(letters) for letters in itertools.product("sfi", repeat=5))
    assert set(found) == {string.replace("i", "") or "i" for string in strings}
    assert len(found) == len(set(found)) == 63
    assert networks(2, ("s", "f")) == ["ss", "sf", "fs", "ff"]


def test_only_missing_rows_are_trained(tmp_path: Path) -> None:
    config = load_config(ground_truth.CONFIG, ["search.blocks=2", "train.steps=9"])
    study = Study(config, tuple(networks(2, "sfi")), 7)
    assert missing(study, [], 1)[:3] == [("i", 1), ("s", 1), ("f", 1)]
    for row in (Row("i", 1, 9, 5.0), Row("sf", 2, 9, 4.25), Row("f", 1, 8, 3.0)):
        append_rows(tmp_path / "rows.csv", [row])
    rows = read_rows(tmp_path / "rows.csv", Row)
    assert rows[1] == Row("sf", 2, 9, 4.25)
    left = missing(study, rows, 2)
    assert len(left) == 2 * 7 - 2
    assert ("f", 1) in left  # its row is of another budget
    assert ("sf", 2) not in left


def fail_on_two(job: int) -> int:
    if job == 2:
        raise ValueError("two")
    return 10 * job


def test_a_job_that_fails_does_not_cost_the_others() -> None:
    found = []

    def collect() -> None:
        for result in work_off(fail_on_two, [1, 2, 3, 4], 1):
            found.append(result)

    with pytest.raises(ValueError, match="two"):
        collect()
    assert sorted(found) == [10, 30, 40]


def test_only_seeds_of_all_networks_are_the_truth(tmp_path: Path) -> None:
    config, path = load_config(ground_truth.CONFIG, ["search.blocks=1", "train.steps=9"]), tmp_path / "rows.csv"
    study = Study(config, ("i", "s", "f"), 3)
    append_rows(path, [Row(arch, seed, 9, 5.0) for seed in (1, 2) for arch in "isf"] + [Row("i", 3, 9, 5.0)])
    assert read_truth(path, study, COSTS).seeds == 2
    with pytest.raises(ParnasError, match="0 seeds, of 2"):
        read_truth(path, study._replace(config=config.replace(train__steps=8)), COSTS)


def test_a_sample_is_even_over_latency_and_its_first_networks_have_all_seeds(tmp_path: Path) -> None:
    known, costs = networks(6, "skfi"), {"s": 10.0, "k": 2.0, "f": 3.0, "i": 0.0}
    drawn = draw_stratified(known, costs, 40, 8)
    assert len(set(drawn)) == 40
    assert set(drawn) <= set(known)
    strata = Counter(int(sum(costs[letter] for letter in each) * 8 / 60.001) for each in drawn)
    assert sorted(strata) == list(range(8))
    assert max(strata.values()) <= 6
    assert draw_stratified(known, costs, 10, 8) == drawn[:10]
    study = Study(load_config(ground_truth.CONFIG, ["train.steps=9"]), drawn[:4], 2)
    jobs = list(study.seeds_of(2))
    assert jobs == [*((arch, 1) for arch in drawn[:4]), *((arch, 2) for arch in drawn[:2])]
    append_rows(tmp_path / "rows.csv", [Row(arch, seed, 9, 5.0 + seed) for arch, seed in jobs])
    truth = read_truth(tmp_path / "rows.csv", study, COSTS)
    assert [len(truth.losses[arch]) for arch in drawn[:4]] == [2, 2, 1, 1]
    assert truth.repeated() == list(drawn[:2])
    assert set(truth.single(1).losses) == set(drawn[:2])


def test_agreement_of_seeds_in_strata_is_counted_among_networks_of_all_seeds() -> None:
    losses = {"sf": [1.0, 1.0], "fs": [2.0, 2.0], "ff": [3.0, 4.0], "s": [4.0, 3.0], "f": [9.0]}
    assert Truth(losses, COSTS).reliability_in_strata() == 0  # one pair in order, the other not


def test_a_pair_counts_in_strata_only_where_costs_are_equal() -> None:
    losses = {"sf": [1.0], "fs": [2.0], "ff": [3.0], "s": [4.0]}
    truth = Truth(losses, COSTS)
    # sf, fs cost 3 each; ff and s cost 2 each.
    assert agreement_in_strata(truth, {"sf": 2.0, "fs": 1.0, "ff": 9.0, "s": 10.0}) == 0
    assert agreement_in_strata(truth, {"sf": 2.0, "fs": 1.0, "ff": 9.0, "s": 8.0}) == 1
    assert subsets(truth)["with attention"] == ["sf", "fs", "s"]


def test_reliability_is_the_mean_agreement_of_seeds() -> None:
    truth = Truth({"s": [1.0, 1.0, 3.0], "f": [2.0, 2.0, 2.0], "i": [3.0, 3.0, 1.0]}, COSTS)
    assert truth.reliability(["s", "f", "i"]) == pytest.approx((1 - 1 - 1) / 3)
    assert truth.seed_deviation("f") == 0
    assert truth.pooled_deviation() == pytest.approx(((2 * 4 / 3) / 3) ** 0.5)


def test_derived_networks_stand_beside_the_best_they_could_have_been() -> None:
    truth = Truth({"ss": [1.0, 1.2], "sf": [2.0, 2.0], "fs": [3.0, 3.0], "s": [4.0, 4.0], "f": [5.0, 5.0]}, COSTS)
    searches = [Search("soft", "0.7", 1, 9, "s", "s", 1.0), Search("soft", "0.7", 2, 9, "f", "s", 1.0)]
    row, by_pi = derived_table(truth, searches)
    assert by_pi["behind the best"] == "0.00 %"
    assert row["best"] == "s"  # 2 of 3: within the target, and the best of those
    assert row["behind the best"] == "50.00 %"
    free = derived_table(truth, [Search("soft", "none", 1, 9, "sf", "ss", 1.0)])[0]
    assert free["best"] == "ss"
    assert free["at least as good as"] == "80 % of 5"
    assert free["behind the best"] == f"{100 * (2.0 - 1.1):.2f} %"


def test_a_black_box_search_reads_one_training_of_each_network_and_is_judged_by_all() -> None:
    losses = {"s": [1.0, 4.0], "f": [2.0, 2.0], "ss": [3.0, 1.0], "sf": [4.0, 4.0], "fs": [5.0, 5.0], "ff": [6.0, 6.0]}
    truth = Truth(losses, COSTS)
    config = Config().replace(search__blocks=2, search__space=("s", "f", "i"))
    studies = [blackbox_quality.run_study(truth, config, seed, 30) for seed in (1, 2)]
    for of, found in enumerate(studies):
        assert {each.network: each.valid_ppl for each in found}.items() <= {
            network: pytest.approx(math.exp(each[of])) for network, each in losses.items()
        }.items()
    first = [EvaluatedNetwork("f", 7.0, 1.0, 0, "looked up"), EvaluatedNetwork("ss", 1.0, 4.0, 1, "looked up")]
    late = [EvaluatedNetwork("sf", 9.0, 3.0, 1, "looked up"), EvaluatedNetwork("f", 2.0, 1.0, 2, "looked up")]
    row = blackbox_quality.judge(truth, [first, late], 0.7, 2)  # at most 2.1 of 3: s, f and ff
    assert row["networks"] == "f –"
    assert row["behind the best"] == f"{100 * (0.0 + 4.0) / 2:.2f} %"
    assert blackbox_quality.judge(truth, [first, late], 2.0, 3)["networks"] == "ss f"


def test_table_searches_and_report_on_a_small_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "counted.yaml"
    text = make_tiny(tmp_path).read_text(encoding="utf-8")
    text = text.replace("metric: latency", "metric: macs").replace("uniform_fraction: 0.55", "uniform_fraction: 1.0")
    config.write_text(text, encoding="utf-8")
    rows = ["--config", str(config), "--device", "cpu"]
    rows += ["--out", str(tmp_path)]
    ground_truth.main([*rows, "--seeds", "2", "--workers", "1"])
    table = read_rows(tmp_path / "counted.csv", Row)
    assert len(table) == 14
    assert {row.arch for row in table} == set(networks(2, "sfi"))
    which = ["--estimators", "single_path", "uniform", "--targets", "none", "0.65", "--seeds", "1", "--workers", "1"]
    for _ in range(2):  # the second time there is nothing left to do
        search_quality.main([*rows, "--search", *which])
    search_quality.main([*rows, "--profile"])
    assert read_profile(tmp_path / "counted_profile.json").check is not None
    searches = read_rows(tmp_path / "search_quality_counted.csv", Search)
    scores = read_rows(tmp_path / "search_scores_counted.csv", Score)
    by_case = {(row.estimator, row.target): row for row in searches}
    assert set(by_case) == set(itertools.product(("single_path", "uniform"), ("none", "0.65")))
    assert len(scores) == 3 * 7, "uniform searches once for both targets"
    within, _ = search_quality.run_search(load_config(config), networks(2, "sfi"), Job("uniform", "0.65", 1, ("0.65",)))
    assert within[0][:-1] == by_case["uniform", "0.65"][:-1], "as a search with that target would have derived"
    assert all(row.pi < 0 and row.inherited < 0 for row in scores)
    for row in scores:
        weight = 0.01 if row.estimator == "uniform" else 0.0  # with a penalty on the cost, pi tells no losses
        searched = load_config(config).replace(search__estimator=row.estimator)
        assert row.of("estimate", searched) == pytest.approx(row.inherited + weight * row.pi)
    search_quality.main(rows)
    result = json.loads((tmp_path / "search_quality_counted-cpu.json").read_text())
    assert len(result["derived"]) == 2 * len(searches)
    assert {record["ranked by"] for record in result["ranks"]} >= {"parameters", "single_path: pi"}
    assert -1 <= result["ceiling"]["all"] <= 1
    blackbox_quality.main([*rows, "--trials", "2", "4"])
    result = json.loads((tmp_path / "blackbox_quality-cpu.json").read_text())
    assert [(record["target"], record["trainings"]) for record in result["records"]] == [
        *((0.65, 2), (0.65, 4)),
        *((0.8, 2), (0.8, 4)),
    ]
