"""Optuna studies that several workers share: storages, resuming, retries of lost trials, reuse of known values.

Optuna does the work: `study.optimize` runs the trials, databases keep a heartbeat of each running trial, and a trial
whose heartbeat stopped is marked as failed and queued again. A journal file has no heartbeats. This module opens
storages, refuses a study of another configuration, gives each trial a seed of its own, and evaluates equal trials once.
"""

import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.exceptions import OptunaError, StorageInternalError, TrialPruned, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from parnas.errors import ParnasError
from parnas.training.interruptions import Stopped
from parnas.training.progress import Loop, Reporter

SamplerName = Literal["tpe", "nsga2"]
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)  # these trials count
NAME, REUSED, FINGERPRINT = "name", "reused_from", "fingerprint"  # user attributes of trials and studies
_ATTEMPTS = 3  # evaluations of one trial that end with an error or with their worker
MAX_LOSSES = 20  # trials of one worker that could not be stored
HEARTBEAT_SECONDS, GRACE_SECONDS = 20, 120
OPENING_TRIES, RETRY_SECONDS, AWAY_SECONDS = 5, 0.5, 600.0
_SQLITE_LOCK_SECONDS = 60  # to wait for the writes of other workers
JOURNAL_LOCK_SECONDS = 30  # after which the lock of a journal is taken for that of a dead worker
_DRIVER_PACKAGES = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}

Note = Callable[[str], None]


@dataclass(frozen=True)
class StudySettings:
    """The properties that all workers of a study have in common."""

    command: str  # that starts such studies
    fingerprint: Mapping[str, Any]  # all that the values of a trial depend on
    hint: str  # for users whose fingerprint differs
    seed: int
    objectives: int = 1  # values of a trial, all minimised
    sampler: SamplerName = "tpe"
    pruner: BasePruner | None = None
    first: Mapping[str, Any] | None = None  # parameters of the first trial, if they are not drawn


