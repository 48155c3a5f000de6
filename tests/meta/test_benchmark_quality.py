"""The benchmark of the time to a quality runs the real commands, and says what it must."""

import json
from pathlib import Path
from types import ModuleType

import collapse
import demo
import demo_seeds
import estimators
import harness
import pytest
import softmax
import time_to_quality as benchmark

from parnas.config.loader import load_config
from parnas.config.schema import SearchConfig
from parnas.errors import ParnasError
from parnas.runs.run import Run


@pytest.mark.slow
def test_the_tiny_benchmark_runs_all_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "time_to_quality-cpu.json").read_text())
    (repetition,) = result["repetitions"]
    for name in ("search", "retrain"):
        phase = repetition[name]
        assert [each["step"] for each in phase["validations"]] == [4, 8]
        assert phase["reached"] == phase["validations"][0]
        assert phase["end"] == phase["validations"][-1]
        assert 0 < phase["data_seconds"] <= phase["first_line_seconds"] <= phase["reached"]["seconds"]
        assert phase["reached"]["seconds"] <= phase["end"]["seconds"] <= phase["command_seconds"]
    search = repetition["search"]
    assert search["derived"] == repetition["retrain"]["arch"]
    assert search["tau_reached_end"]
    assert search["alpha_span"] == (4 - 2) / 8
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tiny_benchmark_times_a_pipeline_in_one_run(tmp_path: Path) -> None:
    benchmark.main(["--one-run", "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "time_to_quality_one_run-cpu.json").read_text())
    (found,) = result["repetitions"]
    assert found["command_seconds"] > found["search_seconds"] + found["training_seconds"] > 0
    assert found["bits_per_byte"] > 0


def test_a_corpus_that_would_be_downloaded_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path))
    with pytest.raises(ParnasError, match="PARNAS_DATA=DIR"):
        benchmark.main(["--device", "cpu"])
    (tmp_path / "wikitext-2").mkdir()
    benchmark.require_corpus(load_config(harness.PAR_CONFIG))


def test_a_command_is_ended_at_its_limit(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    line = '{"step": 1, "split": "valid", "bits_per_byte": 1.0}'
    code = "import sys, time, pathlib; path = pathlib.Path(sys.argv[2]); path.mkdir(); (path / 'metrics.jsonl')"
    code += f".write_text({line!r}); time.sleep(60)"
    phase = benchmark.time_phase(["-c", code], run, tmp_path, 1.0, limit=3.0)
    assert not phase["ended"]
    assert phase["reached"]["step"] == phase["end"]["step"] == 1


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match="no such thing"):
        benchmark.time_phase(["-c", "raise SystemExit('no such thing')"], Run(tmp_path / "run"), tmp_path, 1.0)


@pytest.mark.parametrize(
    "changes, counts",
    [
        ({}, True),
        ({"search__estimator": "gdas"}, False),
        ({"search__alpha_start_step": 2}, False),
        ({"search__alpha_start_step": 1}, True),
        ({"search__tau_end": 0.2}, False),
        ({"search__steps": 21}, False),
    ],
)
def test_which_searches_count(tmp_path: Path, changes: dict[str, object], counts: bool) -> None:
    base = {"search__estimator": SearchConfig().estimator, "search__steps": 20, "search__alpha_start_step": 1}
    config = load_config(harness.PAR_CONFIG).replace(**{**base, "search__warmup_steps": 1, **changes})
    run = Run(tmp_path / "run")
    run.create("search", config, {})
    run.append("pi.jsonl", {"step": 20, "tau": 0.02, "pi": []})
    assert benchmark.describe_search(run)["counts"] is counts


@pytest.mark.parametrize(
    "seconds, counts, met",
    [(239.0, True, True), (241.0, True, False), (239.0, False, False), (None, True, False)],
)
def test_a_search_is_in_time_only_where_it_counts(seconds: float | None, counts: bool, met: bool) -> None:
    reached = None if seconds is None else {"seconds": seconds}
    repetition = {"search": {"reached": reached, "counts": counts}, "retrain": {"reached": {"seconds": 1.0}}}
    assert benchmark.judge(repetition) == {"search": met, "retrain": True}


def test_estimators_are_compared_after_the_same_time(tmp_path: Path) -> None:
    estimators.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    records = json.loads((tmp_path / "estimators-cpu.json").read_text())["records"]
    assert [record["estimator"] for record in records] == list(estimators.ESTIMATORS)
    assert all(0 < record["argmax"] < 20 and len(record["arch"]) == 2 for record in records)


def test_countermeasures_are_compared_one_by_one(tmp_path: Path) -> None:
    collapse.main(["--tiny", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)])
    records = json.loads((tmp_path / "collapse-cpu.json").read_text())["records"]
    written = (tmp_path / "collapse.csv").read_text()
    collapse.main(["--tiny", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert (tmp_path / "collapse.csv").read_text() == written, "nothing was missing"
    cases = collapse.countermeasures(8)
    assert [record["against"] for record in records] == [*cases, *cases, "nothing"]
    assert records[-1]["estimator"] == "uniform"
    share = {(r["estimator"], r["against"]): r["identity share"] for r in records}
    assert share["gdas", "space: [s, f]"] == 0
    assert 0 < share["gdas", "nothing"] < 1
    assert all(len(changes) <= 2 for changes in cases.values()), "one countermeasure at a time"


@pytest.mark.parametrize("benchmark", [demo_seeds, softmax], ids=["demo_seeds", "softmax"])
def test_trainings_are_rows_that_a_later_start_does_not_repeat(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = benchmark.__name__
    arguments = ["--tiny", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]
    benchmark.main(arguments)
    written = (tmp_path / f"{name}.csv").read_text()
    benchmark.main([*arguments, "--report"])
    assert (tmp_path / f"{name}.csv").read_text() == written, "nothing was missing"
    records = json.loads((tmp_path / f"{name}-cpu.json").read_text())["records"]
    assert [record["seeds"] for record in records] == [1] * len(records)
    assert len(records) == written.count("\n") - 1 == {"demo_seeds": 2, "softmax": len(softmax.SOFTMAXES)}[name]
    assert "interleaved" in capsys.readouterr().out


def test_a_demo_is_better_if_the_derived_network_is_better_and_faster() -> None:
    row = demo.Row(1, "kk", 50.0, 1.0, 51.0, 2.0, 60.0)
    assert row.better
    assert not row._replace(ppl=51.0).better
    assert not row._replace(latency=2.0).better
    assert demo.describe([row, row._replace(ppl=52.0, seconds=70.0)])["better"] == 1


@pytest.mark.slow
def test_the_demo_runs_from_a_seed_and_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        demo.main(["--tiny", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert (tmp_path / "demo.csv").read_text().count("\n") == 2
    result = json.loads((tmp_path / "demo-cpu.json").read_text())
    assert result["seeds"] == 1
    assert result["seconds"] == result["most_seconds"] > 0
    assert f"better in {result['better']} of 1 seeds" in capsys.readouterr().out
