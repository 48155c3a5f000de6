"""Search in a trained network: what is trained, what is scored, and that everything that reads a search reads it."""

from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import near
from helpers.training_helpers import assert_resumes, final_weights

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.nas.derive import Constraints, derive
from parnas.pretrained.local_distillation import LocalDistillation, search_parent
from parnas.pretrained.settings import heal_settings, search_settings
from parnas.runs.run import Run
from parnas.training.loaded_run import load
from parnas.training.progress import Silent, describe_metrics
from parnas.training.retrain import retrain

SPACE = [["s", "s:heads=1", "k", "i"], ["f", "f:d_inner=16", "i"], ["s", "k", "r", "i"]]


@pytest.fixture(scope="module")
def parent(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(corpus, model__arch="sfs", train__steps=60)
    return retrain(config, tmp_path_factory.mktemp("parent") / "run", Silent())


def search_config(parent: Run, **changes: object) -> Config:
    settings = {"search__parent": str(parent.folder), "search__space": SPACE, "model__arch": None, **changes}
    return parent.config().replace(**settings)


@pytest.fixture(scope="module")
def searched(parent: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return search_parent(search_config(parent), tmp_path_factory.mktemp("search") / "run", Silent())


def test_the_layers_of_the_parent_stay_and_all_others_are_trained(parent: Run, searched: Run, tmp_path: Path) -> None:
    before, after = final_weights(parent), load(searched.folder).model
    own = after.extract(Architecture("sfs")).state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in before.items())
    still = search_parent(search_config(parent, search__lr=1e-30), tmp_path / "still", Silent())
    untrained = load(still.folder).model.state_dict()
    for name, weight in after.state_dict().items():
        number, _, candidate = [*name.split("."), "", ""][1:4] if name.startswith("blocks.") else ("", "", "")
        trained = number and candidate != "sfs"[int(number)] and not name.endswith("alpha")
        assert torch.equal(weight, untrained[name]) != bool(trained) or name.endswith("alpha"), name


def test_the_parent_is_frozen_and_windows_are_trained_whatever_the_order(corpus: Path, tmp_path: Path) -> None:
    parent = retrain(small_config(corpus, model__arch="sf", train__steps=3), tmp_path / "parent", Silent())
    space = [["s:window=3", "s", "i"], ["f:d_inner=16", "f", "i"]]
    config = search_config(parent, search__space=space, search__blocks=2, search__steps=4, search__alpha_start_step=0)
    found = load(search_parent(config, tmp_path / "search", Silent()).folder).model
    before = final_weights(parent)
    own = found.extract(Architecture("sf")).state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in before.items())
    window = found.extract(Architecture(("s:window=3", "f"))).state_dict()
    assert not torch.equal(window["blocks.0.query.weight"], before["blocks.0.query.weight"])


def test_candidates_may_be_larger_than_the_layers_or_of_kinds_that_the_parent_lacks(
    corpus: Path, tmp_path: Path
) -> None:
    parent = retrain(small_config(corpus, model__arch="ff", train__steps=3), tmp_path / "parent", Silent())
    space = [["f", "f:d_inner=64", "s", "i"], ["f", "c", "k", "i"]]
    config = search_config(parent, search__space=space, search__blocks=2, search__steps=3, search__alpha_start_step=0)
    assert search_parent(config, tmp_path / "search", Silent()).finished()


def test_distillation_brings_candidates_closer_to_the_layers_of_the_parent(searched: Run) -> None:
    records = [record for record in searched.metrics() if record.split == "train"]
    losses = [record.local_loss for record in records]
    assert {record.argmax for record in records[:-1]} == {"sfs"}, "the parent, until all are scored"
    assert "loss of the layers" in describe_metrics(records[0])
    assert "ppl" not in describe_metrics(records[0]), "it is no loss of a language model"
    assert losses[-1] < 0.9 * losses[0]


