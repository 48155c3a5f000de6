"""The benchmark of compression: its plan, its order of trainings, its tables, and its stages in the tiny form."""

from pathlib import Path

import compress
import goals
import pytest
from compress import Job, Row, Score
from conftest import make_corpus
from trainings import read_rows

from parnas.config.yaml_file import read_yaml
from parnas.runs.files import read_json
from parnas.runs.resolve import read_config
from parnas.runs.run import Run

SHARE_OF_ALL = {"stack": 1.0, "whole": 1.0}


def row(name: str, seed: int, ppl: float, total: float = 100.0, arch: str = "sf") -> Row:
    return Row(name, seed, arch, 1000, ppl, total - 1, total, ppl * 0.9)


def test_the_plan_is_of_words_with_three_seeds_and_two_targets() -> None:
    settings = read_yaml(Path(compress.__file__).with_suffix(".yaml").read_text(encoding="utf-8"), "plan")
    plan = settings.pop("compress")
    config = read_config(settings, [])
    assert config.data.tokenizer.kind == "word"
    assert len(plan["seeds"]) >= 3
    assert plan["targets"] == (0.65, 0.5)
    assert plan["children"]["networks"] == 60
    assert len(plan["children"]["seeds"]) == 2


def test_trainings_begin_after_those_that_they_start_from() -> None:
    plan = {"seeds": [1, 2], "targets": [0.5], "from_scratch": 0.5, "children": {"networks": 2, "seeds": [1, 2]}}
    assert compress.list_jobs(plan, [], children=False) == [
        Job("parent", 1), Job("parent", 2), Job("parent, twice the steps", 1)
    ]  # fmt: skip
    rows = [row("parent", 1, 50.0), row("search", 1, 90.0)]
    assert compress.list_jobs(plan, rows, children=False)[:2] == [Job("child 0.5", 1), Job("parent", 2)]
    children = compress.list_jobs(plan, rows, children=True)
    assert [job.name for job in children] == ["SuperNet search", "random 0/1", "random 1/1", "random 0/2", "random 1/2"]
    rows.append(row("child 0.5", 1, 51.0))
    left = [job.name for job in compress.list_jobs(plan, rows, children=False) if job.seed == 1]
    assert left == ["scratch 0.5", "shallower 0.5", "short 0.5", "short-taught 0.5", "parent, twice the steps"]
    rows += [row(name, seed, 52.0) for seed in (1, 2) for name in ("parent", "search", "child 0.5", "scratch 0.5")]
    taught = [job for job in compress.list_jobs(plan, rows, children=False) if job.name == "taught 0.5"]
    assert taught == [Job("taught 0.5", 1)], "of the first seed alone"


def test_tables_compare_the_child_by_seed_and_give_times_relative_to_the_parent() -> None:
    plan = {
        "seeds": [1, 2],
        "targets": [0.5],
        "from_scratch": 0.5,
        "children": {"networks": 3, "steps": 5, "seeds": [1, 2]},
    }
    rows = [row("parent", seed, 50.0 * seed, 200.0) for seed in (1, 2)]
    rows += [row("child 0.5", seed, 51.0 * seed, 20.0, "ff") for seed in (1, 2)]
    rows.append(row("search", 1, 90.0, 20.0))
    records, comparisons = compress.summarise(plan, rows, {"sf": SHARE_OF_ALL, "ff": {"stack": 0.4, "whole": 0.7}}, {})
    assert records[1]["total"] == pytest.approx(0.1)
    # A half of the recorded time of the child's training.
    steps = {"1": {"parent": 0.199, "child 0.5": 0.0095, "search": 0.019, "scores": 2.0}}
    timed, _ = compress.summarise(plan, rows, {}, steps)
    assert timed[1]["total"] == pytest.approx((0.05 + 0.1) / 2)
    assert timed[2]["scores"] == pytest.approx(0.01)
    assert "scores" not in records[2]
    assert (records[1]["latency"], records[1]["whole"]) == (0.4, 0.7)
    (_, predicted, _), _ = compress.summarise(plan, rows, {"ff": {"stack": 0.4}}, {})
    assert compress.format_record(predicted)["latency of the layers"] == "0.40 (predicted)"
    assert compress.format_record(predicted)["whole network"] == "–"
    (difference,) = comparisons
    assert (difference["network"], difference["relative_to"]) == ("child 0.5", "parent")
    assert difference["percent"] == difference["test"]["percent"] == pytest.approx(2.0)
    assert records[0]["test"] == pytest.approx(0.9 * 75)


