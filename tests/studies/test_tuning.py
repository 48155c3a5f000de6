"""Tuning of settings: the trials that count, pruning, resuming, importance, and several workers."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from conftest import small_config
from helpers.blackbox_helpers import STORAGES
from helpers.study_workers import StudyWorker
from helpers.training_helpers import Notes
from helpers.tuning_helpers import (
    SPACE,
    FakeTraining,
    fake_training,
    loss_of,
    run_study,
    work,
)

from parnas.config.loader import Config, dump_config, load_config
from parnas.data.streams import prepare
from parnas.errors import OutOfMemory, ParnasError
from parnas.figures.tuning import draw_tuning
from parnas.runs.run import Run
from parnas.studies import optuna_study, tuning
from parnas.studies.optuna_study import finished_trials
from parnas.studies.tuning import (
    FOLDER,
    STORAGE,
    STUDY,
    TuneOptions,
    TuningObjective,
    first_pruning_step,
    importance,
    make_pruner,
    tune,
)
from parnas.studies.tuning_space import read_space
from parnas.training.interruptions import Stopped
from parnas.training.progress import Silent

__all__ = ["fake_training"]


def study_in(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=optuna_study.open_storage(f"sqlite:///{folder}/study.db"))


def test_the_best_is_the_least_loss_and_the_first_is_as_configured(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    result = run_study(corpus, tmp_path / "s", 12, prune=False)
    losses = [loss_of(config) for _, config in fake_training.asked]
    assert [each.loss for each in result.trials] == pytest.approx(losses)
    assert result.best is not None
    assert result.best.loss == min(losses)
    assert loss_of(result.config) == min(losses)
    assert result.configured == result.trials[0]
    assert result.trials[0].settings == {"train.lr": 2e-3, "model.dropout": 0.1, "model.norm": "post"}
    assert {config.model.norm for _, config in fake_training.asked} == {"pre", "post"}


def test_drawn_numbers_have_few_digits(corpus: Path, tmp_path: Path, fake_training: FakeTraining) -> None:
    run_study(corpus, tmp_path / "s", 6)
    for _, config in fake_training.asked:
        assert float(f"{config.train.lr:.4g}") == config.train.lr
        assert 1e-4 <= config.train.lr <= 1e-1


def test_trials_behind_the_median_are_pruned_and_count(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    """Not before five are complete, nor by the last validation; state, step and loss are stored."""
    result = run_study(corpus, tmp_path / "s", 14)
    pruned = [each for each in result.trials if each.state == "pruned"]
    assert len(result.trials) == 14
    assert 1 <= len(pruned) <= 9
    assert {each.step for each in pruned} <= {8, 16}
    assert [each.state for each in result.trials[:5]] == ["complete"] * 5
    complete = [each.loss for each in result.trials if each.state == "complete"]
    assert all(each.loss > min(complete) for each in pruned)
    assert result.best.state == "complete"
    assert not (tmp_path / "s" / pruned[0].folder / "summary.json").exists()
    assert "pruned after step" in (tmp_path / "s" / pruned[0].folder / "run.log").read_text()
    whole = run_study(corpus, tmp_path / "whole", 8, prune=False)
    assert whole.counts()["complete"] == 8


def test_pruned_settings_are_not_trained_again(corpus: Path, tmp_path: Path, fake_training: FakeTraining) -> None:
    space = {"train.lr": "0.002,0.003,0.03", "model.dropout": "0,0.1,0.4", "model.norm": "pre,post"}
    result = run_study(corpus, tmp_path / "s", 26, space)
    drawn = [tuple(each.settings.values()) for each in result.trials]
    early = {settings for each, settings in zip(result.trials, drawn, strict=True) if each.state == "pruned"}
    assert any(drawn.count(settings) > 1 for settings in early)
    assert len(fake_training.asked) == len(set(drawn))
    assert result.counts()["skipped"] == 0
    assert all(each.loss is not None and each.step in (8, 16) for each in result.trials if each.state == "pruned")
    result.write(tmp_path / "s")
    assert draw_tuning(tmp_path / "s")


def test_a_trial_that_diverges_is_never_the_best(corpus: Path, tmp_path: Path, fake_training: FakeTraining) -> None:
    fake_training.too_fast = 0.01
    notes = Notes()
    result = run_study(corpus, tmp_path / "s", 12, reporter=notes)
    fast = [each for each in result.trials if each.settings["train.lr"] > 0.01]
    assert fast
    assert {each.state for each in fast} == {"diverged"}
    assert len(result.trials) == 12
    assert result.best.settings["train.lr"] <= 0.01
    assert any("counts as infinite" in note for note in notes.notes)
    fake_training.too_fast = 0.0
    assert run_study(corpus, tmp_path / "none", 2).best is None


def test_a_trial_without_enough_memory_counts_as_infinite(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    def run_out(number: int, step: int) -> None:
        if number == 1:
            raise OutOfMemory("There is not enough memory.")

    fake_training.before = run_out
    notes = Notes()
    result = run_study(corpus, tmp_path / "s", 3, reporter=notes)
    assert [each.state for each in result.trials].count("diverged") == 1
    assert len(result.trials) == 3
    assert any("not enough memory" in note for note in notes.notes)


def test_a_finished_training_whose_loss_was_not_stored_is_reported_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(Run, "summary", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_study(corpus, tmp_path / "s", 1, train__steps=4, train__eval_every=2)
    (trial,) = run_study(corpus, tmp_path / "s", 1, train__steps=4, train__eval_every=2).trials
    assert (trial.folder, trial.step) == ("trial-0", 4)
    (stored,) = finished_trials(study_in(tmp_path / "s"))
    assert sorted(stored.intermediate_values) == [2, 4]


def test_settings_that_do_not_fit_together_are_skipped(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    space = {"model.d_model": "16,20,24", "model.n_heads": "2,5,8"}
    result = run_study(corpus, tmp_path / "s", 14, space)
    passed = [each for each in result.trials if each.state == "skipped"]
    assert passed
    assert all(each.settings["model.d_model"] % each.settings["model.n_heads"] for each in passed)
    assert len({folder for folder, _ in fake_training.asked}) == len(fake_training.asked)
    trained = Counter((config.model.d_model, config.model.n_heads) for _, config in fake_training.asked)
    assert max(trained.values()) == 1, "equal settings are trained once"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Stopped(15, 3)])
def test_an_interrupted_study_resumes_its_trial_and_ends_as_if_it_had_not_been(
    interruption: BaseException, corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    whole = run_study(corpus, tmp_path / "whole", 9)

    def interrupt(number: int, step: int) -> None:
        if (number, step) == (len(whole.trials) + 3, 16):
            raise interruption

    fake_training.before = interrupt
    with pytest.raises(type(interruption)):
        run_study(corpus, tmp_path / "s", 9)
    assert (tmp_path / "s" / "best.yaml").is_file(), "what there is by then is written"
    notes = Notes()
    result = run_study(corpus, tmp_path / "s", 9, reporter=notes)
    assert [(each.loss, each.state, each.settings) for each in result.trials] == [
        (each.loss, each.state, each.settings) for each in whole.trials
    ]
    assert [folder.name for folder, _ in fake_training.asked[12:14]] == ["trial-3", "trial-3"]
    assert any("trial 4 retries" in note for note in notes.notes)
    study = study_in(tmp_path / "s")
    taken = next(trial for trial in finished_trials(study) if trial.user_attrs[FOLDER] == "trial-3")
    assert sorted(taken.intermediate_values) == [8, 16, 24], "what was validated before is told again"


def test_a_finished_study_trains_nothing_unless_more_trials_are_wanted(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    run_study(corpus, tmp_path / "s", 4)
    assert len(run_study(corpus, tmp_path / "s", 4).trials) == len(fake_training.asked) == 4
    assert len(run_study(corpus, tmp_path / "s", 6).trials) == len(fake_training.asked) == 6


def test_the_configured_trial_is_found_whatever_digits_the_configuration_has(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    result = run_study(corpus, tmp_path / "s", 2, train__lr=0.00123456)
    assert result.configured == result.trials[0]
    assert result.configured.settings["train.lr"] == 0.001235


def test_choices_are_values_of_the_configuration(corpus: Path, tmp_path: Path, fake_training: FakeTraining) -> None:
    """Also if a number is written without its point, and a network by another string."""
    space = {"train.label_smoothing": "0,0.1", "train.clip": [1, 2], "model.arch": ["sfs", "(sf)*2"]}
    config = small_config(corpus, model__arch="sfsf", train__clip=1.0)
    study = tune(config, TuneOptions("retrain", read_space(space, config, "retrain"), 1), tmp_path / "run", Silent())
    assert study.configured == study.trials[0]
    assert study.configured.settings == {"train.label_smoothing": 0.0, "train.clip": 1.0, "model.arch": "sfsf"}


def test_settings_unfit_for_the_text_are_refused_or_skipped(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    beyond = {"model.cutoffs": [[], [5, 5000]], "data.batch_size": "4,1000000", "train.lr": "1e-3,1e-2"}
    with pytest.raises(
        ParnasError, match=r"2 of the values(.|\n)*model\.cutoffs \[5, 5000\](.|\n)*data\.batch_size 1000000"
    ):
        run_study(corpus, tmp_path / "a", 1, beyond)
    # What is tuned may mend what the text refuses of the configuration.
    mended = run_study(
        corpus, tmp_path / "c", 2, {"data.batch_size": "4,8", "train.lr": "1e-3,1e-2"}, data__batch_size=10**6
    )
    assert {each.state for each in mended.trials} == {"complete"}
    # Each by itself is right, and some together are not.
    most = len(prepare(small_config(corpus).data).tokens("train")) // 8 - 1
    space = {"data.batch_size": [4, most], "data.tgt_len": [8, 16], "train.lr": "1e-3,1e-2"}
    study = run_study(corpus, tmp_path / "b", 16, space)
    together = [
        each for each in study.trials if (each.settings["data.batch_size"], each.settings["data.tgt_len"]) == (most, 16)
    ]
    assert together
    assert {each.state for each in together} == {"skipped"}
    assert {config.data.tgt_len for _, config in fake_training.asked if config.data.batch_size == most} == {8}


def test_only_the_checkpoints_of_the_best_are_kept(corpus: Path, tmp_path: Path, fake_training: FakeTraining) -> None:
    fake_training.too_fast = 0.05
    result = run_study(corpus, tmp_path / "s", 15)
    with_checkpoints = [path.parent.name for path in (tmp_path / "s").glob("trial-*/checkpoints")]
    assert with_checkpoints == [result.best.folder]
    assert len(list((tmp_path / "s").glob("trial-*/metrics.jsonl"))) >= 10, "what they reached stays"


def test_the_first_of_equal_trials_is_the_best_whichever_ends_first(tmp_path: Path) -> None:
    """Two workers may train one network by two names."""
    study = optuna.create_study()
    trials = [study.ask(), study.ask()]
    objective = cast(TuningObjective, SimpleNamespace(folder=tmp_path))
    for trial in trials:
        trial.set_user_attr(FOLDER, f"trial-{trial.number}")
        (tmp_path / f"trial-{trial.number}" / "checkpoints").mkdir(parents=True)
    for trial in reversed(trials):
        study.tell(trial, 3.5)
        TuningObjective.drop_checkpoints(objective, study)
    assert [path.parent.name for path in tmp_path.glob("trial-*/checkpoints")] == ["trial-0"]


@pytest.mark.parametrize(
    ("settings", "space", "expected"),
    [
        ({}, {}, 1200),
        ({"search__uniform_fraction": 0.85}, {}, 1700),
        ({"search__estimator": "gdas"}, {}, 1500),
        ({}, {"search.uniform_fraction": "0.2..0.9"}, 1800),
        ({}, {"search.uniform_fraction": "0.6,1.0"}, 1500),
        ({}, {"search.uniform_fraction": "0.6,0.9,1.0"}, 1800),
        ({}, {"search.estimator": "uniform,soft"}, 1500),
        ({"search__uniform_fraction": 1.0}, {}, 1500),
    ],
)
def test_no_search_is_pruned_before_alpha_is_frozen_in_any(
    settings: dict[str, Any], space: dict[str, str], expected: int
) -> None:
    config = Config().replace(search__steps=2000, **settings)
    assert first_pruning_step(config, "search", read_space(space, config, "search") if space else {}) == expected


def test_the_median_is_of_five_that_reached_the_step(corpus: Path, tmp_path: Path) -> None:
    """Diverged trials have ended, but did not reach that step."""
    config = small_config(corpus)
    options = TuneOptions("retrain", read_space(SPACE, config, "retrain"), 9)
    study = optuna.create_study(pruner=make_pruner(config, options))
    for number in range(6):
        trial = study.ask()
        if number < 4:
            study.tell(trial, math.inf)
        else:
            trial.report(1.0 + number, 20)
            assert not trial.should_prune(), "one is no median"
            study.tell(trial, 1.0 + number)


# Importance.


def make_trials(count: int, value) -> list[optuna.trial.FrozenTrial]:
    spread = {"train.lr": optuna.distributions.FloatDistribution(0, 1)}
    spread["model.dropout"] = optuna.distributions.FloatDistribution(0, 1)
    trials = []
    for number in range(count):
        params = {"train.lr": number / count, "model.dropout": (number * 7 % count) / count}
        state, loss = value(params)
        values = {"intermediate_values": {8: 9.0}} if loss is None else {"value": loss}
        trials.append(optuna.create_trial(params=params, distributions=spread, state=state, **values))
    return trials


COMPLETE, PRUNED = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED


def test_importance_is_that_of_the_setting_that_matters() -> None:
    shares = importance(
        make_trials(40, lambda p: (COMPLETE, p["train.lr"])), SPACE.fromkeys(["train.lr", "model.dropout"])
    )
    assert shares["train.lr"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)


def test_pruned_and_diverged_trials_count_as_the_worst() -> None:
    """With only the complete ones, the learning rate would not seem to matter."""

    def value(params: dict[str, float]) -> tuple[object, float | None]:
        if params["train.lr"] > 0.7:
            return COMPLETE, math.inf
        return (PRUNED, None) if params["train.lr"] > 0.3 else (COMPLETE, 5.0 + params["model.dropout"] / 100)

    keys = SPACE.fromkeys(["train.lr", "model.dropout"])
    trials = make_trials(40, value)
    assert importance(trials, keys)["train.lr"] > 0.5
    ended = [trial for trial in make_trials(120, value) if trial.state == COMPLETE and trial.value < 9]
    assert importance(ended, keys)["train.lr"] < 0.3
    for trial in trials:
        if trial.state == PRUNED:
            trial.intermediate_values = {}
    assert importance(trials, keys) == importance([each for each in trials if each.state == COMPLETE], keys), (
        "what was skipped says nothing"
    )


@pytest.mark.parametrize("finite", [5, 10, 20])
def test_the_best_are_never_more_than_the_complete_ones(finite: int) -> None:
    trials = make_trials(60, lambda p: (COMPLETE, p["train.lr"] if p["train.lr"] * 60 < finite else math.inf))
    assert importance(trials, SPACE.fromkeys(["train.lr", "model.dropout"]))["train.lr"] > 0.7


@pytest.mark.parametrize(("count", "finite"), [(19, 19), (30, 4)])
def test_few_trials_give_no_importance(count: int, finite: int) -> None:
    trials = make_trials(count, lambda p: (COMPLETE, p["train.lr"] if p["train.lr"] * count < finite else math.inf))
    assert importance(trials, SPACE.fromkeys(["train.lr", "model.dropout"])) is None


# Real trainings.


def test_trials_are_trainings_and_the_best_file_trains(corpus: Path, tmp_path: Path) -> None:
    from parnas.training.retrain import retrain

    result = run_study(corpus, tmp_path / "s", 2, {"train.lr": "log:1e-3..1e-1"}, train__steps=6)
    result.write(tmp_path / "s")
    config = load_config(tmp_path / "s" / "best.yaml")
    again = retrain(config, tmp_path / "again", Silent())
    assert again.summary().valid.loss == result.best.loss
    assert Run(tmp_path / "s" / result.best.folder).config() == again.config()


def test_a_search_is_tuned_by_the_loss_of_its_derived_network(corpus: Path, tmp_path: Path) -> None:
    space = {"search.alpha_lr": "log:1e-3..1e-1", "search.tau_schedule": "linear,cosine"}
    result = run_study(corpus, tmp_path / "s", 2, space, phase="search")
    for each in result.trials:
        run = Run(tmp_path / "s" / each.folder)
        assert run.kind() == "search"
        assert each.loss == run.summary().argmax.loss
        assert run.config().search.tau_schedule == each.settings["search.tau_schedule"]
    assert result.config.search.alpha_lr == result.best.settings["search.alpha_lr"]


# Folders, storages and several workers.


def test_a_study_that_cannot_be_opened_leaves_the_folder_free(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    with pytest.raises(ParnasError, match="nonsense:/x"):
        run_study(corpus, tmp_path / "run", 1, storage="nonsense:/x")
    url = f"sqlite:///{tmp_path}/s.db"
    assert len(run_study(corpus, tmp_path / "run", 1, storage=url).trials) == 1


def test_a_study_whose_folder_was_moved_is_resumed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tuning.TRAIN, "retrain", training := FakeTraining())
    before = run_study(corpus, tmp_path / "s", 3)
    (tmp_path / "s").rename(tmp_path / "moved")
    after = run_study(corpus, tmp_path / "moved", 4)
    assert len(training.asked) == 4
    assert after.trials[:3] == before.trials


def test_the_training_of_another_study_is_refused(corpus: Path, tmp_path: Path) -> None:
    """The file of the study was removed, or another study was given the same folder."""
    space = {"train.lr": "log:1e-3..1e-1"}
    run_study(corpus, tmp_path / "s", 1, space, train__steps=2)
    (tmp_path / "s" / STORAGE).unlink()
    changed = Run(tmp_path / "s" / "trial-0").config().replace(train__lr=0.05)
    (tmp_path / "s" / "trial-0" / "config.yaml").write_text(dump_config(changed))
    with pytest.raises(ParnasError, match=r"trial-0(.|\n)*train\.lr"):
        run_study(corpus, tmp_path / "s", 1, space, train__steps=2)


@pytest.mark.slow
def test_two_workers_share_a_study(corpus: Path, tmp_path: Path) -> None:
    log, folder, url = tmp_path / "log", tmp_path / "s", STORAGES[0].format(tmp_path)
    workers = [StudyWorker(tmp_path / f"output-{each}", work, url, corpus, folder, log) for each in range(2)]
    for worker in workers:
        worker.result()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len({place for place, _ in lines}) == len(lines), "two trained in one folder"
    assert len(lines) <= 7
    assert len(list(folder.glob("trial-*"))) == len(lines)


def test_a_retried_trial_whose_folder_is_elsewhere_begins_in_one_of_its_own(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    """Its worker may have been on another machine, or may still live."""
    storage = f"sqlite:///{tmp_path}/s.db"

    def interrupt(number: int, step: int) -> None:
        if number == 1:
            raise KeyboardInterrupt

    fake_training.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_study(corpus, tmp_path / "there", 3, storage=storage)
    result = run_study(corpus, tmp_path / "here", 3, storage=storage)
    assert [each.folder for each in result.trials] == ["trial-0", "trial-2", "trial-3"]
    assert (tmp_path / "here" / "trial-2").is_dir()


@pytest.mark.parametrize(
    ("changes", "retried_in"), [({"runtime__threads": 2}, "trial-1"), ({"runtime__compile": True}, "trial-2")]
)
def test_a_retried_trial_of_another_worker_is_resumed_if_the_training_can_be(
    changes: dict[str, object], retried_in: str, corpus: Path, tmp_path: Path, fake_training: FakeTraining
) -> None:
    """A training can be resumed with another number of threads, and not with another compilation."""

    def interrupt(number: int, step: int) -> None:
        if number == 1 and step == 24:  # after the first checkpoint
            raise KeyboardInterrupt

    fake_training.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_study(corpus, tmp_path / "s", 3)
    result = run_study(corpus, tmp_path / "s", 3, **changes)
    assert [each.folder for each in result.trials] == ["trial-0", retried_in, "trial-3"]


def test_a_folder_that_another_worker_starts_meanwhile_is_shared(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Run.refuse_used

    def started_meanwhile(run: Run) -> None:
        if run.folder == tmp_path / "s":
            run.folder.mkdir()
            run.folder.joinpath("config.yaml").write_text(dump_config(small_config(corpus, model__arch="sfs")))
        refuse(run)

    monkeypatch.setattr(Run, "refuse_used", started_meanwhile)
    assert len(run_study(corpus, tmp_path / "s", 1).trials) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(ParnasError, match="other"):
        run_study(corpus, tmp_path / "other", 1)


# The fingerprint.


def test_a_study_of_another_configuration_is_refused(corpus: Path, tmp_path: Path, fake_training: FakeTraining) -> None:
    storage = f"sqlite:///{tmp_path}/s.db"
    run_study(corpus, tmp_path / "a", 1, storage=storage)
    run_study(corpus, tmp_path / "b", 2, storage=storage, search__lr=0.5, train__log_every=1)
    with pytest.raises(ParnasError, match=r"model\.d_inner: 32 before, 64 now"):
        run_study(corpus, tmp_path / "c", 2, storage=storage, model__d_inner=64)
    with pytest.raises(ParnasError, match=r"space: .*before"):
        run_study(corpus, tmp_path / "d", 2, {"train.lr": "0.1..0.2"}, storage=storage)
    with pytest.raises(ParnasError, match=r"model\.d_inner"):
        run_study(corpus, tmp_path / "a", 2, storage=storage, model__d_inner=64)
