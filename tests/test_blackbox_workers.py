"""Workers of a shared study: who makes which trial, and what becomes of those of a dead one."""

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from blackbox_helpers import STORAGES, Counting, make_task, run_study
from optuna.trial import TrialState

import parnas.nas.workers as module
from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.nas.blackbox import blackbox, findings, open_study
from parnas.nas.workers import BEAT, Watch, beating, find_equal, finished
from parnas.training.reporter import Silent
from parnas.training.stopping import Stopped

pytestmark = pytest.mark.usefixtures("impatient")

WORKER = """
import os
import sys
import time
from pathlib import Path
sys.path.insert(0, {tests!r})
import parnas.nas.workers as module
from blackbox_helpers import Counting, make_task
from parnas.nas.blackbox import blackbox, open_study
from parnas.training.reporter import Silent
module.POLL_SECONDS = 0.02
url, log = sys.argv[1:]
task = make_task(Counting(Path(log), 0.03), 3)
study = open_study(url, "test", "tpe", task)
ask = study.ask
def ask_together():
    # Until each worker has a trial: neither shall make all of them before the other begins.
    trial = ask()
    Path(f"{{log}}.{{os.getpid()}}.asked").touch()
    while len(list(Path(log).parent.glob("*.asked"))) < 2:
        time.sleep(0.01)
    return trial
study.ask = ask_together
blackbox(study, task, 20, Silent())
"""