def test_the_parent_of_the_first_seed_teaches_networks_of_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = read_yaml(Path(compress.__file__).with_suffix(".yaml").read_text(encoding="utf-8"), "plan")
    plan = settings.pop("compress")
    monkeypatch.setattr(compress.Bench, "existing", lambda bench, name: Run(bench.folder / name))
    bench = compress.seed_bench(read_config(settings, []), plan, tmp_path, [], 2)
    taught = bench.settings(Row("taught 0.5", 2, "sf", 1000))
    assert (taught.train.teachers, taught.runtime.seed) == ((str(tmp_path / "seed-1" / "parent"),), 2)
    assert bench.settings(Row("short-taught 0.5", 2, "sf", 200)).train.teachers == taught.train.teachers
    for name in ("scratch 0.5", "short 0.5"):
        assert not bench.settings(Row(name, 2, "sf", 1000)).train.teachers


def test_scores_are_ranked_against_each_seed_and_against_the_tau_of_two_seeds() -> None:
    plan = {"children": {"networks": 3, "steps": 5, "seeds": [1, 2]}}
    archs = ["s", "f", "i"]
    ppl = {1: (10.0, 20.0, 30.0), 2: (10.0, 30.0, 20.0)}
    rows = [
        row(f"random {number}/{seed}", 1, values[number], arch=archs[number])
        for seed, values in ppl.items()
        for number in range(3)
    ]
    scores = [Score("search", arch, -number, number) for number, arch in enumerate(archs)]
    assert compress.rank_children(plan, rows[:-1], scores, 2.0) == {}
    ranking = compress.rank_children(plan, rows, scores, 2.0)
    assert ranking["reliability"] == pytest.approx(1 / 3)
    taus = {record["score"]: record["tau"] for record in ranking["scores"]}
    assert taus == pytest.approx({"pi": 2 / 3, "inherited": -2 / 3, "both": 2 / 3})


def test_what_a_search_does_after_its_last_step_is_no_time_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 4.0, 6.0, 50.0])  # the last step ends with the scores
    monkeypatch.setattr(compress.time, "process_time", lambda: next(times))
    clock = compress.Clock()
    for step in range(5):
        clock.advance(step)
    assert clock.seconds == 50.0
    assert clock.of_steps() == pytest.approx(8.0)


@pytest.mark.slow
def test_all_stages_run_in_the_tiny_form(tmp_path: Path) -> None:
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(make_corpus(tmp_path / "text"))]
    training = [*common, "--runs", str(tmp_path / "runs"), "--workers", "1"]
    compress.main([*common, "--profile"])
    compress.main(training)
    names = {each.name for each in read_rows(tmp_path / "compress.csv", Row)}
    assert {"parent", "search", "child 0.8", "scratch 0.8", "shallower 0.8", "taught 0.8"} < names
    steps = {each.name: each.steps for each in read_rows(tmp_path / "compress.csv", Row)}
    assert steps["short 0.8"] == steps["short-taught 0.8"] == steps["child 0.8"] < steps["taught 0.8"]
    compress.main([*training, "--children"])
    compress.main([*training, "--times"])
    compress.main([*common, "--latency"])
    compress.main([*common, "--report"])
    result = read_json(tmp_path / "compress-cpu.json")
    assert result["ranking"]["networks"] == 3
    assert [each["network"] for each in result["comparisons"]][1:] == [
        *["child 0.8"] * 4, "taught 0.8", "short-taught 0.8"
    ]  # fmt: skip
    assert all(record["total"] > 0 for record in result["networks"])
    assert all(record["test"] > 0 for record in result["networks"] if "ppl" in record)
    assert all(record["test_by_seed"].keys() == {"1"} for record in result["networks"] if "ppl" in record)
    assert any("local distillation" in goal.goal for goal in goals.judge_compression(result))
