"""The benchmark of trainings of equal time: plans, steps, what it tries, and all its stages in the tiny form."""

import math
from collections.abc import Iterable
from pathlib import Path

import comparison
import equal_time
import pytest
import torch
import tried_search
from conftest import make_corpus
from equal_time import FRONT, ONE_RUN, SCRATCH, TWICE, Job, Row
from helpers.model_helpers import make_supernet, random_ids
from trainings import read_rows

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.config.yaml_file import read_yaml
from parnas.data.batching import Batch
from parnas.model.estimators import UniformPath
from parnas.runs.files import read_json, write_json
from parnas.runs.resolve import read_config
from parnas.training.device import Device
from parnas.training.weight_optimizer import GradientAccumulator

BENCHMARKS = Path(equal_time.__file__).parent
TIMES = equal_time.Times(10.0, {"s": 5.0, "f": 2.0}, {ONE_RUN: {"step": 20.0, "rerank": 1000.0}})


def read_plan(name: str) -> dict:
    settings = read_yaml((BENCHMARKS / f"{name}.yaml").read_text(encoding="utf-8"), name)
    plan = settings.pop(name)
    config = read_config(settings, [])
    for variant in equal_time.one_runs_of(plan).values():
        variant.changed(config)
        assert set(variant.tried) <= tried_search.TRIED.keys()
    return plan


@pytest.mark.parametrize("name", ["equal_time", "equal_time_epochs", "equal_time_words", "one_run"])
def test_a_plan_has_only_layers_that_are_timed_and_settings_that_exist(name: str) -> None:
    plan = read_plan(name)
    assert ONE_RUN in equal_time.one_runs_of(plan)
    for arch in plan["networks"].values():
        assert set(Architecture.parse(arch)) <= set(equal_time.LAYERS)


def test_a_network_gets_the_steps_that_fit_into_the_time() -> None:
    assert TIMES.steps(Architecture("sf"), 1700.0) == 100
    assert TIMES.steps(Architecture("sfi"), 1700.0) == 100, "identity takes no time"
    assert TIMES.search_steps(ONE_RUN, 3000.0) == 100
    assert TIMES.steps(Architecture("sf"), 20.0) == TIMES.search_steps(ONE_RUN, 20.0) == equal_time.LEAST_STEPS
    assert TIMES.steps(Architecture("sf"), -20.0) == equal_time.LEAST_STEPS, "the time was spent on short trainings"


