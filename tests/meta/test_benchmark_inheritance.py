"""The benchmark of inherited weights: its plan, its table, and its stages in the tiny form."""

from pathlib import Path

import inheritance
import pytest
from conftest import make_corpus
from inheritance import INHERITED, SCRATCH, Row
from trainings import read_rows

from parnas.architecture import Architecture
from parnas.config.yaml_file import read_yaml
from parnas.runs.files import read_json
from parnas.runs.resolve import read_config


def test_the_plan_has_four_budgets_and_a_network_of_the_space() -> None:
    settings = read_yaml(Path(inheritance.__file__).with_suffix(".yaml").read_text(encoding="utf-8"), "plan")
    plan = settings.pop("inheritance")
    config = read_config(settings, [])
    assert len(plan["steps"]) >= 4
    assert max(plan["steps"]) == 10 * min(plan["steps"])
    arch = Architecture.parse(plan["arch"])
    assert len(arch) == config.search.blocks
    assert set(arch) <= set(config.search.candidates)


def test_the_gain_is_by_seed_with_and_without_the_steps_of_the_search() -> None:
    plan = {"search_steps": 5, "steps": [10, 20], "seeds": [1, 2]}
    values = {(INHERITED, 15): (45.0, 54.0), (SCRATCH, 15): (50.0, 60.0), (SCRATCH, 10): (90.0, 108.0)}
    rows = [Row(*key, seed, ppl, 9.0) for key, each in values.items() for seed, ppl in enumerate(each, 1)]
    (record,) = inheritance.summarise(plan, rows)
    assert (record["steps"], record["seeds"]) == (10, 2)
    assert record["equal_total"]["percent"] == pytest.approx(-10.0)
    assert record["equal_training"]["percent"] == pytest.approx(-50.0)
    left = [
        (SCRATCH, 20, 1),
        (SCRATCH, 20, 2),
        *((start, 25, seed) for seed in (1, 2) for start in (INHERITED, SCRATCH)),
    ]
    assert sorted(inheritance.list_jobs(plan, rows)) == sorted(left)
    assert [job[1] for job in inheritance.list_jobs(plan, rows)] == [20, 20, 25, 25, 25, 25]


@pytest.mark.slow
def test_all_stages_run_in_the_tiny_form(tmp_path: Path) -> None:
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(make_corpus(tmp_path / "text"))]
    inheritance.main(common)
    rows = read_rows(tmp_path / "inheritance.csv", Row)
    assert {row[:2] for row in rows} == {(INHERITED, 8), (INHERITED, 12), (SCRATCH, 4), (SCRATCH, 8), (SCRATCH, 12)}
    inheritance.main([*common, "--report"])
    result = read_json(tmp_path / "inheritance-cpu.json")
    assert [record["steps"] for record in result["budgets"]] == [4, 8]
    assert result["tables"][-1].count("\n") == 5, "title, heads and a row for each number of steps"
