"""Retrainings that start from the weights of a search."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config
from helpers.training_helpers import Notes, Stop, StopAfter, assert_resumes, assert_same_weights, final_weights

from parnas.architecture import Architecture
from parnas.data.batching import TrainingBatches
from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.figures.report.page import write_report
from parnas.nas.search import search
from parnas.runs.resolve import resolve_config_and_run
from parnas.runs.run import Run
from parnas.studies.blackbox import training_task
from parnas.studies.train_or_load import train_once
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

STILL = {"train__lr": 1e-30, "train__steps": 1, "train__weight_decay": 0.0}
"""Settings with which a training changes no weight."""


@pytest.fixture(scope="module")
def uniform(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished search that fine-tuned the selected path."""
    config = small_config(corpus, search__steps=10, search__alpha_start_step=2)
    return search(config, tmp_path_factory.mktemp("search") / "run", Silent())


def train_from(source: Run, arch: str, folder: Path, **changes: object) -> Run:
    settings = {"train__inherit": str(source.folder), "model__arch": arch, **changes}
    return retrain(source.config().replace(**settings), folder, Silent())


def other_architecture(source: Run) -> Architecture:
    """Return a network of the search space that the search did not select."""
    letters = ["s" if letter == "f" else "f" for letter in source.summary().arch]
    return Architecture(letters)


def test_the_selected_network_starts_with_its_fine_tuned_weights(uniform: Run, tmp_path: Path) -> None:
    summary = uniform.summary()
    run = train_from(uniform, summary.arch, tmp_path / "run", **STILL)
    expected = load(uniform.folder).model.extract(Architecture.parse(summary.arch)).state_dict()
    for name, weight in final_weights(run).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    assert summary.argmax is not None
    assert run.summary().valid.loss == pytest.approx(summary.argmax.loss, abs=1e-6)


def test_another_network_starts_with_the_weights_before_the_fine_tuning(uniform: Run, tmp_path: Path) -> None:
    arch = other_architecture(uniform)
    run = train_from(uniform, str(arch), tmp_path / "run", **STILL)
    expected = load(uniform.folder, supernet_weights=True).model.extract(arch).state_dict()
    for name, weight in final_weights(run).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)


def test_without_fine_tuning_blocks_are_taken_as_given(corpus: Path, tmp_path: Path) -> None:
    settings = {"search__uniform_fraction": 1.0, "search__steps": 6, "search__alpha_start_step": 2, "search__blocks": 4}
    run = search(small_config(corpus, **settings), tmp_path / "search", Silent())
    path = run.folder / "summary.json"
    path.write_text(path.read_text().replace(f'"{run.summary().arch}"', '"sfii"'), encoding="utf-8")
    for arch, places in (("iisf", "iisf"), ("sfii", "sfii"), ("sf", "sfii")):
        child = train_from(run, arch, tmp_path / arch, **STILL)
        expected = load(run.folder).model.extract(Architecture(places)).state_dict()
        for name, weight in final_weights(child).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)


def test_summary_and_comparison_tell_inherited_weights_from_scratch(uniform: Run, tmp_path: Path) -> None:
    arch = uniform.summary().arch
    inherited = train_from(uniform, arch, tmp_path / "inherited")
    scratch = retrain(uniform.config().replace(model__arch=arch), tmp_path / "scratch", Silent())
    source = inherited.summary().inherited
    assert source is not None
    assert (source.run, source.steps) == (str(uniform.folder), uniform.summary().steps)
    assert scratch.summary().inherited is None
    comparison = compare([inherited.folder, scratch.folder], EvalOptions(), Silent())
    comparison.write(tmp_path)
    table = comparison.table.set_index("run")
    assert table.loc["inherited", "inherited_steps"] == source.steps
    assert table.loc["inherited", "total_seconds"] == pytest.approx(
        inherited.summary().seconds + uniform.summary().seconds
    )
    assert table[["inherited_steps", "total_seconds"]].isna().loc["scratch"].all()
    page = write_report([tmp_path, inherited.folder, scratch.folder], tmp_path)
    assert "inherited steps" in page.read_text(encoding="utf-8")
    alone = write_report([uniform.folder, inherited.folder], tmp_path / "alone").read_text(encoding="utf-8")
    assert f"Trained from inherited weights of {source.steps} steps" in alone
    assert "Trained from scratch" not in alone


def test_the_weights_of_another_network_are_those_of_fewer_steps(uniform: Run, tmp_path: Path) -> None:
    run = train_from(uniform, str(other_architecture(uniform)), tmp_path / "run", **STILL)
    source = run.summary().inherited
    assert source is not None
    assert source.steps == uniform.config().search.alpha_end_step < uniform.summary().steps


