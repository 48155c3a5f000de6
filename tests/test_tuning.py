"""A study of settings: which trials count, which end early, how it goes on, and what it leaves."""

import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from conftest import small_config
from training_helpers import Notes
from tuning_helpers import SPACE, Pretending, loss_of, pretending, run_study

from parnas.config import Config, load_config
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.figures.tuning import draw_tuning
from parnas.nas.storage import open_storage
from parnas.nas.tuning import importance, tune
from parnas.nas.tuning_space import read_space
from parnas.nas.tuning_trials import PLACE, Demands, Tuning, first_telling_step
from parnas.nas.workers import finished
from parnas.run import Run
from parnas.training.reporter import Silent
from parnas.training.stopping import Stopped

pytestmark = pytest.mark.usefixtures("impatient")
__all__ = ["pretending"]


def study_in(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name=folder.name, storage=open_storage(f"journal:{folder}/study.log"))


def test_the_best_is_the_least_loss_and_the_first_is_as_configured(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    found = run_study(corpus, tmp_path / "s", 12, prune=False)
    losses = [loss_of(config) for _, config in pretending.asked]
    assert [each.loss for each in found.trials] == pytest.approx(losses)
    assert found.best is not None
    assert found.best.loss == min(losses)
    assert loss_of(found.config) == min(losses)
    assert found.configured == found.trials[0]
    assert found.trials[0].settings == {"train.lr": 2e-3, "model.dropout": 0.1, "model.norm": "post"}
    assert {config.model.norm for _, config in pretending.asked} == {"pre", "post"}


def test_numbers_that_are_drawn_can_be_read(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    run_study(corpus, tmp_path / "s", 6)
    for _, config in pretending.asked:
        assert float(f"{config.train.lr:.4g}") == config.train.lr
        assert 1e-4 <= config.train.lr <= 1e-1


def test_hopeless_trials_end_early_and_count(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    """Not before five are whole, nor by the last validation; their state, step and loss are told."""
    found = run_study(corpus, tmp_path / "s", 20)
    pruned = [each for each in found.trials if each.state == "pruned"]
    assert len(found.trials) == 20
    assert 1 <= len(pruned) <= 15
    assert {each.step for each in pruned} <= {8, 16}
    assert [each.state for each in found.trials[:5]] == ["complete"] * 5
    complete = [each.loss for each in found.trials if each.state == "complete"]
    assert all(each.loss > min(complete) for each in pruned)
    assert found.best.state == "complete"
    assert not (tmp_path / "s" / pruned[0].folder / "summary.json").exists()
    assert "ended early after step" in (tmp_path / "s" / pruned[0].folder / "run.log").read_text()
    whole = run_study(corpus, tmp_path / "whole", 20, prune=False)
    assert whole.counts()["complete"] == 20


def test_settings_that_ended_early_are_not_trained_again(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    space = {"train.lr": "0.002,0.003,0.03", "model.dropout": "0,0.1,0.4", "model.norm": "pre,post"}
    found = run_study(corpus, tmp_path / "s", 40, space)
    drawn = [tuple(each.settings.values()) for each in found.trials]
    early = {settings for each, settings in zip(found.trials, drawn, strict=True) if each.state == "pruned"}
    assert any(drawn.count(settings) > 1 for settings in early)
    assert len(pretending.asked) == len(set(drawn))
    assert found.counts()["passed over"] == 0
    assert all(each.loss is not None and each.step in (8, 16) for each in found.trials if each.state == "pruned")
    found.write(tmp_path / "s")
    assert draw_tuning(tmp_path / "s")


def test_a_trial_that_diverges_is_survived_and_never_the_best(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    pretending.too_fast = 0.01
    notes = Notes()
    found = run_study(corpus, tmp_path / "s", 12, reporter=notes)
    fast = [each for each in found.trials if each.settings["train.lr"] > 0.01]
    assert fast
    assert {each.state for each in fast} == {"diverged"}
    assert len(found.trials) == 12
    assert found.best.settings["train.lr"] <= 0.01
    assert any("It counts as infinite here" in note for note in notes.notes)
    pretending.too_fast = 0.0
    assert run_study(corpus, tmp_path / "none", 2).best is None


def test_a_training_that_ended_untold_is_told_whole(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(Tuning, "keep_best", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            run_study(corpus, tmp_path / "s", 1, train__steps=4, train__eval_every=2)
    (found,) = run_study(corpus, tmp_path / "s", 1, train__steps=4, train__eval_every=2).trials
    assert (found.folder, found.step) == ("trial-0", 4)
    (told,) = finished(study_in(tmp_path / "s"))
    assert sorted(told.intermediate_values) == [2, 4]


def test_settings_that_do_not_go_together_are_passed_over(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    space = {"model.d_model": "16,20,24", "model.n_heads": "2,5,8"}
    found = run_study(corpus, tmp_path / "s", 14, space)
    passed = [each for each in found.trials if each.state == "passed over"]
    assert passed
    assert all(each.settings["model.d_model"] % each.settings["model.n_heads"] for each in passed)
    assert len({folder for folder, _ in pretending.asked}) == len(pretending.asked)
    trained = Counter((config.model.d_model, config.model.n_heads) for _, config in pretending.asked)
    assert max(trained.values()) == 1, "equal settings are trained once"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Stopped(15, 3)])
def test_an_interrupted_study_takes_its_trial_up_and_ends_as_if_it_had_not_been(
    interruption: BaseException, corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    whole = run_study(corpus, tmp_path / "whole", 9)

    def interrupt(number: int, step: int) -> None:
        if (number, step) == (len(whole.trials) + 3, 16):
            raise interruption

    pretending.before = interrupt
    with pytest.raises(type(interruption)):
        run_study(corpus, tmp_path / "s", 9)
    assert (tmp_path / "s" / "best.yaml").is_file(), "what there is by then is written"
    notes = Notes()
    found = run_study(corpus, tmp_path / "s", 9, reporter=notes)
    assert [(each.loss, each.state, each.settings) for each in found.trials] == [
        (each.loss, each.state, each.settings) for each in whole.trials
    ]
    assert [folder.name for folder, _ in pretending.asked[12:14]] == ["trial-3", "trial-3"]
    assert any("again, which trial 3 did not finish" in note for note in notes.notes)
    study = study_in(tmp_path / "s")
    taken = next(trial for trial in finished(study) if trial.user_attrs[PLACE] == "trial-3")
    assert sorted(taken.intermediate_values) == [8, 16, 24], "what was validated before is told again"


def test_a_finished_study_trains_nothing_and_more_trials_go_on(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    run_study(corpus, tmp_path / "s", 4)
    assert len(run_study(corpus, tmp_path / "s", 4).trials) == len(pretending.asked) == 4
    assert len(run_study(corpus, tmp_path / "s", 6).trials) == len(pretending.asked) == 6


def test_the_trial_as_configured_is_told_whatever_digits_the_configuration_has(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    found = run_study(corpus, tmp_path / "s", 2, train__lr=0.00123456)
    assert found.configured == found.trials[0]
    assert found.configured.settings["train.lr"] == 0.001235


def test_choices_are_what_the_configuration_has(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    """Also where a number is written without its point, and a network by another string."""
    space = {"train.label_smoothing": "0,0.1", "train.clip": [1, 2], "model.arch": ["sfs", "(sf)*2"]}
    config = small_config(corpus, model__arch="sfsf", train__clip=1.0)
    study = tune(config, Demands("retrain", read_space(space, config, "retrain"), 1), tmp_path / "run", Silent())
    assert study.configured == study.trials[0]
    assert study.configured.settings == {"train.label_smoothing": 0.0, "train.clip": 1.0, "model.arch": "sfsf"}


def test_what_the_text_refuses_is_told_before_and_passed_over_when_drawn(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    beyond = {"model.cutoffs": [[], [5, 5000]], "data.batch_size": "4,1000000", "train.lr": "1e-3,1e-2"}
    with pytest.raises(
        ParnasError, match=r"refuses 2 of what(.|\n)*model\.cutoffs \[5, 5000\](.|\n)*1000000: .*too few"
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
    study = run_study(corpus, tmp_path / "b", 30, space)
    together = [
        each for each in study.trials if (each.settings["data.batch_size"], each.settings["data.tgt_len"]) == (most, 16)
    ]
    assert together
    assert {each.state for each in together} == {"passed over"}
    assert {config.data.tgt_len for _, config in pretending.asked if config.data.batch_size == most} == {8}


def test_checkpoints_of_the_best_alone_are_kept(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    pretending.too_fast = 0.05
    found = run_study(corpus, tmp_path / "s", 15)
    kept = [path.parent.name for path in (tmp_path / "s").glob("trial-*/checkpoints")]
    assert kept == [found.best.folder]
    assert len(list((tmp_path / "s").glob("trial-*/metrics.jsonl"))) >= 10, "what they reached stays"


def test_of_equal_trials_the_first_is_kept_whichever_ends_first(tmp_path: Path) -> None:
    """As the study names it the best; two workers may train one network by two names."""
    study = optuna.create_study()
    first, second = study.ask(), study.ask()
    for number in (0, 1):
        (tmp_path / f"trial-{number}" / "checkpoints").mkdir(parents=True)
    tuning = cast(Tuning, SimpleNamespace(folder=tmp_path))
    assert Tuning.keep_best(tuning, second, tmp_path / "trial-1", 3.5) == 3.5
    second.set_user_attr(PLACE, "trial-1")
    study.tell(second, 3.5)
    assert Tuning.keep_best(tuning, first, tmp_path / "trial-0", 3.5) == 3.5
    assert [path.parent.name for path in tmp_path.glob("trial-*/checkpoints")] == ["trial-0"]


@pytest.mark.parametrize(
    ("settings", "space", "expected"),
    [
        ({}, {}, 1200),
        ({"search__fair_share": 0.85}, {}, 1700),
        ({"search__estimator": "gdas"}, {}, 1500),
        ({}, {"search.fair_share": "0.2..0.9"}, 1800),
        ({}, {"search.estimator": "uniform,soft"}, 1500),
        ({"search__fair_share": 1.0}, {}, 1500),
    ],
)
def test_no_search_is_ended_before_alpha_rests_in_any(
    settings: dict[str, Any], space: dict[str, str], expected: int
) -> None:
    config = Config().replace(search__steps=2000, **settings)
    assert first_telling_step(config, "search", read_space(space, config, "search") if space else {}) == expected


def test_the_median_is_of_five_that_came_as_far(corpus: Path, tmp_path: Path) -> None:
    """Trials that diverged have come to their end, but not to that step."""
    config = small_config(corpus)
    demands = Demands("retrain", read_space(SPACE, config, "retrain"), 9)
    study = optuna.create_study(pruner=Tuning(config, demands, tmp_path, prepare(config.data), {}, Silent()).pruner)
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
    found = []
    for number in range(count):
        params = {"train.lr": number / count, "model.dropout": (number * 7 % count) / count}
        state, loss = value(params)
        values = {"intermediate_values": {8: 9.0}} if loss is None else {"value": loss}
        found.append(optuna.create_trial(params=params, distributions=spread, state=state, **values))
    return found


COMPLETE, PRUNED = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED


def test_importance_is_that_of_the_setting_that_matters() -> None:
    shares = importance(
        make_trials(40, lambda p: (COMPLETE, p["train.lr"])), SPACE.fromkeys(["train.lr", "model.dropout"])
    )
    assert shares["train.lr"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)


def test_trials_that_ended_early_or_diverged_count_as_the_worst() -> None:
    """By those that came to their end alone, the learning rate would not seem to matter."""

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
        "what was passed over says nothing"
    )


@pytest.mark.parametrize("finite", [5, 10, 20])
def test_the_best_are_never_more_than_came_to_their_end(finite: int) -> None:
    trials = make_trials(60, lambda p: (COMPLETE, p["train.lr"] if p["train.lr"] * 60 < finite else math.inf))
    assert importance(trials, SPACE.fromkeys(["train.lr", "model.dropout"]))["train.lr"] > 0.7


@pytest.mark.parametrize(("count", "finite"), [(19, 19), (30, 4)])
def test_few_trials_tell_no_importance(count: int, finite: int) -> None:
    trials = make_trials(count, lambda p: (COMPLETE, p["train.lr"] if p["train.lr"] * count < finite else math.inf))
    assert importance(trials, SPACE.fromkeys(["train.lr", "model.dropout"])) is None


# What training makes of it.


def test_trials_are_trainings_and_the_best_file_trains(corpus: Path, tmp_path: Path) -> None:
    from parnas.training.retrain import retrain

    found = run_study(corpus, tmp_path / "s", 2, {"train.lr": "log:1e-3..1e-1"}, train__steps=6)
    found.write(tmp_path / "s")
    config = load_config(tmp_path / "s" / "best.yaml")
    again = retrain(config, tmp_path / "again", Silent())
    assert again.summary()["valid"]["loss"] == found.best.loss
    assert Run(tmp_path / "s" / found.best.folder).config() == again.config()


def test_a_search_is_tuned_by_the_loss_of_its_derived_network(corpus: Path, tmp_path: Path) -> None:
    space = {"search.alpha_lr": "log:1e-3..1e-1", "search.tau_schedule": "linear,cosine"}
    found = run_study(corpus, tmp_path / "s", 2, space, phase="search")
    for each in found.trials:
        run = Run(tmp_path / "s" / each.folder)
        assert run.kind() == "search"
        assert each.loss == run.summary()["argmax"]["loss"]
        assert run.config().search.tau_schedule == each.settings["search.tau_schedule"]
    assert found.config.search.alpha_lr == found.best.settings["search.alpha_lr"]
