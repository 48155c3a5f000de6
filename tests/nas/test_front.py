"""The front: networks within several cost targets, from one search."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config
from helpers.command_helpers import refusal, run_command
from helpers.training_helpers import Notes, assert_resumes

import parnas.nas.front as front_module
from parnas.architecture import IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.figures.report.data import read_report_data
from parnas.nas.budget import Budget
from parnas.nas.cost import make_costs
from parnas.nas.derive import Constraints, derive
from parnas.nas.front import derive_front, read_front, read_targets
from parnas.nas.rerank import HeldOutLosses, rank_front
from parnas.nas.search import search
from parnas.runs.run import RERANK, Run, read_derivation
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

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


@pytest.fixture(scope="module")
def searched_front(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished search that trained the networks of a front after alpha was frozen."""
    return search(front_config(corpus), tmp_path_factory.mktemp("front") / "search", Silent())


def front_config(corpus: Path, **changes: Any) -> Config:
    changes = {
        "search__space": ["s", "k", "f", "i"],
        "search__blocks": 4,
        "search__steps": 12,
        "search__alpha_start_step": 2,
        "search__uniform_fraction": 0.5,
        "search__rerank_top_k": 4,
        "search__cost__target": TARGETS[-1],
        "search__front": TARGETS[:-1],
        **changes,
    }
    return small_config(corpus, **changes)


def test_a_search_trains_the_networks_of_its_front_and_derives_the_same_ones(
    searched_front: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The losses that the search has stored suffice.
    monkeypatch.setattr(front_module, "losses_of_run", lambda *_: pytest.fail("evaluated again"))
    front = derive_front(searched_front, TARGETS)
    assert all(row["cost"] <= row["target"] for row in front.to_rows())
    selected = searched_front.summary().selected
    assert len(selected) == len(TARGETS)
    assert {drop_identity(each.architecture) for each in front.derivations} == {
        drop_identity(Architecture.parse(text)) for text in selected
    }
    assert searched_front.summary().arch == selected[-1] == str(derive(searched_front).architecture)
    assert str(front.derivations[-1].architecture) == selected[-1]


def test_without_its_re_ranking_a_front_that_was_trained_is_not_derived(searched_front: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(searched_front.folder, tmp_path / "run"))
    (run.folder / RERANK).unlink()
    with pytest.raises(ParnasError, match=r"rerank\.json is missing"):
        derive_front(run, TARGETS)
    assert derive_front(run, [0.6]).derivations, "other targets are re-ranked"


def test_networks_of_a_front_spend_their_targets_and_are_nested(searched_front: Run) -> None:
    rows = derive_front(searched_front, TARGETS).to_rows()
    assert all(0.9 * row["target"] <= row["cost"] <= row["target"] for row in rows[1:])  # none costs 0.36 to 0.4
    cheaper, *_ = networks = [Architecture.parse(row["arch"]) for row in rows]
    for dearer in networks[1:]:
        assert all(before in (IDENTITY, after) or after == "s" for before, after in zip(cheaper, dearer, strict=True))
        cheaper = dearer


def test_a_front_spends_less_where_no_network_spends_its_target() -> None:
    costs = make_costs("latency", {"s": 4.0, "f": 1.0, "i": 0.0}, 2)  # the interleaved network costs 5
    pi = [{"s": 0.1, "f": 0.5, "i": 0.4}, {"f": 0.9, "i": 0.1}]
    config = Config().replace(search__blocks=2)
    losses = HeldOutLosses(lambda _: 1.0, lambda _: 1.0)
    rankings = rank_front(pi, [Budget(costs, target) for target in (0.5, 0.8, 1.0)], config, losses)
    # Two feed-forward layers cost 0.4, attention alone 0.8: nothing costs 0.45 to 0.5.
    assert [ranking[0].choice.layers for ranking in rankings] == [("f", "f"), ("f", "f"), ("s", "f")]


def test_a_front_raises_a_block_to_its_own_most_costly_candidate() -> None:
    costs = make_costs("latency", {"s": 4.0, "k": 2.0, "f": 1.0}, 2)  # the interleaved network costs 5
    pi = [{"s": 0.0, "k": 0.4, "f": 0.6}] * 2  # no block has attention
    losses = HeldOutLosses(lambda _: 1.0, lambda _: 1.0)
    budgets = [Budget(costs, target) for target in (0.4, 0.6, 0.8)]
    rankings = rank_front(pi, budgets, Config().replace(search__blocks=2), losses)
    assert [sum(costs.per_layer[name] for name in ranking[0].choice.layers) for ranking in rankings] == [2.0, 3.0, 4.0]


def test_after_alpha_is_frozen_only_layers_of_the_front_are_trained(searched_front: Run) -> None:
    fair = load(searched_front.folder, supernet_weights=True)
    before, after = fair.model.state_dict(), load(searched_front.folder).model.state_dict()
    assert fair.step == 6
    trained = {
        name.split(".candidates.")[0] + "." + name.split(".candidates.")[1][0]
        for name, weight in after.items()
        if ".candidates." in name and not torch.equal(weight, before[name])
    }
    selected = [Architecture.parse(text) for text in searched_front.summary().selected]
    own = {f"blocks.{block}.{layer}" for each in selected for block, layer in enumerate(each) if layer != "i"}
    assert trained
    assert trained <= own


def test_each_network_of_the_front_inherits_the_weights_of_the_whole_search(
    searched_front: Run, tmp_path: Path
) -> None:
    for number, arch in enumerate(searched_front.summary().selected):
        config = searched_front.config().replace(
            train__inherit=str(searched_front.folder), model__arch=arch, train__steps=1
        )
        source = retrain(config, tmp_path / str(number), Silent()).summary().inherited
        assert source is not None
        assert source.steps == 12


@pytest.mark.parametrize("stop", [5, 9])
def test_a_search_with_a_front_resumes_bit_by_bit(corpus: Path, tmp_path: Path, stop: int) -> None:
    assert_resumes(search, front_config(corpus, train__save_every=2), tmp_path, stop)


def test_a_search_leaves_out_targets_that_no_network_meets(corpus: Path, tmp_path: Path) -> None:
    notes = Notes()
    run = search(front_config(corpus, search__front=[0.001, 0.4]), tmp_path / "run", notes)
    assert any("no network within 0.001" in note for note in notes.notes)
    assert [each.target for each in derive_front(run, [0.001, 0.4, 1.0]).derivations] == [0.4, 1.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"search__front": [0.0]},
        {"search__front": [1.5]},
        {"search__front": [0.5], "search__cost__target": None},
        {"search__front": [0.5], "search__estimator": "gdas"},
        {"search__front": [0.5], "search__rerank_top_k": 0},
    ],
)
def test_a_front_that_a_search_cannot_have_is_refused(corpus: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ParnasError, match=r"search\.front"):
        front_config(corpus, **changes)


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


