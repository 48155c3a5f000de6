"""A black-box search as a baseline: Optuna proposes strings, knowing only what the ones before were worth.

Many workers, on many machines, may share a study; its storage is all they have in common. Three things follow.
A worker asks for a trial and then counts the ones before it: only the first N may go on, so that all workers together
make N. It announces its network and then waits for earlier trials of the same one, as in Lamport's bakery (1974), so
that each network is evaluated once and no two wait for each other. And it shows that it lives, by a beat that others
watch with their own clocks: a trial whose beat stands still is given up, and its place is free again.
"""

import itertools
import json
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.exceptions import OptunaError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.nas.trials import Finding, Task, name_network
from parnas.training.reporter import Reporter

Sampler = Literal["tpe", "nsga2"]
FINISHED, RUNNING = (TrialState.COMPLETE, TrialState.PRUNED), (TrialState.RUNNING,)
NETWORK, SOURCE, REUSED, BEAT, TERMS = "network", "source", "reused_from", "beat", "terms"  # names of attributes
POLL_SECONDS, BEAT_SECONDS, STALE_SECONDS = 0.5, 20.0, 120.0
OPENING_TRIES = 5
LOCKED_SECONDS = 60  # that a worker waits for the others' writes to an SQLite file


def blackbox(study: optuna.Study, task: Task, trials: int, reporter: Reporter) -> None:
    """Go on with a study until all its workers together have finished `trials` trials; a complete one is left as is."""
    watch = Watch()
    reporter.start("blackbox", len(finished(study)), trials)
    try:
        while (done := len(finished(study))) < trials:
            reporter.advance(done)
            watch.give_up_stale(study)
            if len(study.get_trials(deepcopy=False, states=FINISHED + RUNNING)) >= trials:
                time.sleep(POLL_SECONDS)  # other workers have the last places; one may yet be given up
                continue
            run_trial(study, study.ask(), task, trials, watch, reporter)
        reporter.advance(trials)
    finally:
        reporter.stop()


def run_trial(study: optuna.Study, trial: Trial, task: Task, trials: int, watch: "Watch", reporter: Reporter) -> None:
    """Evaluate one string, take over the values of its network, or leave the place to earlier trials."""
    try:
        with beating(trial):
            before = study.get_trials(deepcopy=False, states=FINISHED + RUNNING)
            if sum(other.number < trial.number for other in before) >= trials:
                study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
                return
            layers = [trial.suggest_categorical(f"block {n}", each) for n, each in enumerate(task.candidates, 1)]
            network = name_network(layers)
            trial.set_user_attr(NETWORK, network)
            if not network:  # identity alone is no language model: counted, never evaluated, and not proposed gladly
                study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
                reporter.note(f"trial {trial.number}: identity alone, passed over")
                return
            equal = find_equal(study, trial.number, network, watch)
            if equal is None:
                trial.set_user_attr(SOURCE, task.source)
                values = [task.perplexity(trial.number, Architecture(layers)), task.costs.cost(layers)]
            else:
                trial.set_user_attr(REUSED, equal.number)
                values = list(equal.values)
        lost = study.tell(trial, values, skip_if_finished=True).state == TrialState.FAIL
    except UpdateFinishedTrialError:
        lost = True
    except BaseException:
        # Not left as running, where others would wait for it.
        with suppress(OptunaError):
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        raise
    if lost:
        reporter.note(f"trial {trial.number} had been given up by another worker, which heard no beat of it")
        return
    known = "" if equal is None else f", known from trial {equal.number}"
    share = values[1] / task.costs.interleaved
    reporter.note(f"trial {trial.number}: {network}  ppl {values[0]:.2f}  cost {share:.2f}{known}")


def find_equal(study: optuna.Study, number: int, network: str, watch: "Watch") -> FrozenTrial | None:
    """The trial that evaluated the same network; waits for earlier ones that do so now, or have not said which."""
    while True:
        others = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        alike = [other for other in others if other.user_attrs.get(NETWORK, network) == network]
        for other in alike:
            if other.state == TrialState.COMPLETE and REUSED not in other.user_attrs:
                return other
        if not any(other.number < number for other in alike):
            return None
        watch.give_up_stale(study)
        time.sleep(POLL_SECONDS)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that count."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def findings(study: optuna.Study) -> list[Finding]:
    """Each network that was evaluated, once, in the order of the trials."""
    return [
        Finding(trial.user_attrs[NETWORK], trial.values[0], trial.values[1], trial.number, trial.user_attrs[SOURCE])
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if REUSED not in trial.user_attrs
    ]


# Signs of life.