def test_the_trainer_takes_no_negative_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was slower while the layers were timed than while the trainer was."""
    config = read_config({"data": {"corpus": str(make_corpus(tmp_path / "text"))}, **comparison.TINY}, [])
    layers = {name: {"median_ms": 1.0} for name in equal_time.LAYERS}
    content = {"training": {"fixed": {"median_ms": 2.0}, "layers": layers}}
    monkeypatch.setattr(equal_time, "retrain", lambda *_: None)
    for taken, expected in ((6.0, 0.0), (8.0, 1.0)):  # of the probed network, whose five layers take 7 ms
        write_json(tmp_path / "profile.json", content)
        monkeypatch.setattr(equal_time, "step_times", lambda _, taken=taken: [taken])
        equal_time.measure(config, {"one_runs": []}, tmp_path / "profile.json")
        assert read_json(tmp_path / "profile.json")["trainer_ms"] == expected


def test_a_plan_can_name_a_share_of_the_training_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, found = make_corpus(tmp_path / "text"), list[dict[str, int]]()

    def read(config: Config, *_: object) -> None:
        found.append({path.name: len(path.read_text().splitlines()) for path in Path(config.data.corpus).iterdir()})

    monkeypatch.setattr(equal_time, "train_missing", read)
    equal_time.main(["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(whole)])
    lines = {path.name: len(path.read_text().splitlines()) for path in whole.iterdir()}
    assert found == [lines | {"train.txt": round(0.5 * lines["train.txt"])}]


def test_what_was_derived_is_trained_from_scratch_once_it_is_known() -> None:
    plan = {"seeds": [1, 2], "networks": {"by hand": "interleaved-2"}, "front": {"targets": [0.5]}}
    longer = [job for job in equal_time.list_jobs(plan | {"twice": ["by hand"]}, []) if job.name.endswith(TWICE)]
    assert longer == [Job(f"by hand{TWICE}", 1, "sf")]
    few = plan | {"front": {"targets": [0.5], "seeds": [2]}}
    assert [job.seed for job in equal_time.list_jobs(few, []) if job.name == FRONT] == [2]
    variants = plan | {"one_runs": [{"name": ONE_RUN}, {"name": "longer", "seeds": [1]}]}
    assert [job.seed for job in equal_time.list_jobs(variants, []) if job.name == "longer"] == [1]
    more = plan | {"first_seed": {"long": "interleaved-3"}}
    assert [job.seed for job in equal_time.list_jobs(more, []) if job.name == "long"] == [1]
    run = Row(ONE_RUN, 1, "ks", 5, 20, 50.0, 9.0, 2.0, 100)
    fronts = [run._replace(name=f"{FRONT} 0.3", arch="k"), run._replace(name=f"{FRONT} 0.5")]
    jobs = equal_time.list_jobs(plan, [])
    assert jobs == [
        Job(name, seed, arch) for seed in (1, 2) for name, arch in ((ONE_RUN, ""), (FRONT, ""), ("by hand", "sf"))
    ]
    later = equal_time.list_jobs(plan, [run, *fronts])
    assert [job for job in later if job.seed == 1] == [
        Job("by hand", 1, "sf"),
        Job(f"ks{SCRATCH}", 1, "ks"),  # that of the target 0.5 is the same network
        Job(f"k{SCRATCH}", 1, "k"),
    ]
    assert not [job for job in equal_time.list_jobs(plan | {"scratch": False}, [run, *fronts]) if SCRATCH in job.name]


def test_the_run_is_compared_with_each_network_by_seed() -> None:
    rows = [
        Row(name, seed, arch, 0, 10, ppl, 5.0, 0.0, 100)
        for name, arch, values in ((ONE_RUN, "ks", (45.0, 54.0)), ("by hand", "sf", (50.0, 60.0)))
        for seed, ppl in enumerate(values, 1)
    ]
    rows = [rows[0]._replace(search_steps=5), *rows[1:], rows[0]._replace(name=f"ks{SCRATCH}", ppl=50.0)]
    shares = {"sf": 0.5, "ks": 0.4}
    run, same, other = equal_time.summarise({"minutes": 6}, rows, shares, {"sf": 0.6})
    assert other["percent"] == pytest.approx(-10.0)
    assert (other["seeds"], other["latency"], other["measured_latency"]) == (2, 0.5, 0.6)
    assert (run["latency"], run.get("measured_latency")) == (0.4, None)
    assert (same["ppl"], same["seeds"]) == (50.0, 1)
    assert "seconds" not in other, "two trainings are too few for a median"
    assert run["to_scratch"]["percent"] == pytest.approx(-10.0)


def test_networks_are_compared_on_the_test_split_too_where_all_were_evaluated_on_it() -> None:
    run, other = (
        [Row(name, seed, "s", 0, 9, 50.0, 5.0, 0.0, 9, test=test) for seed, test in enumerate(tests, 1)]
        for name, tests in ((ONE_RUN, (45.0, 54.0)), ("by hand", (50.0, 60.0)))
    )
    ours, theirs = equal_time.summarise({"minutes": 6}, [*run, *other], {"s": 0.5}, {})
    assert (ours["test"], theirs["test"], theirs["percent"]) == (49.5, 55.0, 0.0)
    assert theirs["test_difference"]["percent"] == pytest.approx(-10.0)
    line = equal_time.format_record(theirs)
    assert (line["test"], line["on the test split"][:8]) == ("55.00", "-10.00 %")
    of_two = equal_time.summarise({"minutes": 6}, [*run, other[0], other[1]._replace(test=math.nan)], {"s": 0.5}, {})
    assert "test" not in of_two[1]
    assert "test" not in equal_time.format_record(of_two[1])
    earlier = [row._replace(test=math.nan) for row in run]
    assert "test_difference" not in equal_time.summarise({"minutes": 6}, [*earlier, *other], {"s": 0.5}, {})[1]


def test_latency_is_that_of_the_profile_by_which_networks_are_derived() -> None:
    profile = {"inference": {"layers": {"s": {"median_ms": 3.0}, "f": {"median_ms": 1.0}, "i": {"median_ms": 0.0}}}}
    assert equal_time.predicted_shares(profile, ["sfi", "s"], "sfsf") == {"sfi": 0.5, "s": 0.375}


def test_times_are_predicted_and_the_median_of_those_measured() -> None:
    """One of three trainings ran while the machine was busy."""
    rows = [Row("by hand", seed, "sf", 0, 10, 50.0, seconds, 0.0, 100) for seed, seconds in enumerate((5.0, 6.0, 90.0))]
    (record,) = equal_time.summarise({"minutes": 6}, rows, {"sf": 0.5}, {})
    assert (record["minutes"], record["seconds"]) == (6, 6.0)
    plan = {"minutes": 4, "front": {"targets": [0.3, 0.5, 0.8], "training": 0.25}}
    names = (f"{FRONT} 0.3", f"{FRONT} 0.8", f"{FRONT} 0.3: its network{SCRATCH}", f"by hand{TWICE}")
    assert [equal_time.minutes_of(plan, name) for name in names] == [6, 4, 4, 8]


def test_a_sandwich_has_the_largest_and_the_smallest_network() -> None:
    estimator, space = UniformPath(3, ("s", "k", "f", "i")), ("s", "k", "f", "i")
    with tried_search.sandwich():
        steps = [
            estimator.sample_several(4, torch.zeros(3, 4), 1.0, torch.Generator().manual_seed(seed))
            for seed in range(9)
        ]
    strings = [["".join(space[gate.chosen] for gate in path) for path in paths] for paths in steps]
    assert all({"sss", "kkk"} <= set(each) for each in strings)
    assert len({each.index("sss") for each in strings}) > 1, "not always on the same part of the text"


def test_distillation_in_place_teaches_all_networks_but_the_largest() -> None:
    """Compare gradients with those of the losses written out: of the text, then of the teacher's distribution."""
    supernet = make_supernet(2, ("s", "k", "i")).train()
    estimator, rows = UniformPath(2, ("s", "k", "i")), random_ids(4, 7)
    batch = Batch(rows[:, :-1].numpy(), rows[:, 1:].numpy(), starts_epoch=True)
    with tried_search.distilled_in_place():
        paths = estimator.sample_several(4, supernet.alpha(), 1.0, torch.Generator().manual_seed(0))
        accumulator = GradientAccumulator(supernet, supernet.weights().values(), Device(torch.device("cpu"), "fp32"), 1)
        accumulator.backward(batch, None, paths)
    gradients = {name: weight.grad for name, weight in supernet.weights().items()}
    supernet.zero_grad()
    total, teacher = torch.zeros(()), [[gate.chosen for gate in path] for path in paths].index([0, 0])
    for row, path in enumerate(paths):
        chosen, largest = (
            supernet.head.log_probs(supernet(rows[row : row + 1, :-1], None, each).hidden[0])
            for each in (path, paths[teacher])
        )
        if row == teacher:
            total = total - chosen.gather(1, rows[row, 1:, None]).mean()
        else:
            total = total - (largest.detach().exp() * chosen).sum(dim=1).mean()
    (total / 4).backward()
    for name, weight in supernet.weights().items():
        torch.testing.assert_close(gradients[name], weight.grad, msg=name)


