"""Runs that are interrupted and resumed, and those that are refused."""

import shutil
from pathlib import Path

import pytest
from conftest import small_config
from helpers.training_helpers import Phase, Stop, StopAfter, assert_resumes, assert_same_weights

from parnas.errors import ParnasError
from parnas.nas.search import search
from parnas.runs.files import read_json, write_json
from parnas.runs.run import RERANK, Run
from parnas.training.checkpoints import list_checkpoints
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


@pytest.mark.parametrize(
    ("phase", "changes", "killed_after"),
    [
        (search, {}, 9),
        (search, {"search__estimator": "soft"}, 23),
        (search, {"search__alpha_split": 0.3, "search__estimator": "straight_through"}, 9),
        (search, {"search__alpha_split": 0.3, "search__estimator": "uniform", "search__alpha_every": 2}, 23),
        (search, {"search__tau_schedule": "learnable", "search__estimator": "single_path"}, 9),
        (search, {"search__space": ("s", "s:window=5", "k", "r", "g", "i"), "search__estimator": "uniform"}, 9),
        (search, {"search__space": ("s", "s:heads=1", "f", "f:d_inner=5", "i"), "search__share_slices": True}, 9),
        (retrain, {"model__arch": "k g r s:window=5"}, 9),
        (retrain, {"model__arch": "sff", "model__cutoffs": (5, 12), "model__norm": "pre"}, 9),
        (retrain, {"model__arch": "sk", "model__pointer_len": 6}, 9),
        (search, {"model__pointer_len": 6, "search__estimator": "uniform", "search__alpha_split": 0.3}, 9),
        (retrain, {"model__arch": "fs", "model__cutoffs": (5, 12), "model__subword_features": 20}, 9),
        (retrain, {"model__arch": "sf", "runtime__precision": "bf16", "runtime__threads": 2, "train__steps": 12}, 9),
    ],
)
def test_resumed_run_is_bit_identical(
    phase: Phase, changes: dict[str, object], killed_after: int, corpus: Path, tmp_path: Path
) -> None:
    assert_resumes(phase, small_config(corpus, **changes), tmp_path, killed_after)


def test_run_killed_before_its_first_checkpoint_starts_again(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(5))
    run = retrain(config, tmp_path / "run", Silent(), resume=True)
    assert [line.step for line in run.metrics() if line.split == "train"] == [4, 8, 12, 16, 20, 24]


def test_search_killed_after_alpha_is_frozen_but_before_its_first_checkpoint_starts_again(
    corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, train__eval_every=24, train__save_every=24)
    assert config.search.alpha_end_step < 20
    whole = search(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        search(config, tmp_path / "run", StopAfter(20))
    left = Run(tmp_path / "run")
    assert list_checkpoints(left.supernet)
    assert not list_checkpoints(left.checkpoints)
    write_json(left.folder / RERANK, {"step": -1, "networks": []})
    assert_same_weights(whole, search(config, left.folder, Silent(), resume=True))
    assert read_json(left.folder / RERANK) == read_json(whole.folder / RERANK)


def test_damaged_checkpoint_gives_way_to_the_one_before(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    whole = retrain(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(18))
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert newest.name == "step-00000016"
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    resumed = retrain(config, tmp_path / "run", Silent(), resume=True)
    assert_same_weights(whole, resumed)


def test_resume_refuses_a_changed_configuration_and_names_the_keys(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    with pytest.raises(ParnasError, match=r"train\.lr.* 0\.002 .* 0\.5 "):
        retrain(config.replace(train__lr=0.5), tmp_path / "run", Silent(), resume=True)


def test_finished_or_foreign_runs_are_not_resumed(retrain_run: Run, search_run: Run, corpus: Path) -> None:
    with pytest.raises(ParnasError, match="--run"):
        retrain(retrain_run.config(), retrain_run.folder, Silent(), resume=True)
    with pytest.raises(ParnasError, match="--run"):
        retrain(retrain_run.config(), retrain_run.folder, Silent())
    with pytest.raises(ParnasError, match=r"search.*retrain"):
        retrain(small_config(corpus, model__arch="sf"), search_run.folder, Silent())


def test_run_computed_otherwise_is_not_resumed(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    path = tmp_path / "run" / "environment.json"
    path.write_text(path.read_text().replace('"precision": "fp32"', '"precision": "bf16"'))
    with pytest.raises(ParnasError, match=r"precision.*bf16.*fp32"):
        retrain(config, tmp_path / "run", Silent(), resume=True)


def test_a_run_is_not_resumed_on_another_text(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    config = small_config(tmp_path / "corpus", model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    with (tmp_path / "corpus" / "train.txt").open("a") as file:
        file.write("one more line .\n")
    with pytest.raises(ParnasError, match=str(tmp_path / "run")):
        retrain(config, tmp_path / "run", Silent(), resume=True)
