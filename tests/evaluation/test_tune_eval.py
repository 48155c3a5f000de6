"""Tuning of dynamic evaluation and of the cache on the validation split, and evaluation with the result."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers.command_helpers import refusal, run_command
from helpers.training_helpers import Notes

from parnas.data.streams import TokenStreams
from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.evaluation.tune_eval import Grid, tune_eval
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.session import MAY_CHANGE, refuse_changes

SMALL = Grid(lr=(1e-4, 1e-2), decay=(0.1,), theta=(0.0, 1.0), weight=(0.05, 0.5), tokens=None)
SGD = {"evaluation.dynamic.lr": 1e-3, "evaluation.dynamic.update": "sgd"}
FEW_BATCHES = {"evaluation.dynamic.batches": 2}
CACHE_ALONE = EvalOptions(changes={"evaluation.cache.size": 40})
FEW = EvalOptions(changes={**FEW_BATCHES, "evaluation.cache.size": 40})


def test_evaluate_measures_the_best_of_each_protocol(trained: Run) -> None:
    tuning = tune_eval(trained, SMALL, dataclasses.replace(FEW, tgt_len=32), Silent())
    tried = [trial.evaluation for trial in tuning.trials]
    assert {name: tried.count(name) for name in tried} == {"cache": 4, "dynamic": 2, "dynamic + cache": 4}
    table = compare([trained.folder], EvalOptions(tgt_len=32, tuned=True), Silent()).table.set_index("evaluation")
    assert list(table.index) == ["plain", "cache", "dynamic", "dynamic + cache"]
    for name, trial in tuning.chosen.items():
        assert trial.loss == min(each.loss for each in tuning.trials if each.evaluation == name)
        assert table.loc[name, "ppl"] == pytest.approx(math.exp(trial.loss), rel=1e-6)
        assert table.loc[name, "settings"] == trial.settings
    assert table.loc["plain", "ppl"] == pytest.approx(math.exp(tuning.plain.loss), rel=1e-6)


def test_other_protocols_stay_if_they_were_measured_alike(trained: Run) -> None:
    grid = Grid(lr=(1e-4,), decay=(0.0,), theta=(0.0, 1.0), weight=(0.05, 0.5), tokens=200)
    tune_eval(trained, grid, FEW, Silent())
    before = trained.tuned_eval()
    again = tune_eval(trained, dataclasses.replace(grid, protocols=("cache",), theta=(0.5,)), CACHE_ALONE, Silent())
    now = trained.tuned_eval()
    assert now.chosen.keys() == {"dynamic", "cache"}, "of both together the cache was another one"
    assert now.chosen["dynamic"] == before.chosen["dynamic"]
    assert now.chosen["cache"].loss == again.chosen["cache"].loss
    assert [trial.evaluation for trial in now.trials].count("cache") == 2
    tune_eval(trained, dataclasses.replace(grid, protocols=("cache",), tokens=100), CACHE_ALONE, Silent())
    assert trained.tuned_eval().chosen.keys() == {"cache"}, "other tokens do not compare"


def test_no_other_split_than_validation_and_training_is_read(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = TokenStreams.tokens

    def spy(self: TokenStreams, split: str) -> object:
        asked.append(split)
        return original(self, split)

    monkeypatch.setattr(TokenStreams, "tokens", spy)
    grid = Grid(lr=(1e-3,), decay=(0.0,), theta=(0.1,), weight=(0.1,), tokens=100)
    tune_eval(trained, grid, EvalOptions("test", changes=FEW.changes), Silent())
    assert set(asked) == {"train", "valid"}


def test_a_learning_rate_that_diverges_is_not_chosen(trained: Run) -> None:
    grid = Grid(lr=(1e-4, 1e6), decay=(0.0,), protocols=("dynamic",), tokens=200)
    tuning = tune_eval(trained, grid, EvalOptions(changes=FEW_BATCHES), Silent())
    assert tuning.chosen["dynamic"].dynamic.lr == 1e-4
    assert any("the best lr, 0.0001, is at the edge" in note for note in tuning.notes)


def test_where_all_learning_rates_diverge_none_is_chosen(trained: Run) -> None:
    grid = Grid(lr=(1e6,), decay=(0.0,), theta=(0.1,), weight=(0.1,), tokens=200)
    with pytest.raises(ParnasError, match="--lr"):
        tune_eval(trained, grid, FEW, Silent())


@pytest.mark.parametrize(("name", "key"), [("lr", "dynamic.lr"), ("decay", "dynamic.decay"), ("theta", "cache.theta")])
def test_a_tuned_setting_is_refused_with_its_option(name: str, key: str, trained: Run) -> None:
    with pytest.raises(ParnasError, match=rf"evaluation\.{key} .*--{name}"):
        tune_eval(trained, SMALL, EvalOptions(changes={f"evaluation.{key}": 0.1}), Silent())


@pytest.mark.parametrize(
    ("changes", "protocols", "message"),
    [
        ({"evaluation.dynamic": {"lr": 0.1}}, ("dynamic",), r"evaluation\.dynamic\.lr .*--lr"),
        (
            {"evaluation.dynamic": {"update": "sgd"}},
            ("cache",),
            r"dynamic\.update has no effect with --protocols cache",
        ),
        ({"evaluation.dynamic": {"update": "sgd", "epsilon": 0.5}}, ("dynamic",), "no effect with .*update=sgd"),
    ],
)
def test_a_section_of_settings_is_checked_like_its_parts(
    changes: dict[str, Any], protocols: tuple[str, ...], message: str, trained: Run
) -> None:
    with pytest.raises(ParnasError, match=message):
        tune_eval(trained, dataclasses.replace(SMALL, protocols=protocols), EvalOptions(changes=changes), Silent())


def test_a_cache_without_a_finite_loss_is_not_chosen(trained: Run) -> None:
    grid = Grid(theta=(1e38,), weight=(0.1,), protocols=("cache",), tokens=100)
    with pytest.raises(ParnasError, match="--theta"):
        tune_eval(trained, grid, EvalOptions(), Silent())


def test_settings_of_evaluate_that_nothing_reads_are_refused(trained: Run) -> None:
    for changes, tuned, message in (
        ({"evaluation.dynamic.decay": 0.1}, False, r"dynamic\.decay has no effect without evaluation\.dynamic\.lr"),
        ({**SGD, "evaluation.dynamic.epsilon": 2.0}, False, r"no effect with evaluation\.dynamic\.update=sgd"),
        ({"evaluation.stride": 3}, False, r"stride is 3\D*8"),
        ({"evaluation.cache.theta": 0.1}, False, r"cache\.theta has no effect without evaluation\.cache\.size"),
        ({"evaluation.cache.size": 9}, True, r"cache\.size has no effect with tuned"),
    ):
        notes = Notes()
        with pytest.raises(ParnasError, match=message):
            compare([trained.folder], EvalOptions(changes=changes, tuned=tuned), notes)
        assert notes.notes == [], "nothing is scored before"


def test_changes_since_tuning_are_noted(trained: Run) -> None:
    grid = Grid(theta=(0.1,), weight=(0.1,), protocols=("cache",), tokens=100)
    tune_eval(trained, grid, EvalOptions(), Silent())
    notes = compare([trained.folder], EvalOptions(tuned=True, mem_len=4), Silent()).notes
    assert any("tuned_eval.json" in note and "mem_len 8 then, 4 now" in note for note in notes)


def test_a_missing_or_broken_file_is_refused_with_a_hint(trained: Run) -> None:
    with pytest.raises(ParnasError, match=r"tuned_eval\.json"):
        compare([trained.folder], EvalOptions(tuned=True), Silent())
    for content in ({}, {"chosen": {}}, {"chosen": {"cache": {"cache": {"weight": 7}}}}, {"chosen": [1]}):
        (trained.folder / "tuned_eval.json").write_text(json.dumps(content))
        with pytest.raises(ParnasError, match=r"tuned_eval\.json .*parnas tune-eval"):
            compare([trained.folder], EvalOptions(tuned=True), Silent())


def test_the_command_tunes_and_evaluate_takes_what_it_chose(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--lr", "1e-3", "--decay", "0", "--theta", "0.1,0.2", "--weight", "0.1", "--tokens", "200"]
    assert run_command("tune-eval", trained.folder, "evaluation.dynamic.batches=2", "evaluation.mem_len=8", *few) == 0
    shown = capsys.readouterr().out
    assert "dynamic + cache" in shown
    assert f"next: parnas evaluate {trained.folder} --split test --tuned evaluation.mem_len=8" in shown
    out = tmp_path / "out"
    assert run_command("evaluate", trained.folder, "evaluation.stride=4", "--tuned", "--out", out) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "evaluation bits/byte" in shown
    assert "nan" not in shown
    rows = json.loads((out / "comparison.json").read_text())
    assert [row["evaluation"] for row in rows] == ["plain", "sliding", "cache", "dynamic", "dynamic + cache"]
    page = (out / "report.html").read_text()
    assert "The same networks with dynamic evaluation and a continuous cache" in page
    assert "evaluation.stride=4" in page
    assert "--tuned" in page


def test_mistakes_of_the_command_line(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained.folder
    assert "--lr is '1,x'" in refusal(capsys, "tune-eval", folder, "--lr", "1,x")
    assert "lr (--lr) is [inf]" in refusal(capsys, "tune-eval", folder, "--lr", "inf")
    assert "no settings to tune" in refusal(capsys, "tune-eval", folder, "evaluation.stride=2")
    assert "reads the text as one row" in refusal(capsys, "tune-eval", folder, "evaluation.batch_size=2")
    assert "validation split only" in refusal(capsys, "tune-eval", folder, "evaluation.split=test")
    assert "--lr has no effect with --protocols" in refusal(
        capsys, "tune-eval", folder, "--protocols", "cache", "--lr", "1e-3"
    )
    refused = refusal(capsys, "tune-eval", folder, "--protocols", "cache", "evaluation.dynamic.update=sgd")
    assert "dynamic.update has no effect with --protocols cache" in refused
    refused = refusal(capsys, "evaluate", folder, "--mem-len", "4", "evaluation.mem_len=8")
    assert "mem_len is also given as mem_len (--mem-len)" in refused
    assert "weight (--weight) is [1.0]" in refusal(capsys, "tune-eval", folder, "--weight", "1")
    assert "give some of dynamic, cache" in refusal(capsys, "tune-eval", folder, "--protocols", "plain")
    assert "tune-eval takes one run" in refusal(capsys, "tune-eval", folder, folder)
    assert "name one" in refusal(capsys, "tune-eval", "evaluation.stride=2")
    assert "did you mean evaluation.stride" in refusal(capsys, "evaluate", folder, "evaluation.strude=2")
    assert "train.lr" in refusal(capsys, "evaluate", folder, "train.lr=2")
    assert "evaluation.stride is 3" in refusal(capsys, "evaluate", folder, "evaluation.stride=3")


def test_a_run_may_be_resumed_with_other_evaluation_settings(trained: Run) -> None:
    changed = trained.config().replace(evaluation__cache__size=5, evaluation__dynamic__lr=1e-3, evaluation__stride=2)
    refuse_changes(trained, changed, MAY_CHANGE)
    with pytest.raises(ParnasError, match=r"model\.d_model"):
        refuse_changes(trained, changed.replace(model__d_model=32), MAY_CHANGE)
    with pytest.raises(ParnasError, match=r"evaluation\.stride: None before, 2 now"):
        refuse_changes(trained, changed)
