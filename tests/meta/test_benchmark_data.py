"""The benchmark of the data runs on a tiny generated text, and its result holds what it must."""

import json
from pathlib import Path

import data as benchmark
import pytest

from parnas.errors import ParnasError


def test_the_tiny_benchmark_measures_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "COMMANDS", ("derive",))  # whose --help is timed; one shows that it works
    benchmark.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "data-cpu.json").read_text())
    assert result["text"].startswith("generated")
    assert set(result["encoding"]["candidates"]) == set(benchmark.WORK)
    assert all(len(of["seconds"]) == 1 for of in result["encoding"]["candidates"].values())
    assert result["encoding"]["tokens"] > 10_000
    assert all(result["memory"][state]["peak_MB"] > 10 for state in ("cold", "cached", "cached again"))
    assert set(result["start"]["help"]) == {f"{name} --help" for name in benchmark.COMMANDS}
    assert set(result["start"]["first_step"]) == {
        f"{name}, {state}" for name in ("search", "retrain") for state in ("cold", "cached")
    }
    assert "parnas' speed" in capsys.readouterr().out


def test_wikitext_2_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "wikitext-2").mkdir(parents=True)
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    with pytest.raises(ParnasError, match="does not hold wikitext-2"):
        benchmark.make_corpus(tmp_path / "corpus", benchmark.PLANS["tiny"], generated=False)


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match="no such thing"):
        benchmark.run_whole(["-c", "raise SystemExit('no such thing')"], tmp_path)
    with pytest.raises(ParnasError, match="no such thing"):
        benchmark.first_step(["-c", "raise SystemExit('no such thing')"], tmp_path / "run", tmp_path)
