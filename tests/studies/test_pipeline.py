"""All phases under one command, with the networks that the derived one is compared with."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.command_helpers import run_command
from helpers.training_helpers import Notes, final_weights
from typer.testing import CliRunner

import parnas
import parnas.studies.pipeline
from parnas.architecture import Architecture
from parnas.cli.main import app
from parnas.config.loader import dump_config, load_config
from parnas.errors import ParnasError
from parnas.evaluation.tune_eval import Grid
from parnas.nas.cost import make_costs
from parnas.nas.search import search
from parnas.runs.files import read_json
from parnas.runs.run import Run
from parnas.studies.baselines import hand_designed, read_baselines, shortest
from parnas.studies.pipeline import run_pipeline
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

COSTS = make_costs("macs", {"s": 3.0, "f": 1.0, "i": 0.0}, 6)


@pytest.mark.parametrize(
    ("derived", "expected"),
    [("s", "s"), ("ff", "s"), ("sf", "sf"), ("sff", "sfs"), ("ssff", "sfsf"), ("ssss", "sfsfsf")],
)
def test_equal_cost_is_the_shortest_interleaved_network_that_costs_as_much(derived: str, expected: str) -> None:
    assert str(shortest("interleaved", COSTS, COSTS.cost(Architecture(derived)))) == expected


def test_baselines_are_named_and_refused() -> None:
    assert read_baselines("all-f, equal-cost,all-f") == ["all-f", "equal-cost"]
    assert read_baselines("") == []
    assert read_baselines("lfm2-6,all-f") == ["lfm2-6", "all-f"]
    assert hand_designed(["lfm2-6"], Architecture("sff"), COSTS, 6) == {"lfm2-6": "lfm2-6"}
    assert hand_designed(read_baselines("kkskk"), Architecture("sff"), COSTS, 6) == {"kkskk": "kkskk"}
    strings = hand_designed(["interleaved", "equal-cost"], Architecture("sff"), COSTS, 6)
    assert strings == {"interleaved": "interleaved-6", "equal-cost": "sfs"}
    with pytest.raises(ParnasError, match=r"no baseline 'sandwich'.*equal-cost.*layers such as kkskk"):
        read_baselines("equal-cost,sandwich")


def test_alternating_mixers_are_a_baseline_of_spaces_with_convolution() -> None:
    names = read_baselines("equal-cost,alternating")
    assert hand_designed(names, Architecture("sff"), COSTS, 6) == {"equal-cost": "sfs"}
    costs = make_costs("macs", {"s": 3.0, "k": 1.0, "f": 1.0, "i": 0.0}, 6)
    assert hand_designed(names, Architecture("kskk"), costs, 6) == {"equal-cost": "sfs", "alternating": "kfsf"}


def test_a_finished_training_ignores_the_settings_of_the_other_phase(search_run: Run) -> None:
    config, notes = search_run.config(), Notes()
    train_once(search, config.replace(train__steps=7, train__lr=0.5, train__average=0.5), search_run.folder, notes)
    assert notes.notes == [f"{search_run.folder} is finished and kept"]
    with pytest.raises(ParnasError, match=r"weight_decay: .* before, 0.5 now"):
        train_once(search, config.replace(train__weight_decay=0.5), search_run.folder, notes)
    train_once(search, config.replace(train__accumulate=2, train__log_every=1), search_run.folder, notes)


def test_a_finished_training_is_loaded_by_the_configuration_that_started_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run keeps where the corpus is, and the cutoffs that were found; a configuration may leave both open."""
    monkeypatch.chdir(corpus.parent)
    config = small_config(corpus, data__corpus=corpus.name, model__arch="f", model__cutoffs="auto", train__steps=2)
    run = train_once(retrain, config, tmp_path / "run", Notes())
    assert run.config().model.cutoffs != "auto"
    again = Notes()
    train_once(retrain, config, run.folder, again)
    assert again.notes == [f"{run.folder} is finished and kept"]
    with pytest.raises(ParnasError, match=r"cutoffs: .* before, \(2, 3\) now"):
        train_once(retrain, config.replace(model__cutoffs=(2, 3)), run.folder, again)