def open_shared_study(storage: str, name: str, settings: StudySettings, note: Note | None = None) -> optuna.Study:
    """Open or start a study.

    Raises `ParnasError` if the storage cannot be opened, or if the study was started with another configuration.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    study = optuna.create_study(
        storage=open_storage(storage, note),
        study_name=name,
        sampler=_SAMPLERS[settings.sampler](settings.seed),
        pruner=settings.pruner,
        directions=["minimize"] * settings.objectives,
        load_if_exists=True,
    )
    fingerprint = json.loads(json.dumps(settings.fingerprint))
    trials = study.get_trials(deepcopy=False)  # read first: another worker writes the fingerprint before any trial
    if len(study.directions) != settings.objectives or (trials and FINGERPRINT not in study.user_attrs):
        raise ParnasError(f"The study {name} was not started by parnas {settings.command}; {settings.hint}.")
    if FINGERPRINT not in study.user_attrs:
        study.set_user_attr(FINGERPRINT, fingerprint)
    refuse_other_fingerprint(study.user_attrs[FINGERPRINT], fingerprint, name, settings.hint)
    if settings.first is not None and not trials:
        study.enqueue_trial(dict(settings.first), skip_if_exists=True)
    return study


def refuse_other_fingerprint(before: Mapping[str, Any], now: Mapping[str, Any], name: str, hint: str) -> None:
    """Raise `ParnasError` if the values of a study's trials are not comparable with new ones."""
    if before == now:
        return
    changed = [key for key in before if key in now and before[key] != now[key]]
    changed = changed or [*(before.keys() ^ now.keys())]  # only then: absent keys follow from changed ones
    lines = [f"  - {key}: {before.get(key)} before, {now.get(key)} now" for key in changed]
    if changed == ["costs"] and now.get("metric") == "latency":
        lines.append("Each machine has its own latencies: give all workers one search.cost.table, or another metric.")
    raise ParnasError(f"The study {name} was started with another configuration; {hint}:\n" + "\n".join(lines))


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the complete and the pruned trials, by number."""
    return study.get_trials(deepcopy=False, states=_FINISHED)


# Running trials.


def retry(study: optuna.Study, trial: FrozenTrial, max_retry: int | None = _ATTEMPTS - 1) -> None:
    """Queue an unfinished trial again, at most `max_retry` times.

    Optuna notices a killed worker by its missing heartbeat, which a journal file does not have.
    """
    RetryHeartbeatStaleTrialCallback(max_retry)(study, trial)


def origin(trial: FrozenTrial) -> int:
    """Return the number of the trial that a trial retries, or its own."""
    retried = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    return trial.number if retried is None else retried


def run_trials(
    study: optuna.Study,
    objective: Callable[[Trial], Sequence[float]],
    trials: int,
    command: str,
    reporter: Reporter,
) -> None:
    """Run trials until all workers together have finished `trials`; W workers may finish up to W - 1 more.

    An interrupted trial, and one that ended with an error, is queued again before the exception is raised.
    """
    current: list[Trial] = []  # the trial of this worker
    own_errors: list[BaseException] = []  # those of the objective

    def evaluate(trial: Trial) -> Sequence[float]:
        current[:] = [trial]
        if NAME in trial.user_attrs:
            reporter.note(
                f"trial {trial.number} retries {trial.user_attrs[NAME]}, which an earlier trial did not finish"
            )
        try:
            return objective(trial)
        except TrialPruned as pruned:
            reporter.note(f"trial {trial.number}: {pruned}")
            raise
        except UpdateFinishedTrialError:  # another worker has given it up
            raise
        except (Exception, KeyboardInterrupt) as error:
            own_errors.append(error)
            with suppress(OptunaError, SQLAlchemyError):
                interrupted = isinstance(error, KeyboardInterrupt | Stopped)
                lost = study.get_trials(deepcopy=False)[trial.number]
                retry(study, lost, max_retry=None if interrupted else _ATTEMPTS - 1)
            raise

    def advance(study: optuna.Study, _: FrozenTrial) -> None:
        current.clear()
        reporter.advance(len(finished_trials(study)))

    reporter.start(Loop(command, len(finished_trials(study)), trials, "trials"))
    losses = 0
    try:
        while len(finished_trials(study)) < trials:
            try:
                study.optimize(evaluate, callbacks=[advance, MaxTrialsCallback(trials, _FINISHED)])
            except Exception as error:
                losses += 1
                if own_errors or losses > MAX_LOSSES:
                    raise
                _note_lost_trial(study, current, error, reporter)
        reporter.advance(trials)
    finally:
        reporter.stop()


def _note_lost_trial(study: optuna.Study, current: list[Trial], error: Exception, reporter: Reporter) -> None:
    """Note why the values of a trial could not be stored; raise an error that is not for another try."""
    causes = [*_causes_of(error)]
    for cause in causes:
        if isinstance(cause, ParnasError):  # the server stayed away
            raise cause
    trials = study.get_trials(deepcopy=False)
    if any(trials[trial.number].state == TrialState.FAIL for trial in current):
        reporter.note(f"trial {current[0].number} was given up by another worker, which saw no heartbeat of it")
    elif any(isinstance(cause, StorageInternalError | SQLAlchemyError) for cause in causes):
        reporter.note(f"the storage did not answer ({_first_line(causes[-1])}); its last trial may be repeated")
    else:
        raise error


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def evaluate_once(trial: Trial, name: str, evaluate: Callable[[], Sequence[float]]) -> Sequence[float]:
    """Return the values of `evaluate`, or those of a finished trial of the same name.

    Raises `TrialPruned` if the finished trial was pruned.
    """
    equal = [
        other
        for other in finished_trials(trial.study)
        if other.user_attrs.get(NAME) == name and REUSED not in other.user_attrs
    ]
    trial.set_user_attr(NAME, name)
    if not equal:
        return evaluate()
    trial.set_user_attr(REUSED, equal[0].number)
    if equal[0].state == TrialState.PRUNED:
        raise TrialPruned(f"{name} was pruned in trial {equal[0].number}")
    values: Sequence[float] = equal[0].values
    return values


class SeededSampler(BaseSampler):
    """Mixin that seeds a sampler for each trial, by the number of earlier trials without retries.

    So a resumed study of one worker draws what it would have drawn without the interruption, and workers with one seed
    draw different parameters.
    """

    def __init__(self, seed: int) -> None:
        self.study_seed = seed
        super().__init__(seed=seed)  # type: ignore[call-arg]

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start the sampler afresh with a seed for this trial."""
        earlier = {origin(other) for other in study.get_trials(deepcopy=False)[: trial.number]}
        position = len(earlier - {origin(trial)})
        seed = int(np.random.SeedSequence([self.study_seed, position]).generate_state(1)[0])
        super().__init__(seed=seed)  # type: ignore[call-arg]
        super().before_trial(study, trial)


class SeededTPE(SeededSampler, TPESampler):
    """Tree-structured Parzen estimators."""


class SeededNSGAII(SeededSampler, NSGAIISampler):
    """NSGA-II (Deb et al. 2002)."""


