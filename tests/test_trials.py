"""What the trials of a black-box search measure, and the command."""

import csv
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_helpers import run_command
from conftest import small_config

from parnas.architecture import Architecture
from parnas.config import dump_config
from parnas.data.streams import prepare
from parnas.errors import Diverged, ParnasError
from parnas.nas.cost import Costs, count_costs, write_costs
from parnas.nas.trials import Finding, inheriting_task, training_task, write_results
from parnas.run import Run, read_arch_file
from parnas.sections import Reach
from parnas.training.device import choose_device
from parnas.training.perplexity import measure_loss
from parnas.training.phases import load
from parnas.training.reporter import Silent

# The two kinds of trial.


def test_inherited_values_are_those_of_extracting_and_scoring(search_run: Run) -> None:
    """By the weights from before they settled on one network, on the whole validation split."""
    task = inheriting_task(search_run.config(), search_run.folder, Silent())
    found = load(search_run.folder, even=True)
    streams, device = prepare(found.config.data), choose_device(found.config.runtime)
    shape = {"batch_size": 2, "tgt_len": 8, "reach": Reach(8)}
    for arch in (Architecture("fss"), Architecture("sif")):
        network, text = found.model.extract(arch), streams.tokens("valid")
        expected = measure_loss(network, text, streams.tokenizer.eos_id, device, **shape).perplexity
        assert task.perplexity(0, arch) == pytest.approx(expected, rel=1e-5)


def test_trained_values_are_those_of_retraining(corpus: Path, tmp_path: Path) -> None:
    from parnas.training.retrain import retrain

    config = small_config(corpus)
    task = training_task(config, 6, tmp_path / "kept", Silent())
    value = task.perplexity(7, Architecture("sif"))
    kept = Run(tmp_path / "kept" / "trial-7")
    assert kept.summary()["steps"] == 6
    alone = retrain(config.replace(model__arch="sf", train__steps=6), tmp_path / "alone", Silent())
    assert value == kept.summary()["valid"]["ppl"] == alone.summary()["valid"]["ppl"]


def test_trainings_that_are_not_kept_leave_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    training_task(small_config(corpus), 2, None, Silent()).perplexity(0, Architecture("fff"))
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_diverges_is_never_the_answer(corpus: Path, tmp_path: Path) -> None:
    task = training_task(small_config(corpus), 2, None, Silent())
    found = [Finding("f", math.inf, 1.0, 0, "trained"), Finding("sf", 50.0, 3.0, 1, "trained")]
    front, best = write_results(found, task, "a", None, tmp_path)
    assert front == [best] == found[1:]
    assert write_results(found[:1], task, "a", None, tmp_path) == ([], None)


def test_a_trial_that_diverges_is_told_of(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object) -> None:
        raise Diverged("The loss is not finite at step 3.")

    told: list[str] = []
    reporter = Silent()
    monkeypatch.setattr("parnas.nas.trials.retrain", diverge)
    monkeypatch.setattr(reporter, "note", told.append)
    task = training_task(small_config(corpus), 2, None, reporter)
    assert math.isinf(task.perplexity(0, Architecture("sf")))
    assert any("not finite at step 3" in note for note in told)


