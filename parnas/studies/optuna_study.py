"""Optuna studies that several workers share: storages, resuming, retries of lost trials, reuse of earlier values.

A worker is a process that runs trials of the study. Optuna runs the trials (`study.optimize`). In a database it also
records a heartbeat of each running trial, and marks a trial whose heartbeat stops as failed and queues it again; a
journal file has no heartbeats. This module opens storages, refuses a study of another configuration, gives each trial
its own sampler seed, and evaluates trials with equal parameters only once.
"""

import json
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.training.interruptions import Stopped
from parnas.training.progress import Loop, Reporter
from parnas.training.session import flatten

SamplerName = Literal["tpe", "nsga2"]
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)  # trials in these states count as finished
NAME, REUSED, FINGERPRINT = "name", "reused_from", "fingerprint"  # user attributes of trials and studies
_MAX_RETRIES = 2  # how often a trial is repeated that ended with an error or whose worker died
_MAX_LOST = 20  # a worker stops with an error after it could not store the results of this many trials
HEARTBEAT_SECONDS, GRACE_SECONDS = 20, 120  # interval of heartbeats; without one for the grace time a trial has failed
OPENING_TRIES, RETRY_SECONDS = 5, 0.5  # attempts to open a database, and the pause between attempts
AWAY_SECONDS = 600.0  # how long to wait for a database server that does not answer
_SQLITE_LOCK_SECONDS = 60  # how long to wait for the writes of other workers
_JOURNAL_LOCK_SECONDS = 30  # an older lock of a journal file is removed, since the worker that holds it must be dead
_ADDRESSES = "give sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE"
FREE_SETTINGS = {"data.corpus", "runtime.device", "runtime.threads", "runtime.compile"}
"""Settings that may differ between the workers of a study, since no value of a trial depends on them."""
FREE_SETTINGS |= {"train.log_every", "train.eval_every", "train.save_every"}

_Notify = Callable[[str], None]


@dataclass(frozen=True)
class StudySettings:
    """The settings with which a study is opened or started, equal for all its workers."""

    command: str  # subcommand of parnas that starts such studies
    fingerprint: Mapping[str, Any]  # all that the values of a trial depend on
    hint: str  # what to do if the fingerprint differs
    seed: int  # of the sampler
    objectives: int = 1  # values of a trial, all minimised
    sampler: SamplerName = "tpe"
    pruner: BasePruner | None = None
    first: Mapping[str, Any] | None = None  # parameters of the first trial; `None`: drawn by the sampler


def binding_settings(config: Config, free: Collection[str]) -> dict[str, Any]:
    """Return all settings of a configuration by dotted key, except those in `free` (keys and whole sections)."""
    settings = flatten(config.model_dump(mode="json")).items()
    return {key: value for key, value in settings if not any(f"{key}.".startswith(f"{each}.") for each in free)}


def open_shared_study(storage: str, name: str, settings: StudySettings, note: _Notify | None = None) -> optuna.Study:
    """Open the study `name` in a storage, or start it if the storage has none of this name.

    `note` receives a message if a database server does not answer. Raises `ParnasError` if the storage cannot be
    opened, or if the study was started with another configuration or by another command.
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
    # The trials are read before the fingerprint: a worker stores the fingerprint before it starts a trial, so a study
    # that has trials but no fingerprint is not one of parnas.
    trials = study.get_trials(deepcopy=False)
    if len(study.directions) != settings.objectives or (trials and FINGERPRINT not in study.user_attrs):
        raise ParnasError(
            f"The study {name} was not started by parnas {settings.command} and cannot be resumed; {settings.hint}."
        )
    if FINGERPRINT not in study.user_attrs:
        study.set_user_attr(FINGERPRINT, fingerprint)
    refuse_other_fingerprint(study.user_attrs[FINGERPRINT], fingerprint, name, settings.hint)
    if settings.first is not None and not trials:
        study.enqueue_trial(dict(settings.first), skip_if_exists=True)
    return study


def refuse_other_fingerprint(before: Mapping[str, Any], now: Mapping[str, Any], name: str, hint: str) -> None:
    """Raise `ParnasError` with the settings that differ if the fingerprints `before` and `now` are not equal.

    A fingerprint holds all that the values of trials depend on. `before` is stored in the study `name`, `now` belongs
    to this worker. If they differ, earlier and new trials are not comparable. `hint` tells the user what to do.
    """
    if before == now:
        return
    changed = [key for key in before if key in now and before[key] != now[key]]
    # Keys that only one fingerprint has are listed only if no value differs: usually they follow from such a value.
    changed = changed or [*(before.keys() ^ now.keys())]
    lines = [f"  - {key}: {before.get(key)} before, {now.get(key)} now" for key in changed]
    if changed == ["costs"] and now.get("metric") == "latency":
        lines.append("Latencies differ between machines: give all workers one search.cost.table, or another metric.")
    raise ParnasError(f"The study {name} was started with another configuration; {hint}:\n" + "\n".join(lines))


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the finished trials of a study, complete or pruned, in the order of their numbers."""
    return study.get_trials(deepcopy=False, states=_FINISHED)