def profile_of_known_times(searches: Iterable[str]) -> dict[str, object]:
    """Return what a profile of a machine with steady times holds; the test must not depend on how busy this one is."""
    cost = {"s": 5.0, "k": 1.0, "f": 1.0, "i": 0.0, "r": 1.5, "g": 1.5, "s:window=64": 2.5}
    layers = {name: {"median_ms": ms, "p10_ms": ms, "p90_ms": ms} for name, ms in cost.items()}
    mode = {"fixed": {"median_ms": 3.0, "p10_ms": 3.0, "p90_ms": 3.0}, "layers": layers}
    steps = {name: {"step": 6.0, "rerank": 30.0} for name in searches}
    return {"inference": mode, "training": mode, "trainer_ms": 1.0, "searches": steps}


@pytest.mark.slow
def test_all_stages_run_in_the_tiny_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_time, "PROBE", 16)
    monkeypatch.setitem(equal_time.TINY, "minutes", 0.01)
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(make_corpus(tmp_path / "text"))]
    equal_time.main([*common, "--profile"])
    profile = tmp_path / "equal_time_profile.json"
    measured = read_json(profile)
    assert measured["searches"].keys() == {each["name"] for each in equal_time.TINY["one_runs"]}
    write_json(profile, measured | profile_of_known_times(measured["searches"]))
    for _ in range(2):
        equal_time.main(common)
    rows = read_rows(tmp_path / "equal_time.csv", Row)
    of = {row.name: row for row in rows}
    assert of["interleaved"].steps == 60, "600 ms by 10 ms"
    assert 0 < of[ONE_RUN].search_seconds < of[ONE_RUN].seconds
    assert of[ONE_RUN].test > 0
    assert of[ONE_RUN].test != of[ONE_RUN].ppl
    assert len([name for name in of if name.startswith(FRONT)]) == 3, "with attention, four blocks cost above 0.4"
    assert equal_time.list_jobs(read_plan("equal_time") | equal_time.TINY, rows) == []
    assert {"distilled", "successive halving"} < of.keys()
    assert of["distilled"].ppl != of[ONE_RUN].ppl, "the teacher changes the gradients"
    equal_time.main([*common, "--latency"])
    table = tmp_path / "equal_time.csv"
    table.write_text(table.read_text("utf-8").replace(f",{rows[0].precision}\n", ",of another machine\n"), "utf-8")
    equal_time.main([*common, "--report"])
    result = read_json(tmp_path / "equal_time-cpu.json")
    assert result["precisions"] == ["of another machine"]
    found = {each["name"]: each for each in result["networks"]}
    assert found.keys() > {name for name in of if SCRATCH not in name}
    assert of[f"interleaved{TWICE}"].steps == 2 * of["interleaved"].steps
    assert all("to_scratch" in found[row.name] for row in rows if row.search_steps)
