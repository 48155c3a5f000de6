"""The black-box search: equal networks, the trials that count, the values of a trial, the results, and the command."""

import math
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pandas as pd
import pytest
from conftest import small_config
from helpers.blackbox_helpers import STORAGES, FakePerplexity, make_task, run_study
from helpers.command_helpers import run_command
from helpers.tuning_helpers import studies_in_memory
from optuna.trial import TrialState

from parnas.architecture import Architecture
from parnas.config.loader import Config, dump_config
from parnas.config.schema import Reach, Shape
from parnas.data.streams import prepare
from parnas.errors import Diverged, ParnasError
from parnas.nas.cost import Costs, count_costs, write_costs
from parnas.runs.run import Run, read_derivation
from parnas.studies.blackbox import (
    EvaluatedNetwork,
    best_within,
    evaluated_networks,
    inheriting_task,
    open_study,
    pareto_front,
    training_task,
    write_results,
)
from parnas.studies.optuna_study import finished_trials, open_storage, refuse_other_fingerprint
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.progress import Silent

__all__ = ["studies_in_memory"]


def strings(study: optuna.Study) -> list[str]:
    return ["".join(trial.params.values()) for trial in study.get_trials()]


@pytest.mark.parametrize(("url", "sampler"), [*zip(STORAGES, ["tpe", "nsga2"], strict=True)])
def test_each_network_is_evaluated_once(url: str, sampler: str, tmp_path: Path) -> None:
    """15 different networks in 27 strings of 3 blocks: equal ones must come up, and identity alone may."""
    study, asked = run_study(url.format(tmp_path), 18, sampler)
    assert len(finished_trials(study)) == len(study.get_trials()) == 18
    assert max(Counter(asked.asked).values()) == 1
    named = [string.replace("i", "") for string in strings(study)]
    assert len(set(named)) < len(named)
    assert set(asked.asked) == set(named) - {""}
    expected = FakePerplexity()
    costs = count_costs(Config().replace(search__blocks=3), "macs")
    for trial, string in zip(study.get_trials(), strings(study), strict=True):
        if string == "iii":
            assert trial.state == TrialState.PRUNED
        else:
            assert trial.values == [expected(0, Architecture(string)), costs.cost(string)]
    assert [each.network for each in evaluated_networks(study, "counted")] == asked.asked


def test_identity_alone_is_skipped(studies_in_memory: None) -> None:
    study, asked = run_study("study", 12, blocks=1)
    states = Counter(trial.state for trial in study.get_trials())
    assert states[TrialState.PRUNED] >= 1
    assert states[TrialState.PRUNED] + states[TrialState.COMPLETE] == 12
    assert sorted(set(asked.asked)) == sorted(asked.asked)
    assert all(each.network for each in evaluated_networks(study, "counted"))


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_one_worker_is_deterministic_also_if_it_was_interrupted(sampler: str, studies_in_memory: None) -> None:
    whole, _ = run_study("whole", 16, sampler)
    run_study("parts", 5, sampler)
    run_study("parts", 12, sampler)
    parts, _ = run_study("parts", 16, sampler)
    assert strings(parts) == strings(whole)
    other, _ = run_study("other", 16, sampler, seed=2)
    assert strings(other) != strings(whole)
    assert all(len(set(strings(study))) > 5 for study in (whole, other))


def test_a_complete_study_is_not_extended(studies_in_memory: None) -> None:
    run_study("study", 9)
    for trials in (9, 4):
        study, asked = run_study("study", trials)
        assert len(study.get_trials()) == 9
        assert asked.asked == []


# What comes out.


def test_the_front_is_that_of_comparing_all_with_all() -> None:
    draw = random.Random(0)
    for _ in range(100):
        networks = [
            EvaluatedNetwork(f"n{n}", float(draw.randint(1, 6)), float(draw.randint(1, 6)), n, "trained")
            for n in range(draw.randint(0, 15))
        ]

        def beats(one: EvaluatedNetwork, other: EvaluatedNetwork) -> bool:
            no_worse = one.valid_ppl <= other.valid_ppl and one.cost <= other.cost
            return no_worse and (one.valid_ppl < other.valid_ppl or one.cost < other.cost)

        expected = {each for each in networks if not any(beats(other, each) for other in networks)}
        front = pareto_front(networks)
        assert set(front) == expected
        assert len(front) == len(expected)
        assert [each.cost for each in front] == sorted(each.cost for each in front)