def test_pi_prefers_layers_that_change_the_predictions_least(parent: Run, searched: Run) -> None:
    pi = dict(zip(searched.config().search.candidates, searched.pi_records()[-1].pi[0], strict=True))
    assert pi["s"] > pi["s:heads=1"] > pi["i"]
    assert pi["f"] == 0.0, "block 1 has no feed-forward layer"


def test_a_network_is_derived_and_begins_with_the_weights_of_parent_and_candidates(
    parent: Run, searched: Run, tmp_path: Path
) -> None:
    derivation = derive(searched)
    assert derivation.architecture == Architecture.parse(searched.summary().arch)
    changes = {"train__inherit": str(searched.folder), "model__arch": str(derivation.architecture), "train__steps": 1}
    child = retrain(parent.config().replace(**changes, train__lr=1e-30), tmp_path / "child", Silent())
    expected = load(searched.folder).model.extract(derivation.architecture).state_dict()
    for name, weight in final_weights(child).items():
        near(weight, expected[name], 1e-6)
    inherited = child.summary().inherited
    assert inherited is not None
    assert inherited.steps == parent.config().train.steps + searched.config().search.steps


def test_a_budget_is_a_share_of_the_cost_of_the_parent(corpus: Path, tmp_path: Path) -> None:
    parent = retrain(small_config(corpus, model__arch="ffs", train__steps=1), tmp_path / "parent", Silent())
    changes = {"search__steps": 2, "search__cost__metric": "parameters", "search__cost__target": 0.9}
    searched = search_parent(search_settings(parent).replace(**changes), tmp_path / "search", Silent())
    derivation = derive(searched, Constraints(0.6))
    assert derivation.costs is not None
    assert derivation.costs.share("ffs") == 1.0
    assert derivation.costs.share(derivation.architecture) <= 0.6
    assert derivation.method.startswith("best by the SuperNet's weights of ")
    assert "within 0.6 of the parent's parameters" in derivation.method
    assert "within 0.9 of the parent's macs" in derive(searched, Constraints(metric="macs")).method, "found later"


def test_the_embedding_is_healed_unless_it_has_most_of_the_parameters(searched: Run, parent: Run) -> None:
    before = parent.summary()
    small = before.parameters_without_embeddings
    assert small is not None
    try:
        for total, frozen in ((2 * small, False), (2 * small + 1, True)):
            parent.write_summary(before.model_copy(update={"parameters": total}))
            settings = heal_settings(searched)
            assert settings.train.freeze_embedding == frozen
            assert settings.train.teachers == (str(parent.folder),)
    finally:
        parent.write_summary(before)


def test_a_search_resumes_exactly(parent: Run, tmp_path: Path) -> None:
    assert_resumes(search_parent, search_config(parent), tmp_path, killed_after=13)


def test_a_search_that_was_killed_after_its_last_checkpoint_keeps_the_selected_network(
    parent: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalDistillation, "rerank", lambda *_: Architecture("iik"))
        run = search_parent(search_config(parent), tmp_path / "run", Silent())
    summary = run.summary()
    (run.folder / "summary.json").unlink()
    resumed = search_parent(search_config(parent), run.folder, Silent(), resume=True).summary()
    assert (resumed.arch, resumed.valid.loss) == (summary.arch, summary.valid.loss) == ("iik", summary.valid.loss)


def test_the_parent_must_fit(corpus: Path, parent: Run, searched: Run, tmp_path: Path) -> None:
    def fails(match: str, **changes: object) -> None:
        with pytest.raises(ParnasError, match=match):
            search_parent(search_config(parent, **changes), tmp_path / "run", Silent())

    fails("not a finished retraining", search__parent=str(searched.folder))
    fails("section model", model__d_inner=48)
    fails("block 2 lacks f", search__space=[["s", "i"], ["s", "i"], ["s", "i"]])
    fails("No block of search.space has a layer to train", search__space=[["s", "i"], ["f", "i"], ["s", "i"]])
    fails("3 blocks", search__space=["s", "f", "i"], search__blocks=4)
