"""The settings of dynamic evaluation and of the cache are chosen on the validation split, and read from there."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_helpers import refusal, run_command
from training_helpers import Notes

from parnas.data.streams import TokenStreams
from parnas.errors import ParnasError
from parnas.evaluation.adapt import Grid, adapt
from parnas.evaluation.comparison import compare
from parnas.evaluation.entries import Conditions
from parnas.run import Run
from parnas.training.phases import MAY_CHANGE, refuse_changes
from parnas.training.reporter import Silent

SMALL = Grid(lr=(1e-4, 1e-2), decay=(0.0, 0.1), theta=(0.0, 1.0), weight=(0.05, 0.5), tokens=None)
SGD = {"evaluation.dynamic.lr": 1e-3, "evaluation.dynamic.update": "sgd"}
FEW_BATCHES = {"evaluation.dynamic.batches": 2}
CACHE_ALONE = Conditions(changes={"evaluation.cache.size": 40})
FEW = Conditions(changes={**FEW_BATCHES, "evaluation.cache.size": 40})


def test_the_best_of_each_way_is_what_evaluate_then_measures(trained: Run) -> None:
    adaptation = adapt(trained, SMALL, FEW, Silent())
    adaptation.write()
    tried = [trial.way.name for trial in adaptation.trials]
    assert {name: tried.count(name) for name in tried} == {"cache": 4, "dynamic": 4, "dynamic + cache": 4}
    table = compare([trained.folder], Conditions(adapted=True), Silent()).table.set_index("evaluation")
    assert list(table.index) == ["plain", "cache", "dynamic", "dynamic + cache"]
    for name, trial in adaptation.chosen.items():
        assert trial.loss == min(each.loss for each in adaptation.trials if each.way.name == name)
        assert table.loc[name, "ppl"] == pytest.approx(math.exp(trial.loss), rel=1e-6)
        assert table.loc[name, "settings"] == trial.way.settings
    assert table.loc["plain", "ppl"] == pytest.approx(math.exp(adaptation.plain.loss), rel=1e-6)


def test_ways_that_are_not_asked_for_stay_if_they_were_measured_alike(trained: Run) -> None:
    adapt(trained, SMALL, FEW, Silent()).write()
    before = trained.adapted()
    again = adapt(trained, dataclasses.replace(SMALL, ways=("cache",), theta=(0.5,)), CACHE_ALONE, Silent())
    again.write()
    now = trained.adapted()
    assert now["chosen"].keys() == {"dynamic", "cache"}, "of both together the cache was another one"
    assert now["chosen"]["dynamic"] == before["chosen"]["dynamic"]
    assert now["chosen"]["cache"]["loss"] == again.chosen["cache"].loss
    assert [each["evaluation"] for each in now["trials"]].count("cache") == 2
    adapt(trained, dataclasses.replace(SMALL, ways=("cache",), tokens=100), CACHE_ALONE, Silent()).write()
    assert trained.adapted()["chosen"].keys() == {"cache"}, "other tokens do not compare"


def test_no_other_split_than_validation_and_training_is_read(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = TokenStreams.tokens

    def spy(self: TokenStreams, split: str) -> object:
        asked.append(split)
        return original(self, split)

    monkeypatch.setattr(TokenStreams, "tokens", spy)
    grid = Grid(lr=(1e-3,), decay=(0.0,), theta=(0.1,), weight=(0.1,), tokens=100)
    adapt(trained, grid, Conditions("test", changes=FEW.changes), Silent())
    assert set(asked) == {"train", "valid"}


def test_a_learning_rate_that_diverges_is_not_chosen(trained: Run) -> None:
    grid = Grid(lr=(1e-4, 1e6), decay=(0.0,), ways=("dynamic",), tokens=200)
    adaptation = adapt(trained, grid, Conditions(changes=FEW_BATCHES), Silent())
    assert adaptation.chosen["dynamic"].way.dynamic.lr == 1e-4
    assert any("the best lr, 0.0001, is at the edge" in note for note in adaptation.notes)


def test_where_all_learning_rates_diverge_none_is_chosen(trained: Run) -> None:
    grid = Grid(lr=(1e6,), decay=(0.0,), theta=(0.1,), weight=(0.1,), tokens=200)
    with pytest.raises(ParnasError, match="give lower learning rates"):
        adapt(trained, grid, FEW, Silent())


@pytest.mark.parametrize(("name", "key"), [("lr", "dynamic.lr"), ("decay", "dynamic.decay"), ("theta", "cache.theta")])
def test_a_setting_that_adapt_looks_for_is_refused_with_its_option(name: str, key: str, trained: Run) -> None:
    with pytest.raises(ParnasError, match=f"evaluation.{key} is what adapt looks for; .*--{name}"):
        adapt(trained, SMALL, Conditions(changes={f"evaluation.{key}": 0.1}), Silent())


@pytest.mark.parametrize(
    ("changes", "ways", "message"),
    [
        ({"evaluation.dynamic": {"lr": 0.1}}, ("dynamic",), r"dynamic\.lr is what adapt looks for"),
        ({"evaluation.dynamic": {"update": "sgd"}}, ("cache",), r"dynamic\.update has no effect on what is asked for"),
        ({"evaluation.dynamic": {"update": "sgd", "epsilon": 0.5}}, ("dynamic",), "no effect on .*update=sgd"),
    ],
)
def test_a_section_of_settings_is_looked_at_like_its_parts(
    changes: dict[str, Any], ways: tuple[str, ...], message: str, trained: Run
) -> None:
    with pytest.raises(ParnasError, match=message):
        adapt(trained, dataclasses.replace(SMALL, ways=ways), Conditions(changes=changes), Silent())


def test_a_cache_without_a_finite_loss_is_not_chosen(trained: Run) -> None:
    grid = Grid(theta=(1e38,), weight=(0.1,), ways=("cache",), tokens=100)
    with pytest.raises(ParnasError, match="give lower sharpnesses"):
        adapt(trained, grid, Conditions(), Silent())


def test_settings_of_evaluate_that_nothing_reads_are_refused(trained: Run) -> None:
    for changes, adapted, message in (
        ({"evaluation.dynamic.decay": 0.1}, False, r"dynamic\.decay has no effect without evaluation\.dynamic\.lr"),
        ({**SGD, "evaluation.dynamic.epsilon": 2.0}, False, r"no effect on evaluation\.dynamic\.update=sgd"),
        ({"evaluation.stride": 3}, False, "stride is 3, which does not divide segments of 8"),
        ({"evaluation.cache.theta": 0.1}, False, r"cache\.theta has no effect without evaluation\.cache\.size"),
        ({"evaluation.cache.size": 9}, True, r"cache\.size is not read with adapted"),
    ):
        notes = Notes()
        with pytest.raises(ParnasError, match=message):
            compare([trained.folder], Conditions(changes=changes, adapted=adapted), notes)
        assert notes.notes == [], "nothing is scored before"


def test_what_has_changed_since_is_told(trained: Run) -> None:
    grid = Grid(theta=(0.1,), weight=(0.1,), ways=("cache",), tokens=100)
    adapt(trained, grid, Conditions(), Silent()).write()
    notes = compare([trained.folder], Conditions(adapted=True, mem_len=4), Silent()).notes
    assert any("adapted.json was chosen otherwise (mem_len 8 then, 4 now)" in note for note in notes)


def test_without_adapt_or_with_a_broken_file_the_cure_is_named(trained: Run) -> None:
    with pytest.raises(ParnasError, match=r"has no adapted\.json; parnas adapt .* writes it"):
        compare([trained.folder], Conditions(adapted=True), Silent())
    for content in ({}, {"chosen": {}}, {"chosen": {"cache": {"cache": {"weight": 7}}}}, {"chosen": [1]}):
        (trained.folder / "adapted.json").write_text(json.dumps(content))
        with pytest.raises(ParnasError, match=r"adapted\.json .*give (it|parnas adapt) again"):
            compare([trained.folder], Conditions(adapted=True), Silent())


def test_the_commands(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--lr", "1e-3", "--decay", "0", "--theta", "0.1,0.2", "--weight", "0.1", "--tokens", "200"]
    assert run_command("adapt", trained.folder, "evaluation.dynamic.batches=2", "evaluation.mem_len=8", *few) == 0
    shown = capsys.readouterr().out
    assert "dynamic + cache" in shown
    assert f"next: parnas evaluate {trained.folder} --split test --adapted evaluation.mem_len=8" in shown
    out = tmp_path / "out"
    assert run_command("evaluate", trained.folder, "evaluation.stride=4", "--adapted", "--out", out) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "evaluation bits/byte" in shown
    assert "nan" not in shown
    rows = json.loads((out / "comparison.json").read_text())
    assert [row["evaluation"] for row in rows] == ["plain", "sliding", "cache", "dynamic", "dynamic + cache"]
    page = (out / "report.html").read_text()
    assert "The same by dynamic evaluation with a continuous cache" in page
    assert "evaluation.stride=4" in page
    assert "--adapted" in page


def test_mistakes_of_the_command_line(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained.folder
    assert "--lr is '1,x'" in refusal(capsys, "adapt", folder, "--lr", "1,x")
    assert "lr (--lr) is [inf]" in refusal(capsys, "adapt", folder, "--lr", "inf")
    assert "nothing that adapt could choose" in refusal(capsys, "adapt", folder, "evaluation.stride=2")
    assert "validation split alone" in refusal(capsys, "adapt", folder, "evaluation.split=test")
    assert "--lr has no effect on what --ways asks" in refusal(
        capsys, "adapt", folder, "--ways", "cache", "--lr", "1e-3"
    )
    refused = refusal(capsys, "adapt", folder, "--ways", "cache", "evaluation.dynamic.update=sgd")
    assert "dynamic.update has no effect on what is asked for (--ways cache)" in refused
    refused = refusal(capsys, "evaluate", folder, "--mem-len", "4", "evaluation.mem_len=8")
    assert "mem_len is given as mem_len (--mem-len), too" in refused
    assert "weight (--weight) is [1.0]" in refusal(capsys, "adapt", folder, "--weight", "1")
    assert "give some of dynamic, cache" in refusal(capsys, "adapt", folder, "--ways", "plain")
    assert "One run is adapted at a time" in refusal(capsys, "adapt", folder, folder)
    assert "name one" in refusal(capsys, "adapt", "evaluation.stride=2")
    assert "did you mean evaluation.stride" in refusal(capsys, "evaluate", folder, "evaluation.strude=2")
    assert "only settings of evaluation" in refusal(capsys, "evaluate", folder, "train.lr=2")
    assert "evaluation.stride is 3, which does not divide" in refusal(capsys, "evaluate", folder, "evaluation.stride=3")


def test_a_run_is_gone_on_with_whatever_other_ways_it_is_evaluated_in(trained: Run) -> None:
    changed = trained.config().replace(evaluation__cache__size=5, evaluation__dynamic__lr=1e-3, evaluation__stride=2)
    refuse_changes(trained, changed, MAY_CHANGE)
    with pytest.raises(ParnasError, match=r"model\.d_model(.|\n)*choose another --run"):
        refuse_changes(trained, changed.replace(model__d_model=32), MAY_CHANGE)
    with pytest.raises(ParnasError, match=r"evaluation\.stride: None before, 2 now(.|\n)*give them to parnas evaluate"):
        refuse_changes(trained, changed)