def run_trials(
    study: optuna.Study,
    objective: Callable[[Trial], Sequence[float]],
    trials: int,
    reporter: Reporter,
    title: str | None = None,
    after: Callable[[optuna.Study, FrozenTrial], None] | None = None,
) -> None:
    """Run trials in this worker until all workers together have finished `trials` trials.

    Since each worker completes its running trial, W workers may finish up to `trials` + W - 1 trials. A trial that is
    interrupted or ends with an error is queued again before the exception is raised.

    Args:
        study: the study of all workers.
        objective: returns the values of a trial.
        trials: the number of complete and pruned trials, including those that reused the values of an equal trial.
        reporter: receives notes.
        title: the title of a progress display that counts trials; `None` if each trial shows its own progress.
        after: called with the study and the trial after each trial, like Optuna's callbacks.
    """
    progress = Reporter() if title is None else reporter
    current: list[Trial] = []  # the unfinished trial of this worker
    errors: list[BaseException] = []  # raised by the objective

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
        except UpdateFinishedTrialError:  # another worker has marked this trial as failed
            raise
        except (Exception, KeyboardInterrupt) as error:
            errors.append(error)
            with suppress(OptunaError, SQLAlchemyError):
                max_retry = None if isinstance(error, KeyboardInterrupt | Stopped) else _MAX_RETRIES
                failed = study.get_trials(deepcopy=False)[trial.number]
                RetryHeartbeatStaleTrialCallback(max_retry)(study, failed)
            raise

    def advance(study: optuna.Study, trial: FrozenTrial) -> None:
        current.clear()
        if after is not None:
            after(study, trial)
        progress.advance(len(finished_trials(study)))

    progress.start(Loop(title or "", len(finished_trials(study)), trials, "trials"))
    lost = 0
    try:
        while len(finished_trials(study)) < trials:
            try:
                study.optimize(evaluate, callbacks=[advance, MaxTrialsCallback(trials, _FINISHED)])
            except Exception as error:
                lost += 1
                if errors or lost > _MAX_LOST:
                    raise
                _note_lost_trial(study, current, error, reporter)
        progress.advance(trials)
    finally:
        progress.stop()


def _note_lost_trial(study: optuna.Study, current: list[Trial], error: Exception, reporter: Reporter) -> None:
    """Report why the result of a trial was lost; raise `error` or its cause if later results would be lost, too.

    `current` holds the trial that was running, if any; `error` is the exception that Optuna raised.
    """
    causes = [*_causes_of(error)]
    for cause in causes:
        if isinstance(cause, ParnasError):  # the server did not answer for `AWAY_SECONDS`
            raise cause
    trials = study.get_trials(deepcopy=False)
    if any(trials[trial.number].state == TrialState.FAIL for trial in current):
        reporter.note(f"trial {current[0].number} was marked as failed by another worker, as its heartbeat had stopped")
    elif any(isinstance(cause, StorageInternalError | SQLAlchemyError) for cause in causes):
        reporter.note(
            f"the storage did not answer ({_first_line(causes[-1])}); the last trial of this worker may be repeated"
        )
    else:
        raise error


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then the exception that caused it, and so on to the first cause."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def evaluate_once(trial: Trial, name: str, evaluate: Callable[[], Sequence[float]]) -> Sequence[float]:
    """Return the values of a trial: those of a finished trial with equal parameters, else the result of `evaluate`.

    `name` describes the parameters; trials with equal names have equal parameters. Raises `TrialPruned` if the earlier
    trial with this name was pruned.
    """
    trial.set_user_attr(NAME, name)
    for other in finished_trials(trial.study):
        if other.user_attrs.get(NAME) == name and REUSED not in other.user_attrs:
            trial.set_user_attr(REUSED, other.number)
            if other.state == TrialState.PRUNED:
                raise TrialPruned(f"repeats trial {other.number}, which was pruned: {name}")
            return list(other.values)
    return evaluate()


class _SeededSampler(BaseSampler):
    """Mixin for samplers that derives a new seed for each trial from the study's seed and the number of earlier trials.

    So a resumed study of one worker draws the same parameters as without the interruption, and workers with equal seeds
    draw different parameters. Retries of a trial are not counted as trials.
    """

    def __init__(self, seed: int) -> None:
        self._study_seed = seed
        super().__init__(seed=seed)  # type: ignore[call-arg]

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Initialise the sampler again, with the seed of this trial."""
        retried_number = RetryHeartbeatStaleTrialCallback.retried_trial_number
        trials = [*study.get_trials(deepcopy=False)[: trial.number], trial]
        first_tries = [each.number if (number := retried_number(each)) is None else number for each in trials]
        position = len({*first_tries} - {first_tries[-1]})
        seed = int(np.random.SeedSequence([self._study_seed, position]).generate_state(1)[0])
        super().__init__(seed=seed)  # type: ignore[call-arg]
        super().before_trial(study, trial)


class _SeededTPE(_SeededSampler, TPESampler):
    """Optuna's tree-structured Parzen estimator (TPE) with a seed per trial."""


