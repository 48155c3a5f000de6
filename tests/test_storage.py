"""Where a shared study is kept."""

import os
import sys
import threading
import time
from pathlib import Path

import optuna
import pytest
from blackbox_helpers import STORAGES
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import make_url

import parnas.nas.storage as module
from parnas.errors import ParnasError
from parnas.nas.storage import answered, open_storage, with_driver


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("study.db", "is no storage; give sqlite"),
        ("sqlite://", "is no storage"),
        ("sqlite:///", "is no storage"),
        ("journal:", "is no storage"),
        ("abacus://host/base", "is no address of a database"),
        ("postgresql://me@host:PORT/base", "is no address of a database"),
        ("mysql+pymysql://me:secret@localhost/base", "pip install pymysql"),
    ],
)
def test_storages_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(ParnasError, match=message) as refusal:
        open_storage(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_without_a_driver_says_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(ParnasError, match=r"pip install 'psycopg\[binary\]'") as refusal:
        open_storage(f"{kind}://me:secret@localhost/base")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "there", "driver"),
    [
        ("postgresql://h/b", {"psycopg", "psycopg2"}, "postgresql+psycopg"),
        ("postgresql://h/b", {"psycopg2"}, "postgresql+psycopg2"),
        ("postgres://h/b", {"psycopg"}, "postgresql+psycopg"),
        ("postgresql+psycopg2://h/b", {"psycopg"}, "postgresql+psycopg2"),
        ("mysql://h/b", {"psycopg"}, "mysql"),
    ],
)
def test_a_driver_is_chosen_where_the_address_names_none(
    url: str, there: set[str], driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    assert with_driver(make_url(url)).drivername == driver


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a database, but some text that is long enough to be looked at" * 20)
    with pytest.raises(ParnasError, match="cannot be opened"):
        open_storage(f"sqlite:///{tmp_path}/notes")


def test_folders_of_storages_are_made(tmp_path: Path) -> None:
    for url in STORAGES:
        open_storage(url.format(tmp_path / url[:3] / "deep"))


def test_an_sqlite_trial_ends_once_where_two_workers_end_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gives it up while the other writes its values down: between reading a state and writing it nobody comes."""
    check = RDBStorage.check_trial_is_updatable

    def check_slowly(*arguments: object) -> None:
        check(*arguments)
        time.sleep(0.1)

    monkeypatch.setattr(RDBStorage, "check_trial_is_updatable", check_slowly)
    url = f"sqlite:///{tmp_path}/s.db"
    studies = [
        optuna.create_study(storage=open_storage(url), study_name="a", load_if_exists=True, directions=["minimize"] * 2)
        for _ in range(2)
    ]
    trial, outcomes, barrier = studies[0].ask(), [], threading.Barrier(2)

    def end(study: optuna.Study, values: list[float] | None, state: TrialState | None) -> None:
        barrier.wait(10)
        try:
            study.tell(trial.number, values, state)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            return
        outcomes.append(state or TrialState.COMPLETE)

    ends = [(studies[0], [1.0, 2.0], None), (studies[1], None, TrialState.FAIL)]
    threads = [threading.Thread(target=end, args=each) for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert outcomes == [studies[0].get_trials()[0].state]


def test_the_lock_of_a_worker_that_was_killed_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the journal's path is relative."""
    monkeypatch.setattr(module, "HELD_SECONDS", 3)
    monkeypatch.chdir(tmp_path)
    storage = open_storage("journal:deep/study.log")
    os.close(os.open("deep/study.log.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    maker = threading.Thread(target=optuna.create_study, kwargs={"storage": storage}, daemon=True)
    maker.start()
    maker.join(30)
    assert not maker.is_alive()


def test_a_storage_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRY_SECONDS", 0.0)
    left, notes = [3], []

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise StorageInternalError("During the commit ...") from OSError("the server is gone\nand more")
        return "here"

    assert answered(call, notes.append) == "here"
    assert notes == ["the storage does not answer (the server is gone); waiting for it"]


def test_a_storage_that_stays_away_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRY_SECONDS", 0.0)
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.05)

    def call() -> None:
        raise StorageInternalError("gone")

    with pytest.raises(ParnasError, match=r"not answered for .* \(gone\); start it, then give the same command again"):
        answered(call)