@contextmanager
def beating(trial: Trial) -> Iterator[None]:
    """Count up an attribute of the trial as long as the body runs."""
    stop = threading.Event()

    def beat() -> None:
        for number in itertools.count(1):
            if stop.wait(BEAT_SECONDS):
                return
            with suppress(OptunaError, OSError):  # the next beat may come through; the body finds out by itself
                trial.set_user_attr(BEAT, number)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watch:
    """Gives up running trials whose beat has stood still for so long by this clock that its worker must be dead."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, float]] = {}  # by trial: its beat, and when that was first seen

    def give_up_stale(self, study: optuna.Study) -> None:
        """Mark such trials as failed; another worker may do the same at once."""
        now = time.monotonic()
        for trial in study.get_trials(deepcopy=False, states=RUNNING):
            beat = trial.user_attrs.get(BEAT, 0)
            before, since = self.seen.setdefault(trial.number, (beat, now))
            if beat != before:
                self.seen[trial.number] = beat, now
            elif now - since > STALE_SECONDS:
                with suppress(UpdateFinishedTrialError):
                    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


# The study.


def open_study(storage: str, name: str, sampler: Sampler, task: Task) -> optuna.Study:
    """Open or begin a study that minimises perplexity and cost.

    Raises `ParnasError` where the storage cannot be opened, or the study was begun on other terms.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    study = optuna.create_study(
        storage=open_storage(storage),
        study_name=name,
        sampler=SamplerByNumber(sampler, task.config.runtime.seed),
        directions=["minimize", "minimize"],
        load_if_exists=True,
    )
    terms = json.loads(json.dumps(task.terms))
    if TERMS not in study.user_attrs:
        if study.get_trials(deepcopy=False) or len(study.directions) != 2:
            raise ParnasError(f"The study {name} was not begun by parnas blackbox; choose another --study.")
        study.set_user_attr(TERMS, terms)
    refuse_other_terms(study.user_attrs[TERMS], terms, name)
    return study


def refuse_other_terms(before: dict[str, Any], now: dict[str, Any], name: str) -> None:
    """Raise where values of a study's trials would not compare with new ones."""
    keys = list(dict.fromkeys([*before, *now]))
    changed = [key for key in keys if before.get(key) != now.get(key)]
    if changed:
        lines = [f"  - {key}: {before.get(key)} before, {now.get(key)} now" for key in changed]
        raise ParnasError(f"The study {name} was begun on other terms; choose another --study:\n" + "\n".join(lines))


def open_storage(url: str) -> BaseStorage:
    """`sqlite:///FILE`, `journal:FILE` or the address of a database server; raises `ParnasError` with the cure."""
    kind, _, place = url.partition(":")
    if kind == "journal" and place:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(place))
    if kind == "sqlite" and len(place) > len("///"):
        Path(place.removeprefix("///")).parent.mkdir(parents=True, exist_ok=True)
        return open_database(url, {"connect_args": {"timeout": LOCKED_SECONDS}})
    if kind != "sqlite" and place.startswith("//"):
        return open_database(url, {"pool_pre_ping": True})
    raise ParnasError(f"{url} is no storage; give sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.")


def open_database(url: str, settings: dict[str, Any]) -> BaseStorage:
    """Open a database, several times where another worker is just making its tables."""
    for tried in range(1, OPENING_TRIES + 1):
        try:
            shown = make_url(url).render_as_string(hide_password=True)
            return RDBStorage(url, engine_kwargs=settings)
        except ArgumentError as error:
            raise ParnasError(f"--storage is no address of a database: {error}") from error
        except ImportError as error:
            module = getattr(error.__cause__, "name", None) or "its driver"
            package = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary"}.get(module, module)
            raise ParnasError(f"{shown} needs a driver that is not installed: pip install {package}") from error
        except (SQLAlchemyError, OptunaError) as error:
            if tried == OPENING_TRIES:
                reason = str(error).splitlines()[0]
                raise ParnasError(f"{shown} cannot be opened ({reason}); start it or mend --storage.") from error
            time.sleep(POLL_SECONDS)
    raise AssertionError("the last try returns or raises")


class SamplerByNumber(optuna.samplers.BaseSampler):
    """A sampler whose draws for a trial follow from the seed and the trial's number alone, given the trials before.

    So a study that was interrupted goes on as if it had not been, and workers with one seed do not draw the same.
    """

    def __init__(self, kind: Sampler, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.inner = make_sampler(kind, seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Begin the draws anew."""
        self.inner = make_sampler(
            self.kind, int(np.random.SeedSequence([self.seed, trial.number]).generate_state(1)[0])
        )
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """As the sampler within."""
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """As the sampler within."""
        return self.inner.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """As the sampler within."""
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """As the sampler within."""
        self.inner.after_trial(study, trial, state, values)


def make_sampler(kind: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    """Tree-structured Parzen estimators, which count running trials as bad ones, or NSGA-II (Deb et al. 2002)."""
    if kind == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