@pytest.mark.slow
def test_the_pipeline_is_resumed_and_reads_the_test_split_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config(corpus, search__blocks=2, search__steps=12, train__steps=4)
    Path("small.yaml").write_text(dump_config(config))
    command = ["pipeline", "small.yaml", "--run", "all"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert sorted(path.name for path in Path("all").iterdir() if path.is_dir()) == ["derived", "equal-cost", "search"]
    assert not Path("all/test").exists()
    assert Run("all/derived").summary().arch == str(Run("all/search").derivation().arch).replace("i", "")
    monkeypatch.setattr(
        parnas.studies.pipeline, "Grid", partial(Grid, protocols=("cache",), theta=(0.1,), weight=(0.1,), tokens=100)
    )
    second = CliRunner().invoke(app, [*command, "--tune-eval", "--test"])
    assert second.exit_code == 0, second.output
    assert second.output.count("is finished and kept") == 3
    rows = read_json(Path("all/test/comparison.json"))
    ways = [("derived", "plain"), ("derived", "cache"), ("equal-cost", "plain"), ("equal-cost", "cache")]
    assert [(row["run"], row["evaluation"]) for row in rows] == ways
    assert {row["split"] for row in rows} == {"test"}
    assert read_json(Path("all/comparison.json"))[0]["split"] == "valid"
    third = CliRunner().invoke(app, [*command, "--test"])
    assert third.exit_code == 0, third.output
    assert "on test" not in third.output
    assert "all/test is kept" in third.output.replace("\n", "")
    assert "on the test split" in Path("all/report.html").read_text(encoding="utf-8")
    before = Path("all/test/comparison.json").read_text()
    for content, message in (([*rows[:1], {"a": 1}], "has no valid run"), (None, "split valid")):
        changed = read_json(Path("all/comparison.json")) if content is None else content
        Path("all/test/comparison.json").write_text(json.dumps(changed))
        refused = CliRunner().invoke(app, command)
        assert message in str(refused.exception)
    Path("all/test/comparison.json").write_text(before)
    for name in ("derived", "equal-cost"):
        shutil.rmtree(Path("all", name))
    otherwise = CliRunner().invoke(app, [*command, "--test", "train.lr=0.001"])
    assert "all/test holds results of an earlier training of derived" in str(otherwise.exception)


@pytest.mark.slow
def test_the_command_resumes_what_the_function_has_done(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config(corpus, search__blocks=2, search__steps=12, train__steps=4)
    Path("small.yaml").write_text(dump_config(config))
    with pytest.raises(ParnasError, match="no baseline 'sandwich'"):
        parnas.pipeline(config, baselines=["sandwich"], run="all")
    assert not Path("all").exists()
    result = parnas.pipeline(config, {"train.steps": 6}, run="all", baselines=["all-f"], test=True)
    assert capsys.readouterr() == ("", "")
    assert result.search.arch == str(result.derivation.architecture)
    assert {name: run.summary.steps for name, run in result.runs.items()} == {"derived": 6, "all-f": 6}
    assert (result.comparison.split, result.test.split) == ("valid", "test")
    assert all(path.is_file() for path in result.written)
    again = CliRunner().invoke(app, ["pipeline", "small.yaml", "train.steps=6", "--run", "all", "--baselines", "all-f"])
    assert again.exit_code == 0, again.output
    assert again.output.count("is finished and kept") == 3
    assert result.search.arch in again.output
    assert "next: open all/report.html in a browser" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wikitext2-word", "wikitext2-pieces-cpu"])
def test_the_word_level_configurations_work_from_search_to_report(name: str, corpus: Path, tmp_path: Path) -> None:
    config = load_config(name)
    pieces = {"data__tokenizer__vocab_size": 310} if config.data.tokenizer.kind == "sentencepiece" else {}
    sizes = {"d_model": 16, "n_heads": 2, "d_inner": 32, "mem_len": 8, "cutoffs": config.model.cutoffs and (20,)}
    steps = {"search": 8, "train": 4}
    tiny = config.replace(
        data__corpus=str(corpus),
        data__batch_size=2,
        data__tgt_len=8,
        search__blocks=3,
        search__alpha_start_step=2,
        search__rerank_top_k=2,
        runtime__threads=1,
        **{f"model__{key}": value for key, value in sizes.items()},
        **{f"{phase}__steps": count for phase, count in steps.items()},
        **pieces,
    )
    run_pipeline(tiny, ["equal-cost"], tmp_path / name, Silent(), test=True)
    assert (tmp_path / name / "report.html").is_file()
    assert read_json(tmp_path / name / "test" / "comparison.json")[0]["word_ppl"] > 1


def test_a_pipeline_in_one_run_trains_the_derived_network_from_the_weights_of_the_search(
    corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, search__share=0.5, train__steps=16)
    result = run_pipeline(config, ["all-f"], tmp_path / "all", Silent(), one_run=True)
    derived, other = result.runs["derived"].summary, result.runs["all-f"].summary
    assert (result.search.summary.steps, derived.steps, other.steps) == (8, 8, 16)
    assert derived.inherited is not None
    assert derived.inherited.steps == 8
    assert other.inherited is None
    lines = Run(tmp_path / "all" / "search").metrics()
    assert lines[-1].lr == config.train.lr, "the rate has not fallen"
    again = Notes()
    run_pipeline(config, ["all-f"], tmp_path / "all", again, one_run=True)
    assert sum("is finished and kept" in note for note in again.notes) == 3
    # 2. The same by the commands of the two parts, which torchrun can start.
    path, first, second = tmp_path / "config.yaml", str(tmp_path / "first"), str(tmp_path / "second")
    path.write_text(dump_config(config), encoding="utf-8")
    assert run_command("search", str(path), "--one-run", "--run", first) == 0
    assert run_command("retrain", "--from", first, "--one-run", "--run", second) == 0
    expected, found = (final_weights(Run(Path(each))) for each in (tmp_path / "all" / "derived", second))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert run_command("retrain", "--from", first, "--one-run", "--run", second, "--resume") == 2  # it is finished
    assert run_command("retrain", str(path), "--one-run", "--arch", "sf", "--run", str(tmp_path / "third")) == 2
    assert run_command("search", str(path), "--run", str(tmp_path / "whole")) == 0
    assert run_command("retrain", "--from", str(tmp_path / "whole"), "--one-run", "--run", str(tmp_path / "4")) == 2
    assert not (tmp_path / "third").exists()
    assert not (tmp_path / "4").exists()
    # 3. The same by the functions.
    searched = parnas.search(config, one_run=True, run=tmp_path / "5")
    trained = parnas.retrain(inherit=searched, one_run=True, run=tmp_path / "6")
    assert trained.summary.valid == derived.valid
    with pytest.raises(ParnasError, match="one_run continues a search"):
        parnas.retrain(config, "sf", one_run=True)


def test_the_networks_of_a_front_shrink_from_the_largest(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(corpus, search__blocks=4, search__cost__target=0.5, train__steps=16)
    notes = Notes()
    result = run_pipeline(config, ["all-f"], tmp_path / "all", notes, front=(0.001, 0.5, 0.7, 1.0))
    assert list(result.runs) == ["front-1", "front-0.7", "front-0.5", "all-f"]
    assert any("the front has no network within 0.001" in note for note in notes.notes)
    summaries = {name: run.summary for name, run in result.runs.items()}
    searched = result.search.summary.steps
    assert {name: each.steps for name, each in summaries.items()} == {
        "front-1": 16 - searched,
        "front-0.7": 4,
        "front-0.5": 4,
        "all-f": 16,
    }
    inherited = [each.inherited.steps for each in summaries.values() if each.inherited]
    assert inherited == [searched, 16, 20]
    costs = result.derivation.costs
    assert costs is not None
    shares = [costs.share(Architecture.parse(summaries[f"front-{target}"].arch)) for target in ("1", "0.7", "0.5")]
    assert shares[0] >= 0.9, "the largest network spends its target"
    assert all(share <= target for share, target in zip(shares, (1.0, 0.7, 0.5), strict=True))
    added = run_pipeline(config, ["all-f"], tmp_path / "all", Silent(), front=(0.5, 0.6, 0.7, 1.0))
    assert {name: run.arch for name, run in added.runs.items() if name in summaries} == {
        name: each.arch for name, each in summaries.items()
    }
    monkeypatch.setattr(parnas.studies.pipeline, "shrink", lambda *_: pytest.fail("selected again"))
    again = run_pipeline(config, ["all-f"], tmp_path / "all", Silent(), front=(0.5, 0.7, 1.0))
    assert {name: run.arch for name, run in again.runs.items()} == {name: each.arch for name, each in summaries.items()}
    for more in ({"finalists": 2}, {"one_run": True}):
        with pytest.raises(ParnasError, match="exclude each other"):
            run_pipeline(config, [], tmp_path / "both", Silent(), front=(0.5,), **more)
    with pytest.raises(ParnasError, match="targets of the front"):
        run_pipeline(config, [], tmp_path / "none", Silent(), front=(0.0,))
    assert not (tmp_path / "none").exists()


def test_what_a_pipeline_cannot_use_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"train\.inherit is for parnas retrain"):
        run_pipeline(small_config(corpus, train__inherit="x"), [], tmp_path / "all", Silent())


def test_a_front_needs_no_search_that_re_ranks(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__estimator="gdas", search__blocks=3, train__steps=8)
    result = run_pipeline(config, ["all-f"], tmp_path / "all", Silent(), front=(0.5, 1.0))
    assert list(result.runs) == ["front-1", "front-0.5", "all-f"]
