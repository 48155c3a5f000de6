"""The benchmark of trainings of equal time: its plan, its steps, and all its stages in the tiny form."""

from pathlib import Path

import equal_time
import pytest
from conftest import make_corpus
from trainings import read_rows

from parnas.architecture import Architecture
from parnas.config.yaml_file import read_yaml
from parnas.runs.files import read_json
from parnas.runs.resolve import read_config

BENCHMARK = Path(equal_time.__file__)
TIMES = equal_time.Times(10.0, {"s": 5.0, "f": 2.0}, 20.0, 1000.0)


def test_the_plan_has_only_layers_that_are_timed() -> None:
    settings = read_yaml(BENCHMARK.with_suffix(".yaml").read_text(encoding="utf-8"), "plan")
    plan = settings.pop("equal_time")
    read_config(settings, [])
    assert len(plan["seeds"]) >= 5
    for arch in plan["networks"].values():
        assert set(Architecture.parse(arch)) <= set(equal_time.LAYERS)


def test_a_network_gets_the_steps_that_fit_into_the_time() -> None:
    assert TIMES.steps(Architecture("sf"), 1700.0) == 100
    assert TIMES.steps(Architecture("sfi"), 1700.0) == 100, "identity takes no time"


def test_the_known_network_of_a_seed_waits_for_the_run_that_derives_it() -> None:
    plan = {"seeds": [1, 2], "networks": {"by hand": "interleaved-2"}}
    run = equal_time.Row(equal_time.ONE_RUN, 1, "ks", 5, 20, 50.0, 9.0, 2.0, 100)
    assert equal_time.list_jobs(plan, []) == [
        (equal_time.ONE_RUN, 1, ""),
        ("by hand", 1, "sf"),
        (equal_time.ONE_RUN, 2, ""),
        ("by hand", 2, "sf"),
    ]
    assert (equal_time.KNOWN, 1, "ks") in equal_time.list_jobs(plan, [run])
    assert (equal_time.ONE_RUN, 1, "") not in equal_time.list_jobs(plan, [run])


def test_the_run_is_compared_with_each_network_by_seed() -> None:
    rows = [
        equal_time.Row(name, seed, arch, 0, 10, ppl, 5.0, 0.0, 100)
        for name, arch, values in ((equal_time.ONE_RUN, "ks", (45.0, 54.0)), ("by hand", "sf", (50.0, 60.0)))
        for seed, ppl in enumerate(values, 1)
    ]
    _, other = equal_time.summarise(rows, {"sf": 0.5})
    assert other["percent"] == pytest.approx(-10.0)
    assert (other["seeds"], other["latency"]) == (2, 0.5)


@pytest.mark.slow
def test_all_stages_run_in_the_tiny_form(tmp_path: Path) -> None:
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(make_corpus(tmp_path / "text"))]
    equal_time.main([*common, "--profile"])
    for _ in range(2):
        equal_time.main(common)
    rows = read_rows(tmp_path / "equal_time.csv", equal_time.Row)
    names = {row.name for row in rows}
    assert {equal_time.ONE_RUN, equal_time.KNOWN} < names
    of = {row.name: row for row in rows}
    assert of[equal_time.KNOWN].arch == of[equal_time.ONE_RUN].arch
    assert 0 < of[equal_time.ONE_RUN].search_seconds < of[equal_time.ONE_RUN].seconds
    equal_time.main([*common, "--latency"])
    equal_time.main([*common, "--report"])
    found = {each["name"]: each for each in read_json(tmp_path / "equal_time-cpu.json")["networks"]}
    assert found.keys() == names