_SAMPLERS: Mapping[SamplerName, type[SeededSampler]] = {"tpe": SeededTPE, "nsga2": SeededNSGAII}


# Storages.


def open_storage(url: str, note: Note | None = None) -> BaseStorage:
    """Open `sqlite:///FILE`, `journal:FILE` or the address of a database server.

    Raises `ParnasError` with a hint if it cannot be opened.
    """
    kind, _, place = url.partition(":")
    if kind == "journal" and place:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        # Not Optuna's default lock, a link to the file: if the link leads nowhere from its folder or from another
        # machine, the lock of a killed worker is never broken.
        return JournalStorage(JournalFileBackend(place, JournalFileOpenLock(place, JOURNAL_LOCK_SECONDS)))
    if kind == "sqlite" and len(place) > len("///"):
        Path(place.removeprefix("///")).parent.mkdir(parents=True, exist_ok=True)
        storage = _open_database(url, {"connect_args": {"timeout": _SQLITE_LOCK_SECONDS, "isolation_level": None}})
        event.listen(storage.engine, "begin", _lock_at_once)
        return storage
    if kind != "sqlite" and place.startswith("//"):
        storage = _open_database(url, {"pool_pre_ping": True})
        _wait_for_server(storage, note)
        return storage
    raise ParnasError(f"{url} is no storage; give sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.")


class Database(RDBStorage):
    """A database whose heartbeats continue after an outage."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat if the database answers; Optuna's thread would end with the error otherwise."""
        with suppress(Exception):
            super().record_heartbeat(trial_id)


def _open_database(url: str, engine_kwargs: dict[str, Any]) -> Database:
    """Open a database; try several times, since another worker may be creating its tables."""
    address = with_driver(_read_url(url))
    shown = address.render_as_string(hide_password=True)
    for attempt in range(1, OPENING_TRIES + 1):
        try:
            return Database(
                address.render_as_string(hide_password=False),
                engine_kwargs=engine_kwargs,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
                heartbeat_stale_trial_callback=retry,
            )
        except ArgumentError as error:
            raise ParnasError(f"--storage is no address of a database: {error}") from error
        except ImportError as error:
            module = getattr(error.__cause__, "name", None) or "its driver"
            package = _DRIVER_PACKAGES.get(module, module)
            raise ParnasError(f"{shown} needs a driver that is not installed: pip install {package}") from error
        except (SQLAlchemyError, OptunaError) as error:
            if attempt == OPENING_TRIES:
                raise ParnasError(
                    f"{shown} cannot be opened ({_first_line(error)}); start it or correct --storage."
                ) from error
            time.sleep(RETRY_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def _lock_at_once(connection: Connection) -> None:
    """Lock SQLite when a transaction begins, since Optuna reads a state before it changes it."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _wait_for_server(storage: RDBStorage, note: Note | None) -> None:
    """Make lost connections wait up to `AWAY_SECONDS` for the server, then raise `ParnasError`."""

    def connect(dialect: Any, _: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        since = time.monotonic()
        noted = False
        while True:
            try:
                return dialect.connect(*arguments, **options)
            except dialect.loaded_dbapi.Error as error:
                if note is not None and not noted:
                    note(f"the storage does not answer ({_first_line(error)}); waiting for it")
                noted = True
                if time.monotonic() - since >= AWAY_SECONDS:
                    raise ParnasError(
                        f"The storage has not answered for {AWAY_SECONDS / 60:.0f} minutes ({_first_line(error)}); "
                        "start it, then give the same command again to resume the study."
                    ) from error
            time.sleep(RETRY_SECONDS)

    event.listen(storage.engine, "do_connect", connect)


def _read_url(url: str) -> URL:
    """Parse the address of a database; raise `ParnasError` for other text."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: the port is no number
        raise ParnasError(f"--storage is no address of a database: {error}") from error


def with_driver(address: URL) -> URL:
    """Choose psycopg 3 for PostgreSQL, unless the address names a driver or only psycopg2 is installed."""
    if address.drivername not in ("postgresql", "postgres"):
        return address
    old = importlib.util.find_spec("psycopg") is None and importlib.util.find_spec("psycopg2") is not None
    return address.set(drivername="postgresql+psycopg2" if old else "postgresql+psycopg")


def _first_line(error: BaseException) -> str:
    """Return the first line of a database's error message, without Optuna's text around it."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ is not None else error
    return next(iter(str(cause).splitlines()), type(cause).__name__)