@pytest.mark.slow
@pytest.mark.parametrize("url", STORAGES)
def test_two_workers_make_all_trials_together(url: str, tmp_path: Path) -> None:
    """Both begin the same new study at once: no trial too many, no network twice, none lost."""
    url, log = url.format(tmp_path), tmp_path / "log"
    command = [sys.executable, "-c", WORKER.format(tests=str(Path(__file__).parent)), url, str(log)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    study = open_study(url, "test", "tpe", make_task(Counting(), 3))
    assert len(finished(study)) == 20
    assert not study.get_trials(states=(TrialState.RUNNING,))
    lines = [line.split() for line in log.read_text().splitlines()]
    networks = [network for network, _, _ in lines]
    assert len(set(networks)) == len(networks)
    assert sorted(networks) == sorted(finding.network for finding in findings(study))
    assert len({process for _, _, process in lines}) == 2, "one worker did everything"
    named = {trial.user_attrs["network"] for trial in finished(study)}
    assert set(networks) == named - {""}


def threads_at_once(count: int, body) -> None:
    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("url", STORAGES)
def test_the_last_place_is_taken_once(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers see one place left and all ask: three give their trials back."""
    asked = Counting(seconds=0.05)
    task = make_task(asked)
    url = url.format(tmp_path)
    studies = [open_study(url, "test", "tpe", task) for _ in range(4)]
    blackbox(studies[0], task, 4, Silent())
    barrier = threading.Barrier(4)

    def ask_together(index: int) -> None:
        trial_of = studies[index].ask

        def ask():
            barrier.wait(30)
            trial = trial_of()
            barrier.wait(30)
            return trial

        monkeypatch.setattr(studies[index], "ask", ask)
        blackbox(studies[index], task, 5, Silent())

    threads_at_once(4, ask_together)
    assert len(finished(studies[0])) == 5
    assert Counter(trial.state for trial in studies[0].get_trials())[TrialState.FAIL] == 3


@pytest.mark.parametrize("url", STORAGES)
def test_equal_networks_at_once_are_evaluated_once(url: str, tmp_path: Path) -> None:
    """Of four trials that run at once and name one network, the first evaluates, and the others take its values."""
    task = make_task(Counting())
    study = open_study(url.format(tmp_path), "test", "tpe", task)
    trials = [study.ask() for _ in range(4)]
    found: dict[int, int | None] = {}

    def announce_and_look(index: int) -> None:
        trial = trials[index]
        time.sleep(0.05 * (3 - index))  # the earliest announces last
        trial.set_user_attr("network", "sf")
        equal = find_equal(study, trial.number, "sf", Watch(), "network")
        found[index] = None if equal is None else equal.number
        trial.set_user_attr(*(("source", "trained") if equal is None else ("reused_from", equal.number)))
        study.tell(trial, [1.0, 2.0])

    threads_at_once(4, announce_and_look)
    assert found == {0: None, 1: 0, 2: 0, 3: 0}


@pytest.mark.parametrize("url", STORAGES)
def test_the_place_of_a_dead_worker_is_free_again(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    task = make_task(Counting())
    study = open_study(url.format(tmp_path), "test", "tpe", task)
    dead = study.ask()
    dead.set_user_attr("network", "sf")
    unheard = study.ask()
    blackbox(study, task, 6, Silent())
    assert len(finished(study)) == 6
    states = {trial.number: trial.state for trial in study.get_trials()}
    assert states[dead.number] == states[unheard.number] == TrialState.FAIL


def test_the_last_place_of_a_dead_worker_is_waited_for_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.3)
    url = f"journal:{tmp_path}/s.log"
    study, _ = run_study(url, 3)
    dead = study.ask()
    run_study(url, 4)
    assert len(finished(study)) == 4
    assert [trial.number for trial in study.get_trials(states=(TrialState.FAIL,))] == [dead.number]


def test_a_worker_says_that_it_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.3)
    task, notes, reporter = make_task(Counting()), [], Silent()
    study = open_study(f"journal:{tmp_path}/s.log", "test", "tpe", task)
    study.ask()
    monkeypatch.setattr(reporter, "note", notes.append)
    blackbox(study, task, 1, reporter)
    assert [note for note in notes if "waiting" in note] == ["other workers have the last trials; waiting for them"]


def test_a_living_worker_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, module.STALE_SECONDS / 3)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.__next__))
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", make_task(Counting()))
    trial, watch = study.ask(), Watch()
    for number in range(20):
        trial.set_user_attr(BEAT, number)
        watch.give_up_stale(study)
    assert study.get_trials()[0].state == TrialState.RUNNING
    for _ in range(4):
        watch.give_up_stale(study)
    assert study.get_trials()[0].state == TrialState.FAIL


def test_a_worker_beats_as_long_as_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", make_task(Counting()))
    trial = study.ask()
    with beating(study, trial, Watch()):
        for _ in range(3000):
            if study.get_trials()[0].user_attrs.get(BEAT, 0) >= 3:
                break
            time.sleep(0.01)
    last = study.get_trials()[0].user_attrs[BEAT]
    assert last >= 3
    time.sleep(0.1)
    assert study.get_trials()[0].user_attrs[BEAT] == last


def test_a_worker_that_was_given_up_goes_on_with_another_trial(tmp_path: Path) -> None:
    """Its own trial counts for nothing, so that it is not counted twice."""

    class Suspended(Counting):
        def __call__(self, number: int, architecture: Architecture) -> float:
            if number == 1:
                study.tell(1, state=TrialState.FAIL)
            return super().__call__(number, architecture)

    task = make_task(Suspended())
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", task)
    notes: list[str] = []
    reporter = Silent()
    reporter.note = notes.append  # type: ignore[method-assign]
    blackbox(study, task, 4, reporter)
    assert [trial.state for trial in study.get_trials()].count(TrialState.FAIL) == 1
    assert len(finished(study)) == 4
    assert [note for note in notes if note.startswith("trial 1")] == [
        "trial 1 had been given up by another worker, which heard no beat of it"
    ]


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), Stopped(15, 3), ParnasError(), MemoryError()])
def test_a_trial_that_breaks_off_is_not_left_running(trouble: BaseException, tmp_path: Path) -> None:
    class Breaking(Counting):
        def __call__(self, number: int, architecture: Architecture) -> float:
            if number == 2:
                raise trouble
            return super().__call__(number, architecture)

    url = f"sqlite:///{tmp_path}/s.db"
    task = make_task(Breaking())
    study = open_study(url, "test", "tpe", task)
    with pytest.raises(type(trouble)):
        blackbox(study, task, 6, Silent())
    assert study.get_trials()[2].state == TrialState.FAIL
    study, _ = run_study(url, 6)
    assert len(finished(study)) == 6


# What is lost.


@pytest.mark.parametrize("url", STORAGES)
def test_the_network_of_a_dead_worker_is_tried_again_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    asked = Counting()
    task = make_task(asked, 6)
    study = open_study(url.format(tmp_path), "test", "tpe", task)
    dead = study.ask()
    for block in range(1, 7):
        dead.suggest_categorical(f"block {block}", ["s", "f", "i"])
    network = "".join(dead.params.values()).replace("i", "")
    dead.set_user_attr("network", network)
    dead.set_user_attr("source", "counted")
    notes: list[str] = []
    reporter = Silent()
    monkeypatch.setattr(reporter, "note", notes.append)
    blackbox(study, task, 1, reporter)  # it holds the only place
    blackbox(study, task, 9, Silent())
    assert len(finished(study)) == 9
    (retry,) = [trial for trial in study.get_trials() if "retries" in trial.user_attrs]
    assert retry.user_attrs["retries"] == dead.number
    assert retry.params == dead.params
    assert asked.asked.count(network) == 1
    assert f"trial {retry.number}: {network} again, which trial {dead.number} did not finish" in notes


@pytest.mark.parametrize("url", STORAGES)
def test_two_workers_that_try_again_at_once_evaluate_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later gives its trial back, without waiting for the earlier to end."""
    asked = Counting(seconds=0.3)
    task = make_task(asked)
    studies = [open_study(url.format(tmp_path), "test", "tpe", task) for _ in range(2)]
    broken = make_task(Breaking(RuntimeError, {0}))
    with pytest.raises(RuntimeError):
        blackbox(studies[0], broken, 4, Silent())
    (lost,) = studies[0].get_trials()
    barrier = threading.Barrier(2)

    def ask_together(index: int) -> None:
        trial_of, first = studies[index].ask, [True]

        def ask():
            trial = trial_of()
            if first:
                first.clear()
                barrier.wait(30)
            return trial

        monkeypatch.setattr(studies[index], "ask", ask)
        blackbox(studies[index], task, 4, Silent())

    threads_at_once(2, ask_together)
    retries = [trial for trial in studies[0].get_trials() if "retries" in trial.user_attrs]
    assert [trial.user_attrs["network"] for trial in retries] == [lost.user_attrs["network"]] * 2
    assert [trial.state for trial in retries] == [TrialState.COMPLETE, TrialState.FAIL]
    assert retries[1].datetime_complete < retries[0].datetime_complete
    assert max(Counter(asked.asked).values()) == 1
    assert len(finished(studies[0])) == 4


class Breaking(Counting):
    """Raises at certain trials, or whenever it is asked for certain networks."""

    def __init__(self, trouble: type[BaseException], at: set[int | str]) -> None:
        super().__init__()
        self.trouble, self.at = trouble, at

    def __call__(self, number: int, architecture: Architecture) -> float:
        value = super().__call__(number, architecture)
        if number in self.at or self.asked[-1] in self.at:
            raise self.trouble
        return value


def go_on_until_done(url: str, asked: Counting, trials: int, sampler: str = "tpe") -> tuple[optuna.Study, int]:
    """Give the same command again and again; with how often it broke off."""
    task = make_task(asked)
    for broke_off in range(20):
        study = open_study(url, "test", sampler, task)
        try:
            blackbox(study, task, trials, Silent())
        except (MemoryError, KeyboardInterrupt, Stopped):
            continue
        return study, broke_off
    raise AssertionError("the study does not end")


def test_a_network_that_ends_its_workers_is_passed_over_after_three(tmp_path: Path) -> None:
    """Also where it is drawn again."""
    url = f"sqlite:///{tmp_path}/s.db"
    study, broke_off = go_on_until_done(url, asked := Breaking(MemoryError, {"s"}), 30)
    assert asked.asked.count("s") == broke_off == 3
    assert len(finished(study)) == 30
    assert "s" not in [finding.network for finding in findings(study)]
    named = [trial for trial in study.get_trials() if trial.user_attrs["network"] == "s"]
    assert Counter(trial.state for trial in named)[TrialState.FAIL] == 3
    assert {trial.state for trial in named} <= {TrialState.FAIL, TrialState.PRUNED}
    assert any(trial.state == TrialState.PRUNED for trial in named)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Stopped(15, 3)])
@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_worker_interrupted_in_trials_makes_the_study_of_one_that_was_not(
    sampler: str, interruption: BaseException, tmp_path: Path
) -> None:
    """However often, and also several times in trials of one network."""
    monkey = Breaking(interruption, {0, 3, 4, 5, 6, 12, 13})
    parts, broke_off = go_on_until_done(f"journal:{tmp_path}/a.log", monkey, 64, sampler)
    whole, _ = go_on_until_done(f"journal:{tmp_path}/b.log", Counting(), 64, sampler)
    assert broke_off >= 5
    told = [[(trial.params, trial.values, trial.state) for trial in finished(study)] for study in (parts, whole)]
    assert told[0] == told[1]


def test_a_watch_that_could_not_look_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker was suspended, or the storage away, the others may have been so too."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", make_task(Counting()))
    study.ask()
    watch = Watch()

    def look(*times: float) -> TrialState:
        for clock[0] in times:
            watch.give_up_stale(study)
        return study.get_trials()[0].state

    assert look(0, 20, 300, 320, 340, 360, 380, 400, 419) == TrialState.RUNNING
    assert look(421) == TrialState.FAIL