def test_a_stored_front_is_read_only_for_its_targets_and_constraints(searched_hybrid: Run) -> None:
    derive_front(searched_hybrid, [0.001, 1.0]).write(searched_hybrid, searched_hybrid.folder)
    assert list(read_front(searched_hybrid, [0.001, 1.0])) == [1.0]
    assert read_front(searched_hybrid, [1.0]) == {}
    constrained = derive_front(searched_hybrid, [0.001, 1.0], Constraints(limits={"s": 1}))
    constrained.write(searched_hybrid, searched_hybrid.folder)
    assert read_front(searched_hybrid, [0.001, 1.0]) == {}


def test_a_report_draws_the_front_of_a_search(searched_hybrid: Run) -> None:
    front = derive_front(searched_hybrid, TARGETS)
    front.write(searched_hybrid, searched_hybrid.folder)
    (read,) = read_report_data([searched_hybrid.folder]).fronts
    assert [point.name for point in read.points] == [row["arch"] for row in front.to_rows()]
    assert [point.ppl for point in read.points] == [pytest.approx(math.exp(row["loss"])) for row in front.to_rows()]
    assert read.perplexity == "perplexity with the shared weights"


@pytest.mark.parametrize("targets", [[], [math.nan], [0.0], [0.5, math.inf]])
def test_targets_from_python_are_checked_too(searched_hybrid: Run, targets: list[float]) -> None:
    with pytest.raises(ParnasError, match=r"targets of the front \(--front\)"):
        derive_front(searched_hybrid, targets)


def test_targets_of_another_option_are_refused(searched_hybrid: Run, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("derive", searched_hybrid.folder, "--front", "0.5,1")
    assert "has targets of its own" in refusal(capsys, *command, "--cost-target", "0.5")
    assert "exclude each other" in refusal(capsys, *command, "--within", "macs=0.5,cache=0.5")


def test_each_network_is_evaluated_once_and_the_weights_are_loaded_once(
    searched_hybrid: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, evaluated = [], []
    original = front_module.losses_of_run

    def counting(run: Run, reporter: Any) -> HeldOutLosses:
        loads.append(run)
        losses = original(run, reporter)

        def short(architecture: Architecture) -> float:
            evaluated.append(str(architecture))
            return losses.short(architecture)

        return HeldOutLosses(short, losses.full)

    monkeypatch.setattr(front_module, "losses_of_run", counting)
    derive_front(searched_hybrid, TARGETS)
    assert len(loads) == 1
    assert len(evaluated) == len(set(evaluated)) > 4
