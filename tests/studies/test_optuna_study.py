"""Shared studies: storages, workers that are interrupted, killed or lose the server, and retried trials."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from helpers.blackbox_helpers import STORAGES, BreakingPerplexity, FakePerplexity, make_task, work
from helpers.postgresql_server import Server, find_binaries
from helpers.study_workers import StudyWorker
from helpers.training_helpers import Notes
from helpers.tuning_helpers import studies_in_memory
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

import parnas.studies.optuna_study as module
from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.nas.cost import count_costs
from parnas.studies.blackbox import blackbox, evaluated_networks, open_study
from parnas.studies.optuna_study import NAME, finished_trials, open_storage
from parnas.training.interruptions import Stopped
from parnas.training.progress import Silent

__all__ = ["studies_in_memory"]


# Storages.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("study.db", "--storage"),
        ("sqlite://", "--storage"),
        ("sqlite:///", "--storage"),
        ("journal:", "--storage"),
        ("abacus://host/base", "--storage"),
        ("postgresql://me@host:PORT/base", "--storage"),
        ("mysql+pymysql://me:secret@localhost/base", "pip install pymysql"),
    ],
)
def test_storages_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(ParnasError, match=message) as refusal:
        open_storage(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_without_a_driver_names_the_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ParnasError, match=r"psycopg\[binary\]") as refusal:
        open_storage(f"{kind}://me:secret@localhost/base")
    assert "secret" not in str(refusal.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    (tmp_path / "notes").write_text("not a database, but some text of more than a hundred bytes" * 20)
    with pytest.raises(ParnasError):
        open_storage(f"sqlite:///{tmp_path}/notes")


def test_folders_of_storages_are_made(tmp_path: Path) -> None:
    for url in STORAGES:
        open_storage(url.format(tmp_path / url[:3] / "deep"))


def test_an_sqlite_trial_ends_once_if_two_workers_end_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gives it up while the other stores its values: no transaction comes between reading and writing a state."""
    check = RDBStorage.check_trial_is_updatable

    def check_slowly(*arguments: object) -> None:
        check(*arguments)
        time.sleep(0.1)

    monkeypatch.setattr(RDBStorage, "check_trial_is_updatable", check_slowly)
    studies = [open_study(f"sqlite:///{tmp_path}/s.db", "a", "tpe", make_task(FakePerplexity())) for _ in range(2)]
    trial, outcomes, barrier = studies[0].ask(), [], threading.Barrier(2)

    def end(study: optuna.Study, values: list[float] | None, state: TrialState) -> None:
        barrier.wait(10)
        try:
            study.tell(trial.number, values, state)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            return
        outcomes.append(state)

    ends = [(studies[0], [1.0, 2.0], TrialState.COMPLETE), (studies[1], None, TrialState.FAIL)]
    threads = [threading.Thread(target=end, args=each) for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert outcomes == [studies[0].get_trials()[0].state]


def test_the_lock_of_a_killed_worker_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the path of the journal is relative."""
    monkeypatch.setattr(module, "_JOURNAL_LOCK_SECONDS", 1)
    monkeypatch.chdir(tmp_path)
    storage = open_storage("journal:deep/study.log")
    os.close(os.open("deep/study.log.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    maker = threading.Thread(target=optuna.create_study, kwargs={"storage": storage}, daemon=True)
    maker.start()
    maker.join(30)
    assert not maker.is_alive()


# One worker that is interrupted, fails, or is given up.


@pytest.mark.parametrize(("url", "error"), [(STORAGES[0], Stopped(15, 3)), (STORAGES[1], MemoryError())])
def test_a_trial_that_breaks_off_is_retried(url: str, error: BaseException, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    task = make_task(BreakingPerplexity(error, {2}))
    study = open_study(url, "test", "tpe", task)
    with pytest.raises(type(error)):
        blackbox(study, task, 6, Silent())
    broken = study.get_trials()[2]
    assert broken.state == TrialState.FAIL
    notes, task = Notes(), make_task(perplexity := FakePerplexity())
    study = open_study(url, "test", "tpe", task)
    blackbox(study, task, 6, notes)
    assert perplexity.asked[0] == broken.user_attrs[NAME]
    assert study.get_trials()[3].params == broken.params
    assert any(note.startswith(f"trial 3 retries {broken.user_attrs[NAME]}") for note in notes.notes)
    assert len(finished_trials(study)) == 6
    assert len(study.get_trials()) == 7


def run_until_done(url: str, perplexity: FakePerplexity, trials: int, sampler: str = "tpe") -> tuple[optuna.Study, int]:
    """Give the same command again until the study is finished; return how often it broke off."""
    task = make_task(perplexity)
    for interruptions in range(20):
        study = open_study(url, "test", sampler, task)
        try:
            blackbox(study, task, trials, Silent())
        except (MemoryError, KeyboardInterrupt, Stopped):
            continue
        return study, interruptions
    raise AssertionError("the study does not end")


def test_a_network_that_ends_its_workers_is_not_retried_for_ever(studies_in_memory: None) -> None:
    perplexity = BreakingPerplexity(MemoryError, {0, 1, 2})
    study, interruptions = run_until_done("study", perplexity, 8)
    assert interruptions == 3
    lost = perplexity.asked[0]
    assert perplexity.asked[:3] == [lost] * 3
    assert [trial.params for trial in study.get_trials()[:3]] == [study.get_trials()[0].params] * 3
    assert study.get_trials()[3].params != study.get_trials()[0].params
    assert len(finished_trials(study)) == 8


@pytest.mark.parametrize(("sampler", "error"), [("tpe", Stopped(15, 3)), ("nsga2", KeyboardInterrupt())])
def test_a_study_interrupted_within_trials_ends_as_if_it_had_not_been(
    sampler: str, error: BaseException, studies_in_memory: None
) -> None:
    """However often, and also several times in trials of one network."""
    trials = 52 if sampler == "nsga2" else 16  # NSGA-II has 50 in the first generation
    perplexity = BreakingPerplexity(error, {0, 3, 4, 5, 6, 12, 13})
    interrupted, interruptions = run_until_done("interrupted", perplexity, trials, sampler)
    whole, _ = run_until_done("whole", FakePerplexity(), trials, sampler)
    assert interruptions >= 5
    results = [
        [(trial.params, trial.values, trial.state) for trial in finished_trials(study)]
        for study in (interrupted, whole)
    ]
    assert results[0] == results[1]


def test_a_worker_that_was_given_up_continues_with_another_trial(tmp_path: Path) -> None:
    """Its own trial is not counted."""

    class Suspended(FakePerplexity):
        def __call__(self, number: int, architecture: Architecture) -> float:
            if number == 1:
                study.tell(1, state=TrialState.FAIL)
            return super().__call__(number, architecture)

    task, notes = make_task(Suspended()), Notes()
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", task)
    blackbox(study, task, 4, notes)
    assert [trial.state for trial in study.get_trials()].count(TrialState.FAIL) == 1
    assert len(finished_trials(study)) == 4
    assert any("trial 1 was marked as failed" in note for note in notes.notes)


def test_an_error_of_the_storage_costs_a_trial_and_not_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, notes, store = make_task(FakePerplexity()), Notes(), RDBStorage.set_trial_state_values
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", task)

    def fail_once(self: RDBStorage, trial_id: int, state: TrialState, values: object = None) -> bool:
        if state == TrialState.COMPLETE:
            monkeypatch.setattr(RDBStorage, "set_trial_state_values", store)
            raise OperationalError("UPDATE", {}, OSError("the server is gone"))
        return store(self, trial_id, state, values)

    monkeypatch.setattr(RDBStorage, "set_trial_state_values", fail_once)
    blackbox(study, task, 3, notes)
    assert len(finished_trials(study)) == 3
    assert any("did not answer" in note for note in notes.notes)


def test_a_storage_that_always_fails_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LOST", 2)
    task = make_task(FakePerplexity())
    study = open_study(f"sqlite:///{tmp_path}/s.db", "test", "tpe", task)

    def fail(*_: object) -> None:
        raise OperationalError("INSERT", {}, OSError("the disk is full"))

    monkeypatch.setattr(RDBStorage, "set_trial_param", fail)
    monkeypatch.setattr(RDBStorage, "_set_trial_param", fail)
    with pytest.raises(OperationalError):
        blackbox(study, task, 3, Silent())


# Several workers, in processes of their own.


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is not installed: pip install 'psycopg[binary]'")
    server = Server(find_binaries())
    yield server
    server.remove()


def new_database(server: Server, tmp_path: Path) -> str:
    name = f"study_{abs(hash(tmp_path))}"
    server.execute(f"CREATE DATABASE {name}")
    return server.address(name)


def start_worker(url: str, log: Path, trials: int, seconds: float) -> StudyWorker:
    output = log.with_name(f"output-{len(list(log.parent.glob('output-*')))}")
    output.touch()
    return StudyWorker(output, work, url, log, trials, seconds)


def read_log(log: Path) -> list[tuple[str, int, str, int]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [(event, int(number), network, int(pid)) for event, number, network, pid in map(str.split, lines)]


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def open_test_study(url: str) -> optuna.Study:
    return open_study(url, "test", "tpe", make_task(FakePerplexity(), 4))


def check_study(study: optuna.Study, trials: int, workers: int = 1) -> None:
    """All trials are finished, at most one too many for each other worker, and each value is correct."""
    states = Counter(trial.state for trial in study.get_trials())
    assert trials <= states[TrialState.COMPLETE] + states[TrialState.PRUNED] < trials + workers
    networks = [each.network for each in evaluated_networks(study, "counted")]
    assert len(set(networks)) == len(networks)
    costs = count_costs(Config().replace(search__blocks=4), "macs")
    for trial in study.get_trials(states=(TrialState.COMPLETE,)):
        string = "".join(trial.params.values())
        assert trial.values == [FakePerplexity()(0, Architecture(string)), costs.cost(string)]


@pytest.mark.slow
@pytest.mark.parametrize("url", STORAGES)
def test_two_workers_share_the_trials(url: str, tmp_path: Path) -> None:
    """Both begin the same new study at once."""
    url, log = url.format(tmp_path), tmp_path / "log"
    for worker in [start_worker(url, log, 6, 0.5) for _ in range(2)]:
        worker.result()
    study = open_test_study(url)
    check_study(study, 6, workers=2)
    assert not study.get_trials(states=(TrialState.RUNNING,))
    assert len({pid for _, _, _, pid in read_log(log)}) == 2, "one worker did everything"
    drawn = Counter(tuple(trial.params.values()) for trial in study.get_trials()[:4])
    assert max(drawn.values()) == 1, "both drew the same"


@pytest.mark.slow
def test_the_trial_of_a_killed_worker_is_retried(tmp_path: Path) -> None:
    url, log = f"sqlite:///{tmp_path}/study.db", tmp_path / "log"
    victim = start_worker(url, log, 7, 600.0)
    wait_until(lambda: read_log(log))
    time.sleep(0.5)  # until its first heartbeat is in the storage
    (_, number, network, _) = read_log(log)[0]
    victim.kill()
    assert f"retries {network}" in start_worker(url, log, 7, 0.5).result()
    study = open_test_study(url)
    check_study(study, 7)
    assert study.get_trials()[number].state == TrialState.FAIL
    assert network in [each.network for each in evaluated_networks(study, "counted")]


@pytest.mark.slow
def test_a_study_outlives_a_restart_of_its_server(server: Server, tmp_path: Path) -> None:
    url, log = new_database(server, tmp_path), tmp_path / "log"
    worker = start_worker(url, log, 6, 0.5)
    wait_until(lambda: len(read_log(log)) > 1)
    server.stop()
    time.sleep(1.0)
    server.start()
    assert "the storage does not answer" in worker.result()
    check_study(open_test_study(url), 6)


@pytest.mark.slow
def test_a_server_that_stays_away_ends_a_worker_with_a_message(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study is resumed when it is back."""
    monkeypatch.setattr(module, "AWAY_SECONDS", 1.0)

    class Stopping(FakePerplexity):
        def __call__(self, number: int, architecture: Architecture) -> float:
            if len(self.asked) == 2:
                server.stop()
            return super().__call__(number, architecture)

    url, task = new_database(server, tmp_path), make_task(Stopping(), 4)
    study = open_study(url, "test", "tpe", task)
    try:
        with pytest.raises(ParnasError):
            blackbox(study, task, 6, Silent())
        with pytest.raises(ParnasError):
            open_test_study(url)
    finally:
        server.start()
    task = make_task(FakePerplexity(), 4)
    study = open_test_study(url)
    blackbox(study, task, 6, Silent())
    check_study(study, 6)