class _SeededNSGAII(_SeededSampler, NSGAIISampler):
    """Optuna's NSGA-II (Deb et al. 2002) with a seed per trial."""


_SAMPLERS: Mapping[SamplerName, type[_SeededSampler]] = {"tpe": _SeededTPE, "nsga2": _SeededNSGAII}


def open_storage(url: str, note: _Notify | None = None) -> BaseStorage:
    """Open the storage of a study: `sqlite:///FILE`, `journal:FILE` or the address of a database server.

    Missing files and folders are created. `note` receives a message if a server does not answer. Raises `ParnasError`
    if the storage cannot be opened.
    """
    kind, _, place = url.partition(":")
    if kind == "journal" and place:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        # Optuna's default lock is a symbolic link to the file. If that link is broken, as seen from its folder or from
        # another machine, Optuna never removes the lock of a killed worker.
        return JournalStorage(JournalFileBackend(place, JournalFileOpenLock(place, _JOURNAL_LOCK_SECONDS)))
    if kind == "sqlite" and len(place) > len("///"):
        Path(place.removeprefix("///")).parent.mkdir(parents=True, exist_ok=True)
        storage = _open_database(url, {"connect_args": {"timeout": _SQLITE_LOCK_SECONDS, "isolation_level": None}})
        # Lock at the beginning of a transaction: Optuna reads the state of a trial, then changes it, and no other
        # worker may change it in between.
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return storage
    if kind != "sqlite" and place.startswith("//"):
        storage = _open_database(url, {"pool_pre_ping": True})
        _wait_for_server(storage, note)
        return storage
    raise ParnasError(f"{url!r} is not the address of a storage (--storage); {_ADDRESSES}.")


class _Database(RDBStorage):
    """A database storage whose thread of heartbeats survives an outage of the database."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat; ignore errors, since an error would end Optuna's thread of heartbeats."""
        with suppress(Exception):
            super().record_heartbeat(trial_id)


def _open_database(url: str, engine_kwargs: dict[str, Any]) -> _Database:
    """Open a database, in several attempts, since another worker may be creating its tables at the same time.

    PostgreSQL is opened with the driver psycopg 3 unless the address names another. Raises `ParnasError` if the address
    is invalid, a driver is missing, or the last attempt fails.
    """
    try:
        address = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        raise ParnasError(f"--storage is not the address of a database ({error}); {_ADDRESSES}.") from error
    if address.drivername in ("postgresql", "postgres"):  # SQLAlchemy's default driver is psycopg2
        address = address.set(drivername="postgresql+psycopg")
    shown = address.render_as_string(hide_password=True)
    for attempt in range(1, OPENING_TRIES + 1):
        try:
            return _Database(
                address.render_as_string(hide_password=False),
                engine_kwargs=engine_kwargs,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(_MAX_RETRIES),
            )
        except ArgumentError as error:
            raise ParnasError(f"--storage is not the address of a database ({error}); {_ADDRESSES}.") from error
        except ImportError as error:
            module = getattr(error.__cause__, "name", None) or "its driver"
            package = "'psycopg[binary]'" if module == "psycopg" else module
            raise ParnasError(f"{shown} needs a driver that is not installed: pip install {package}") from error
        except (SQLAlchemyError, OptunaError) as error:
            if attempt == OPENING_TRIES:
                raise ParnasError(
                    f"{shown} cannot be opened ({_first_line(error)}); start the database or correct --storage."
                ) from error
            time.sleep(RETRY_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def _wait_for_server(storage: RDBStorage, note: _Notify | None) -> None:
    """Let new connections wait up to `AWAY_SECONDS` for a server that does not answer, then raise `ParnasError`.

    `note` receives a message when a connection begins to wait.
    """

    def connect(dialect: Any, _: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        deadline, noted = time.monotonic() + AWAY_SECONDS, False
        while True:
            try:
                return dialect.connect(*arguments, **options)
            except dialect.loaded_dbapi.Error as error:
                if note is not None and not noted:
                    note(f"the storage does not answer ({_first_line(error)}); waiting for it")
                noted = True
                if time.monotonic() >= deadline:
                    raise ParnasError(
                        f"The storage has not answered for {AWAY_SECONDS / 60:.0f} minutes ({_first_line(error)}); "
                        "start the database server, then repeat the command to resume the study."
                    ) from error
            time.sleep(RETRY_SECONDS)

    event.listen(storage.engine, "do_connect", connect)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or of the database error that caused an error of Optuna."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ is not None else error
    return next(iter(str(cause).splitlines()), type(cause).__name__)
