"""The GPU round runs on the CPU, tiny, and no part takes another with it."""

import json

import gpu_round
import pytest
import time_to_quality

from parnas.errors import ParnasError


def run_tiny(folder, *parts):
    """The parts of the result."""
    gpu_round.main(["--tiny", "--device", "cpu", "--out", str(folder), "--parts", *parts])
    return json.loads((folder / "gpu_round-cpu.json").read_text())["parts"]


def test_a_round_compares_operations_and_times_steps(tmp_path):
    parts = run_tiny(tmp_path, "operations", "training", "search-steps")
    assert not any("error" in found for found in parts.values())
    for precision in gpu_round.TOLERANCE:
        assert parts["operations"][precision]["agree"]
    trained = parts["training"]["tiny"]
    assert len(trained["seconds"]) == gpu_round.ROUNDS["tiny"]
    assert 0 < trained["share_of_rate"] < 1
    assert set(parts["search-steps"]) == {"dropout 0.1", "dropout 0.0", "wall_seconds"}


def test_compiled_steps_are_timed_after_a_warm_up(tmp_path):
    parts = run_tiny(tmp_path, "training-compiled")
    assert "error" not in parts["training-compiled"]
    assert len(parts["training-compiled"]["warm_up"]["seconds"]) == gpu_round.COMPILE_WARM_UP


def test_quality_starts_to_count_when_the_text_is_ready(monkeypatch):
    """With given times of the commands, which test_benchmark_quality.py runs."""
    phase = {"reached": {"seconds": 30.0}, "data_seconds": 4.0}
    retrained = []
    monkeypatch.setattr(time_to_quality, "search", lambda *_: {**phase, "derived": "sf"})
    monkeypatch.setattr(time_to_quality, "retrain", lambda *given: retrained.append(given[2]) or phase)
    parts = {}
    for name in ("quality", "quality-compiled"):
        parts[name] = dict(gpu_round.PARTS[name].work(gpu_round.Task("tiny", "cpu", parts)))
    assert set(parts["quality"]) == {"search", "retrain"}
    assert retrained == ["sf", "sf"]
    for found in (parts["quality"]["search"], parts["quality"]["retrain"], parts["quality-compiled"]["retrain"]):
        assert found["training_seconds_to_target"] == 26.0
        assert found["goal_met"]


def test_a_part_that_fails_is_told_and_the_next_one_runs(tmp_path, capsys):
    parts = run_tiny(tmp_path, "quality-compiled", "operations")
    assert "No architecture was derived" in parts["quality-compiled"]["error"]
    assert "Traceback" in parts["quality-compiled"]["error"]
    assert parts["operations"]["fp32"]["agree"]
    assert "No architecture was derived" in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_ended_and_keeps_what_it_found():
    told = {}
    gpu_round.run_part("search-steps", gpu_round.Task("tiny", "cpu", {}), 0.05, told.__setitem__)
    assert told["error"] == "ended after its 0 seconds"


def test_time_runs_out_for_all_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_round, "TOTAL", 0.0)
    assert run_tiny(tmp_path, "operations") == {"operations": {"error": "no time was left"}}


def test_without_a_gpu_there_is_no_round():
    with pytest.raises(ParnasError, match="no GPU"):
        gpu_round.main(["--device", "cpu"])
