"""The front: networks within several cost targets, from one search."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import small_config
from helpers.command_helpers import refusal, run_command
from helpers.training_helpers import Notes

import parnas.nas.front as front_module
from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.figures.report.charts import front_chart
from parnas.figures.report.data import read_report_data
from parnas.nas.derive import Constraints, derive
from parnas.nas.front import derive_front, read_targets
from parnas.nas.rerank import NetworkLosses
from parnas.nas.search import search
from parnas.runs.run import Run, read_derivation
from parnas.training.progress import Silent

TARGETS = (0.4, 0.7, 1.0)


@pytest.fixture(scope="module")
def searched_hybrid(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    changes = {"search__space": ["s", "k", "f", "i"], "search__blocks": 4, "search__rerank_top_k": 4}
    config = small_config(
        corpus, **changes, search__cost__target=TARGETS[1]
    )  # for which the search has ranked networks
    return search(config, tmp_path_factory.mktemp("front") / "search", Silent())


def test_each_network_keeps_to_its_target_and_more_cost_is_never_worse(searched_hybrid: Run) -> None:
    rows = derive_front(searched_hybrid, TARGETS).to_rows()
    assert [row["target"] for row in rows] == list(TARGETS)
    assert all(row["cost"] <= row["target"] for row in rows)
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)


def test_the_lowest_target_derives_what_derive_does(searched_hybrid: Run) -> None:
    (first, *_) = derive_front(searched_hybrid, TARGETS).derivations
    alone = derive(searched_hybrid, Constraints(cost_target=TARGETS[0]))
    assert (first.architecture, first.ranking) == (alone.architecture, alone.ranking)


def test_without_re_ranking_each_network_is_the_most_probable_within_its_target(searched_hybrid: Run) -> None:
    by_pi = Constraints(rerank_top_k=0)
    for each in derive_front(searched_hybrid, TARGETS, by_pi).derivations:
        expected = derive(searched_hybrid, Constraints(cost_target=each.target, rerank_top_k=0))
        assert each.architecture == expected.architecture


def test_the_command_writes_a_table_a_picture_and_an_architecture_for_each_target(
    searched_hybrid: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("derive", searched_hybrid.folder, "--front", "0.4,1", "--out", tmp_path) == 0
    shown = capsys.readouterr().out
    front = json.loads((tmp_path / "front" / "front.json").read_text())
    assert front["metric"] == "macs"
    assert [row["target"] for row in front["networks"]] == [0.4, 1.0]
    for row in front["networks"]:
        assert read_derivation(tmp_path / "front" / f"{row['target']:g}" / "arch.yaml").arch == row["arch"]
        assert row["arch"] in shown
        assert len(Architecture.parse(row["arch"])) == 4
    assert (tmp_path / "front" / "front.png").is_file()
    assert run_command("derive", searched_hybrid.folder, "--front", "0.7,1", "--out", tmp_path) == 0
    assert sorted(path.name for path in (tmp_path / "front").iterdir() if path.is_dir()) == ["0.7", "1"]


def test_a_number_of_targets_divides_the_range_up_to_one() -> None:
    assert read_targets("4") == (0.25, 0.5, 0.75, 1.0)
    assert read_targets("1") == (1.0,)
    assert read_targets("0.8, 0.3,0.3") == (0.3, 0.8)
    assert read_targets("0.5") == (0.5,)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "1000000000", "-1", "0.3,-1", "nan", "inf", "1.5,inf", "0.5,0.50000001"]
)
def test_targets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ParnasError, match=r"targets of the front \(--front\)"):
        read_targets(text)


def test_targets_below_every_network_are_left_out_or_refused(
    searched_hybrid: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "set the cost target" in refusal(capsys, "derive", searched_hybrid.folder, "--front", "0.001,0.002")
    notes = Notes()
    front = derive_front(searched_hybrid, [0.001, 1.0], reporter=notes)
    assert [each.target for each in front.derivations] == [1.0]
    assert any("no network within 0.001" in note for note in notes.notes)


def test_a_report_draws_the_front_of_a_search(searched_hybrid: Run) -> None:
    front = derive_front(searched_hybrid, TARGETS)
    front.write(searched_hybrid, searched_hybrid.folder)
    (read,) = read_report_data([searched_hybrid.folder]).fronts
    assert [point.name for point in read.points] == [row["arch"] for row in front.to_rows()]
    assert [point.ppl for point in read.points] == [pytest.approx(math.exp(row["loss"])) for row in front.to_rows()]
    assert read.perplexity == "perplexity with the shared weights"


def test_a_report_says_why_a_front_without_losses_has_no_picture(searched_hybrid: Run, tmp_path: Path) -> None:
    front = derive_front(searched_hybrid, TARGETS, Constraints(rerank_top_k=0))
    copy = Run(shutil.copytree(searched_hybrid.folder, tmp_path / "run"))
    front.write(copy, copy.folder)
    (read,) = read_report_data([copy.folder]).fronts
    chart = front_chart(read, "front")
    assert chart.notes == ["Its networks were not re-ranked, so their losses were not measured."]


@pytest.mark.parametrize("targets", [[], [math.nan], [0.0], [0.5, math.inf]])
def test_targets_from_python_are_checked_too(searched_hybrid: Run, targets: list[float]) -> None:
    with pytest.raises(ParnasError, match=r"targets of the front \(--front\)"):
        derive_front(searched_hybrid, targets)


def test_targets_of_another_option_are_refused(searched_hybrid: Run, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("derive", searched_hybrid.folder, "--front", "0.5,1")
    assert "has targets of its own" in refusal(capsys, *command, "--cost-target", "0.5")
    assert "exclude each other" in refusal(capsys, *command, "--within", "macs=0.5,cache=0.5")


def test_networks_of_lower_targets_help_only_where_they_are_within_the_constraints(
    searched_hybrid: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search whose networks must spend their target: that of a lower target costs too little for a higher one."""
    config = searched_hybrid.config().replace(search__cost__spend=0.9)
    monkeypatch.setattr(Run, "config", lambda _: config)
    front = derive_front(searched_hybrid, [0.5, 1.0])
    assert [each.costs.share(each.architecture) > 0.9 * each.target for each in front.derivations] == [True, True]
    assert "within 1 of the interleaved network's" in front.derivations[-1].method
    assert "with at least 0.9 of the interleaved network's" in front.derivations[-1].method


def test_each_network_is_evaluated_once_and_the_weights_are_loaded_once(
    searched_hybrid: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, evaluated = [], []
    original = front_module.losses_of_run

    def counting(run: Run, reporter: Any) -> NetworkLosses:
        loads.append(run)
        losses = original(run, reporter)

        def short(architecture: Architecture) -> float:
            evaluated.append(str(architecture))
            return losses.short(architecture)

        return NetworkLosses(short, losses.full)

    monkeypatch.setattr(front_module, "losses_of_run", counting)
    derive_front(searched_hybrid, TARGETS)
    assert len(loads) == 1
    assert len(evaluated) == len(set(evaluated)) > 4