def test_the_best_within_a_bound() -> None:
    networks = [
        EvaluatedNetwork("s", 9.0, 5.0, 0, "x"),
        EvaluatedNetwork("f", 7.0, 6.0, 1, "x"),
        EvaluatedNetwork("sf", 5.0, 11.0, 2, "x"),
    ]
    assert [best_within(networks, bound) for bound in (None, 11, 10.9, 5, 4)] == [
        networks[2],
        networks[2],
        networks[1],
        networks[0],
        None,
    ]
    assert best_within([EvaluatedNetwork("ff", 5.0, 12.0, 3, "x"), networks[2]], None) == networks[2]
    rounded = EvaluatedNetwork("sffsfs", 5.0, 0.7 + 0.7 + 0.1 + 0.7 + 0.1 + 0.1, 0, "x")
    bound = 0.1 + 0.1 + 0.7 + 0.1 + 0.7 + 0.7
    assert rounded.cost > bound
    assert best_within([rounded], bound) == rounded, "the same costs in another order"


# The fingerprint.


def test_a_study_of_another_configuration_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    task = make_task(FakePerplexity(), widths=(1, 2), lr=0.1)
    open_study(url, "test", "tpe", task)
    open_study(url, "test", "nsga2", task)
    with pytest.raises(ParnasError, match=r"lr: 0\.1 before, 0\.2 now"):
        open_study(url, "test", "tpe", make_task(FakePerplexity(), widths=(1, 2), lr=0.2))
    with pytest.raises(ParnasError, match="steps: None before, 5 now"):
        refuse_other_fingerprint({}, {"steps": 5}, "test", "hint")
    with pytest.raises(ParnasError, match=r"search\.cost\.table"):
        refuse_other_fingerprint(
            {"metric": "latency", "costs": {"s": 1.0}}, {"metric": "latency", "costs": {"s": 1.1}}, "test", "hint"
        )
    foreign = optuna.create_study(storage=open_storage(url), study_name="foreign")
    with pytest.raises(ParnasError, match="foreign"):
        open_study(url, "foreign", "tpe", task)
    assert "fingerprint" not in foreign.user_attrs


# The two kinds of trial.


def test_inherited_values_are_those_of_extracting_and_scoring(search_run: Run) -> None:
    """With the weights from before the fine-tuning, on the whole validation split."""
    task = inheriting_task(search_run.config(), search_run.folder, Silent())
    loaded = load(search_run.folder, supernet_weights=True)
    streams, device = prepare(loaded.config.data), choose_device(loaded.config.runtime)
    shape = Shape(2, 8, Reach(8))
    for arch in (Architecture("fss"), Architecture("sif")):
        network, text = loaded.model.extract(arch), streams.tokens("valid")
        expected = measure_loss(network, text, streams.tokenizer.eos_id, device, shape).perplexity
        assert task.perplexity(0, arch) == pytest.approx(expected, rel=1e-5)


def test_trained_values_are_those_of_retraining(corpus: Path, tmp_path: Path) -> None:
    from parnas.training.retrain import retrain

    config = small_config(corpus)
    task = training_task(config, 6, tmp_path / "kept", Silent())
    value = task.perplexity(7, Architecture("sif"))
    run = Run(tmp_path / "kept" / "trial-7")
    assert run.summary().steps == 6
    alone = retrain(config.replace(model__arch="sf", train__steps=6), tmp_path / "alone", Silent())
    assert value == run.summary().valid.ppl == alone.summary().valid.ppl


def test_trainings_in_a_temporary_folder_leave_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    training_task(small_config(corpus), 2, None, Silent()).perplexity(0, Architecture("fff"))
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_diverges_is_never_the_answer(corpus: Path, tmp_path: Path) -> None:
    task = training_task(small_config(corpus), 2, None, Silent())
    networks = [EvaluatedNetwork("f", math.inf, 1.0, 0, "trained"), EvaluatedNetwork("sf", 50.0, 3.0, 1, "trained")]
    front, best = write_results(networks, task, "a", None, tmp_path)
    assert front == [best] == networks[1:]
    assert write_results(networks[:1], task, "a", None, tmp_path) == ([], None)


def test_a_trial_that_diverges_is_noted(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object) -> None:
        raise Diverged("The loss is not finite at step 3.")

    notes: list[str] = []
    reporter = Silent()
    monkeypatch.setattr("parnas.studies.blackbox.retrain", diverge)
    monkeypatch.setattr(reporter, "note", notes.append)
    task = training_task(small_config(corpus), 2, None, reporter)
    assert math.isinf(task.perplexity(0, Architecture("sf")))
    assert any("not finite at step 3" in note for note in notes)


