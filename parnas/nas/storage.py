"""Where a shared study is kept: the addresses of storages, and servers that are away for a while."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import OptunaError, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from parnas.errors import ParnasError

AWAY = (StorageInternalError, SQLAlchemyError)  # what a database raises that does not answer
TRY_SECONDS, AWAY_SECONDS = 0.5, 600.0  # between two tries to reach a storage, and of all of them
OPENING_TRIES = 5
LOCKED_SECONDS = 60  # that a worker waits for the others' writes to an SQLite file
HELD_SECONDS = 30  # after which a journal's lock is taken for that of a dead worker
# Packages that are named unlike their module.
DRIVERS = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}

T = TypeVar("T")


def open_storage(url: str) -> BaseStorage:
    """`sqlite:///FILE`, `journal:FILE` or the address of a database server; raises `ParnasError` with the cure."""
    kind, _, place = url.partition(":")
    if kind == "journal" and place:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        # Not Optuna's default, a link to the file: where that leads nowhere, seen from its folder or from another
        # machine, the lock of a worker that was killed is never broken.
        return JournalStorage(JournalFileBackend(place, JournalFileOpenLock(place, HELD_SECONDS)))
    if kind == "sqlite" and len(place) > len("///"):
        Path(place.removeprefix("///")).parent.mkdir(parents=True, exist_ok=True)
        storage = open_database(url, {"connect_args": {"timeout": LOCKED_SECONDS, "isolation_level": None}})
        event.listen(storage.engine, "begin", lock_at_once)
        return storage
    if kind != "sqlite" and place.startswith("//"):
        return open_database(url, {"pool_pre_ping": True})
    raise ParnasError(f"{url} is no storage; give sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.")


def lock_at_once(connection: Connection) -> None:
    """Begin a transaction of SQLite that no other can come between, since Optuna reads a state before it changes it."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def open_database(url: str, settings: dict[str, Any]) -> RDBStorage:
    """Open a database, several times where another worker is just making its tables."""
    address = with_driver(read_url(url))
    shown = address.render_as_string(hide_password=True)
    for tried in range(1, OPENING_TRIES + 1):
        try:
            return RDBStorage(address.render_as_string(hide_password=False), engine_kwargs=settings)
        except ArgumentError as error:
            raise ParnasError(f"--storage is no address of a database: {error}") from error
        except ImportError as error:
            module = getattr(error.__cause__, "name", None) or "its driver"
            package = DRIVERS.get(module, module)
            raise ParnasError(f"{shown} needs a driver that is not installed: pip install {package}") from error
        except (SQLAlchemyError, OptunaError) as error:
            if tried == OPENING_TRIES:
                raise ParnasError(f"{shown} cannot be opened ({reason(error)}); start it or mend --storage.") from error
            time.sleep(TRY_SECONDS)
    raise AssertionError("the last try returns or raises")


def read_url(url: str) -> URL:
    """An address of a database; raises `ParnasError` for what is none."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
        raise ParnasError(f"--storage is no address of a database: {error}") from error


def keepable(url: str) -> str | None:
    """The address of a storage as a file may hold it, of use in any folder; none where it holds a password."""
    kind, _, place = url.partition(":")
    if kind == "journal":
        return f"journal:{Path(place).resolve()}"
    if kind == "sqlite":
        return f"sqlite:///{Path(place.removeprefix('///')).resolve()}"
    address = read_url(url)
    return None if address.password is not None or "password" in address.query else url


def with_driver(address: URL) -> URL:
    """PostgreSQL by psycopg 3, unless the address names a driver or psycopg2 alone is there."""
    if address.drivername not in ("postgresql", "postgres"):
        return address
    old = importlib.util.find_spec("psycopg") is None and importlib.util.find_spec("psycopg2") is not None
    return address.set(drivername="postgresql+psycopg2" if old else "postgresql+psycopg")


def answered(call: Callable[[], T], note: Callable[[str], None] | None = None) -> T:
    """What `call` returns, tried again while the storage does not answer.

    Raises `ParnasError` where it has not answered for `AWAY_SECONDS`.
    """
    since: float | None = None
    while True:
        begun = time.monotonic()
        try:
            return call()
        except AWAY as error:
            now = time.monotonic()
            if since is None or now - begun > AWAY_SECONDS:  # the storage answered in the meantime
                since = now
                if note is not None:
                    note(f"the storage does not answer ({reason(error)}); waiting for it")
            if now - since >= AWAY_SECONDS:
                raise ParnasError(
                    f"The storage has not answered for {AWAY_SECONDS / 60:.0f} minutes ({reason(error)}); start it, "
                    "then give the same command again: the study goes on."
                ) from error
        time.sleep(TRY_SECONDS)


def reason(error: BaseException) -> str:
    """The first line of what a database said, below what Optuna makes of it."""
    said = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ is not None else error
    return next(iter(str(said).splitlines()), type(said).__name__)