def test_architecture_and_configuration_are_by_default_those_of_the_search(
    uniform: Run, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = resolve_config_and_run(None, [], None, False, "retrain", inherit=uniform.folder)
    assert config.model.arch == str(uniform.architecture())
    assert config.train.inherit == str(uniform.folder)
    assert config.data == uniform.config().data
    ignored = uniform.config().replace(model__arch="fff")
    monkeypatch.setattr(Run, "config", lambda _: ignored)
    config, _ = resolve_config_and_run(None, [], None, False, "retrain", inherit=uniform.folder)
    assert config.model.arch == str(uniform.architecture()), "a search does not use model.arch"


@pytest.mark.parametrize("freeze", [False, True])
def test_an_interrupted_retraining_resumes_bit_by_bit(freeze: bool, uniform: Run, tmp_path: Path) -> None:
    settings = {"train__inherit": str(uniform.folder), "train__freeze_embedding": freeze, "train__average": 0.5}
    config = uniform.config().replace(
        **settings, model__arch=uniform.summary().arch, train__steps=6, train__save_every=2
    )
    run = assert_resumes(retrain, config, tmp_path, 3)
    assert run.summary().inherited is not None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_embedding_and_softmax_keep_the_inherited_weights(optimizer: str, uniform: Run, tmp_path: Path) -> None:
    settings = {"train__freeze_embedding": True, "train__steps": 3, "train__optimizer": optimizer}
    arch = uniform.summary().arch
    run = train_from(uniform, arch, tmp_path / "run", **settings)
    inherited = load(uniform.folder).model.extract(Architecture.parse(arch)).state_dict()
    for name, weight in final_weights(run).items():
        assert torch.equal(weight, inherited[name]) == name.startswith(("embedding.", "head.")), name
    with pytest.raises(ParnasError, match=r"freeze_embedding is true, but no weights are inherited"):
        run.config().replace(train__inherit=None)
    assert not run.config().from_scratch().train.freeze_embedding


def test_a_retraining_resumes_and_stays_finished_without_its_search(uniform: Run, tmp_path: Path) -> None:
    source = Run(shutil.copytree(uniform.folder, tmp_path / "search"))
    settings = {"train__inherit": str(source.folder), "model__arch": source.summary().arch}
    config = source.config().replace(**settings, train__steps=6, train__save_every=2)
    whole = retrain(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(3))
    shutil.move(source.folder, tmp_path / "moved")
    moved = config.replace(train__inherit=str(tmp_path / "moved"))
    run = retrain(moved, tmp_path / "run", Silent(), resume=True)
    assert_same_weights(whole, run)
    assert run.summary().inherited == whole.summary().inherited
    notes = Notes()
    train_once(retrain, config, run.folder, notes)
    assert notes.notes == [f"{run.folder} is finished and kept"]
    with pytest.raises(ParnasError, match="trained from the weights of another run"):
        train_once(retrain, config.replace(train__inherit=None), run.folder, notes)
    other = search(uniform.config().replace(runtime__seed=7), tmp_path / "other", Silent())
    with pytest.raises(ParnasError, match="is another run"):
        train_once(retrain, config.replace(train__inherit=str(other.folder)), run.folder, notes)


def test_the_text_continues_where_the_search_ended(
    uniform: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = TrainingBatches.__init__

    def observe(self: TrainingBatches, *arguments: Any, first: int = 0, **more: Any) -> None:
        read.append(first)
        original(self, *arguments, first=first, **more)

    monkeypatch.setattr(TrainingBatches, "__init__", observe)
    train_from(uniform, uniform.summary().arch, tmp_path / "run", train__steps=1)
    assert read == [uniform.summary().steps]


def test_studies_from_scratch_do_not_inherit(uniform: Run, tmp_path: Path) -> None:
    config = uniform.config().replace(train__inherit=str(uniform.folder))
    assert training_task(config, 5, None, Silent()).config.train.inherit is None


def test_what_cannot_be_inherited_is_refused(uniform: Run, trained: Run, tmp_path: Path) -> None:
    arch = uniform.summary().arch
    with pytest.raises(ParnasError, match="is not a part of"):
        train_from(uniform, arch + "k", tmp_path / "kind", train__inherit=str(trained.folder))
    with pytest.raises(ParnasError, match="no run folder"):
        train_from(uniform, arch, tmp_path / "missing", train__inherit=str(tmp_path / "nowhere"))
    with pytest.raises(ParnasError, match=r"tensors differ in shape.*settings of that run in the section model"):
        train_from(uniform, arch, tmp_path / "shape", model__d_inner=7)
    with pytest.raises(ParnasError, match="has no candidate k"):
        train_from(uniform, "k" * len(arch), tmp_path / "candidate")
    with pytest.raises(ParnasError, match="has 1 blocks"):
        train_from(uniform, "s", tmp_path / "blocks")
    with pytest.raises(ParnasError, match="text or the tokenizer"):
        train_from(uniform, arch, tmp_path / "text", data__tokenizer__vocab_size=20)
    unfinished = tmp_path / "unfinished"
    shutil.copytree(uniform.folder, unfinished)
    (unfinished / "summary.json").unlink()
    with pytest.raises(ParnasError, match=r"summary\.json"):
        train_from(uniform, arch, tmp_path / "half", train__inherit=str(unfinished))


def test_only_retraining_takes_its_architecture_from_the_search(uniform: Run, elsewhere: None) -> None:
    settings = {"train": {"inherit": "nowhere"}}
    config, _ = resolve_config_and_run(settings, [], None, False, "search")
    assert config.model.arch is None
    with pytest.raises(ParnasError, match="no run folder nowhere"):
        resolve_config_and_run(settings, [], None, False, "retrain")