def test_costs_of_trials_are_the_searchs_own_or_those_of_a_table(
    search_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs("macs", {"s": 3.0, "f": 2.0, "i": 0.0}, 8.0)
    run = Run(Path(shutil.copytree(search_run.folder, tmp_path / "run")))
    write_costs(costs, run.folder)
    assert inheriting_task(run.config(), run.folder, Silent()).costs == costs
    monkeypatch.setattr("parnas.studies.blackbox.find_costs", lambda *_: replace(costs, interleaved=9.0))
    asked = run.config().replace(search__cost__table="elsewhere.json")
    assert inheriting_task(asked, run.folder, Silent()).costs.interleaved == 9.0


def test_the_fingerprint_holds_what_values_depend_on_and_no_more(corpus: Path, search_run: Run, tmp_path: Path) -> None:
    def fingerprint(**changes: object) -> dict:
        return dict(training_task(small_config(corpus, **changes), 6, None, Silent()).fingerprint)

    shutil.copytree(corpus, tmp_path / "moved")
    base = fingerprint()
    assert fingerprint(data__corpus=str(tmp_path / "moved")) == base
    assert fingerprint(train__log_every=2, search__lr=1.0, train__steps=99) == base
    for change in ({"train__lr": 1.0}, {"model__d_inner": 8}, {"search__blocks": 4}, {"runtime__seed": 5}):
        assert fingerprint(**change) != base
    (tmp_path / "moved" / "train.txt").write_text(" other words entirely . \n" * 400)
    assert fingerprint(data__corpus=str(tmp_path / "moved")) != base
    inherited = inheriting_task(search_run.config(), search_run.folder, Silent()).fingerprint
    assert inherited["supernet's weights"]
    assert not any(key.startswith("train.") for key in inherited)


def test_a_supernet_that_does_not_fit_is_refused(search_run: Run, retrain_run: Run, tmp_path: Path) -> None:
    config = search_run.config()
    with pytest.raises(ParnasError, match="retrain"):
        inheriting_task(config, retrain_run.folder, Silent())
    with pytest.raises(ParnasError, match=r"search\.blocks: 3 in the run, not 4"):
        inheriting_task(config.replace(search__blocks=4), search_run.folder, Silent())
    prepare(config.data)
    inheriting_task(config.replace(search__lr=0.5, train__lr=0.5), search_run.folder, Silent())


# The command.


def read_front(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "pareto.csv")


def test_the_command_with_a_supernet(
    search_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["blackbox", "--supernet", search_run.folder, "--storage", "sqlite:///s.db", "--study", "my study"]
    assert run_command(*command, "--trials", 8, "--cost-target", 0.9) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "blackbox-my-study"
    front = read_front(folder)
    assert list(front) == ["network", "valid_ppl", "cost", "trial", "source"]
    assert all(network in out for network in front["network"])
    assert set(front["source"]) == {"inherited"}
    content = read_derivation(folder / "arch.yaml").to_dict()
    assert content["cost_share"] <= 0.9
    assert content["cost"] == count_costs(search_run.config(), "macs").cost(content["arch"])
    affordable = front[front["cost"] <= 0.9 * count_costs(search_run.config(), "macs").interleaved]
    assert affordable.iloc[-1]["network"] == content["arch"]
    assert run_command(*command, "--trials", 10, "--cost-target", 0.01) == 2
    assert "raise --cost-target" in capsys.readouterr().err
    assert not (folder / "arch.yaml").exists()
    assert run_command(*command, "--trials", 10, "--sampler", "nsga2") == 0
    assert (folder / "arch.yaml").is_file()


def test_the_command_that_trains_writes_an_arch_file_for_retrain(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(dump_config(small_config(corpus)))
    command = ["blackbox", tmp_path / "small.yaml", "search.blocks=2", "--train-steps", 3, "--trials", 3, "--keep"]
    command += ["--storage", f"journal:{tmp_path}/s.log", "--study", "a", "--run", tmp_path / "out"]
    assert run_command(*command) == 0
    folders = {int(path.name.removeprefix("trial-")) for path in (tmp_path / "out").glob("trial-*")}
    assert folders
    for _, row in read_front(tmp_path / "out").iterrows():
        assert row["trial"] in folders
        summary = Run(tmp_path / "out" / f"trial-{row['trial']}").summary()
        assert row["valid_ppl"] == pytest.approx(summary.valid.ppl)
        assert row["network"] == summary.arch
    arch = tmp_path / "out" / "arch.yaml"
    assert run_command("retrain", tmp_path / "small.yaml", "--arch", arch, "--run", tmp_path / "run") == 0
    content = read_derivation(arch).to_dict()
    assert Run(tmp_path / "run").summary().parameters == content["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "dice", "--train-steps", "2"], "give tpe or nsga2"),
        ([], "Give either --train-steps"),
        (["--train-steps", "2", "--supernet", "x"], "Give either --train-steps"),
        (["--supernet", "nowhere"], "There is no run folder nowhere"),
        (["--train-steps", "2", "--storage", "s.db"], "--storage"),
    ],
)
def test_errors_of_the_command(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, corpus: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(dump_config(small_config(corpus)))
    given = ["blackbox", *(["c.yaml"] if "nowhere" not in arguments else []), "--trials", "2", "--study", "a"]
    assert run_command(*given, "--storage", "sqlite:///s.db", *arguments) == 2
    assert message in capsys.readouterr().err