def test_costs_of_trials_are_the_searchs_own_or_those_of_a_table(
    search_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Costs("macs", {"s": 3.0, "f": 2.0, "i": 0.0}, 8.0)
    run = Run(Path(shutil.copytree(search_run.folder, tmp_path / "run")))
    write_costs(found, run.folder)
    assert inheriting_task(run.config(), run.folder, Silent()).costs == found
    monkeypatch.setattr("parnas.nas.trials.find_costs", lambda *_: replace(found, interleaved=9.0))
    asked = run.config().replace(search__cost__table="elsewhere.json")
    assert inheriting_task(asked, run.folder, Silent()).costs.interleaved == 9.0


def test_terms_hold_what_values_depend_on_and_no_more(corpus: Path, search_run: Run, tmp_path: Path) -> None:
    def terms(**changes: object) -> dict:
        return dict(training_task(small_config(corpus, **changes), 6, None, Silent()).terms)

    shutil.copytree(corpus, tmp_path / "moved")
    base = terms()
    assert terms(data__corpus=str(tmp_path / "moved")) == base
    assert terms(train__log_every=2, search__lr=1.0, train__steps=99) == base
    for change in ({"train__lr": 1.0}, {"model__d_inner": 8}, {"search__blocks": 4}, {"runtime__seed": 5}):
        assert terms(**change) != base
    (tmp_path / "moved" / "train.txt").write_text(" other words entirely . \n" * 400)
    assert terms(data__corpus=str(tmp_path / "moved")) != base
    inherited = inheriting_task(search_run.config(), search_run.folder, Silent()).terms
    assert inherited["supernet's weights"]
    assert not any(key.startswith("train.") for key in inherited)


def test_a_supernet_that_does_not_fit_is_refused(search_run: Run, retrain_run: Run, tmp_path: Path) -> None:
    config = search_run.config()
    with pytest.raises(ParnasError, match="has no SuperNet"):
        inheriting_task(config, retrain_run.folder, Silent())
    with pytest.raises(ParnasError, match=r"search\.blocks: 3 there, 4 here"):
        inheriting_task(config.replace(search__blocks=4), search_run.folder, Silent())
    prepare(config.data)
    inheriting_task(config.replace(search__lr=0.5, train__lr=0.5), search_run.folder, Silent())


# The command.


def read_front(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "pareto.csv").open()))


def test_the_command_with_a_supernet(
    search_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["blackbox", "--supernet", search_run.folder, "--storage", "sqlite:///s.db", "--study", "my study"]
    assert run_command(*command, "--trials", 8, "--within", 0.9) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "blackbox-my-study"
    front = read_front(folder)
    assert list(front[0]) == ["network", "valid_ppl", "cost", "trial", "source"]
    assert all(row["network"] in out and row["source"] == "inherited" for row in front)
    content = read_arch_file(folder / "arch.yaml")
    assert content["cost_share"] <= 0.9
    assert content["cost"] == count_costs(search_run.config(), "macs").cost(content["arch"])
    affordable = [
        row for row in front if float(row["cost"]) <= 0.9 * count_costs(search_run.config(), "macs").interleaved
    ]
    assert affordable[-1]["network"] == content["arch"]
    assert run_command(*command, "--trials", 10, "--within", 0.01) == 2
    assert "raise --within" in capsys.readouterr().err
    assert not (folder / "arch.yaml").exists()
    assert run_command(*command, "--trials", 10, "--sampler", "nsga2") == 0
    assert (folder / "arch.yaml").is_file()


def test_the_command_that_trains_and_what_retrain_reads_of_it(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(dump_config(small_config(corpus)))
    command = ["blackbox", tmp_path / "small.yaml", "search.blocks=2", "--train-steps", 3, "--trials", 3, "--keep"]
    command += ["--storage", f"journal:{tmp_path}/s.log", "--study", "a", "--run", tmp_path / "out"]
    assert run_command(*command) == 0
    kept = {int(path.name.removeprefix("trial-")) for path in (tmp_path / "out").glob("trial-*")}
    assert kept
    for row in read_front(tmp_path / "out"):
        assert int(row["trial"]) in kept
        summary = Run(tmp_path / "out" / f"trial-{row['trial']}").summary()
        assert float(row["valid_ppl"]) == summary["valid"]["ppl"]
        assert row["network"] == summary["arch"]
    arch = tmp_path / "out" / "arch.yaml"
    assert run_command("retrain", tmp_path / "small.yaml", "--arch", arch, "--run", tmp_path / "run") == 0
    content = read_arch_file(arch)
    assert Run(tmp_path / "run").summary()["parameters"] == content["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "dice", "--train-steps", "2"], "give tpe or nsga2"),
        ([], "Give one of --train-steps"),
        (["--train-steps", "2", "--supernet", "x"], "Give one of --train-steps"),
        (["--supernet", "nowhere"], "There is no run folder nowhere"),
        (["--train-steps", "2", "--storage", "s.db"], "is no storage"),
    ],
)
def test_mistakes_of_the_command(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, corpus: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(dump_config(small_config(corpus)))
    given = ["blackbox", *(["c.yaml"] if "nowhere" not in arguments else []), "--trials", "2", "--study", "a"]
    assert run_command(*given, "--storage", "sqlite:///s.db", *arguments) == 2
    assert message in capsys.readouterr().err
