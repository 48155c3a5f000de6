"""Workers of a shared study: who makes which trial, and what becomes of those of a dead one; `Job` says what it is.

Many workers, on many machines, may share a study; its storage is all they have in common. Four things follow.
A worker asks for a trial and then counts the ones before it: only the first N may go on, so that all workers together
make N. It announces what it evaluates and then waits for earlier trials of the same, as in Lamport's bakery (1974), so
that nothing is evaluated twice and no two wait for each other. And it shows that it lives, by a beat that others
watch with their own clocks: a trial whose beat stands still is given up, and its place is free again. What such a
trial was evaluating, the next trial evaluates (`proposals.py`).
"""

import itertools
import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import optuna
from optuna.exceptions import OptunaError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from parnas.errors import ParnasError
from parnas.nas.proposals import INTERRUPTED, SOURCE, TRIES, Proposals, Sampler, failures
from parnas.nas.storage import answered, open_storage
from parnas.training.reporter import Loop, Reporter
from parnas.training.stopping import Stopped

FINISHED, RUNNING = (TrialState.COMPLETE, TrialState.PRUNED), (TrialState.RUNNING,)
REUSED, RETRIED, BEAT, TERMS = "reused_from", "retries", "beat", "terms"  # names of attributes
POLL_SECONDS, BEAT_SECONDS, STALE_SECONDS = 0.5, 20.0, 120.0


class Outcome(NamedTuple):
    """How a trial ends: with its values, or in a state; and what people are told."""

    values: Sequence[float] | None = None
    state: TrialState | None = None
    note: str = ""


GIVEN_BACK = Outcome(state=TrialState.FAIL)


class Proposal(NamedTuple):
    """What a trial is to evaluate: equal names are evaluated once. `refused` says why it is passed over instead."""

    name: str
    refused: str | None = None


class Job(Protocol):
    """What the trials of a study evaluate, and how."""

    @property
    def command(self) -> str:
        """The command that begins such studies."""

    @property
    def key(self) -> str:
        """The attribute of a trial that holds the name of what it evaluates."""

    @property
    def source(self) -> str:
        """Where values come from: trained, or inherited from a SuperNet."""

    @property
    def terms(self) -> Mapping[str, Any]:
        """All that values depend on, equal for all workers of a study."""

    @property
    def seed(self) -> int:
        """From which all draws follow."""

    @property
    def cure(self) -> str:
        """What a user should do where the study was begun on other terms."""

    @property
    def objectives(self) -> int:
        """How many values a trial has, all to be minimised."""

    @property
    def pruner(self) -> BasePruner | None:
        """What ends hopeless trials early, where the job asks it."""

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The parameters of the first trial, where they are not drawn."""

    def propose(self, trial: Trial) -> Proposal:
        """Draw what the trial is to evaluate."""

    def evaluate(self, trial: Trial, name: str, lost: FrozenTrial | None) -> Outcome:
        """Find the values; `lost` is the trial that did not finish the same."""

    def describe(self, name: str, values: Sequence[float]) -> str:
        """What people are told of values."""


def work(study: optuna.Study, job: Job, trials: int, reporter: Reporter) -> None:
    """Go on with a study until all its workers together have finished `trials` trials; a complete one is left as is.

    Raises `ParnasError` where the storage does not answer any more.
    """
    watch = Watch()
    reporter.start(Loop(job.command, len(finished(study)), trials, "trials"))
    before = ""
    try:
        while (now := answered(partial(go_on, study, job, trials, watch, reporter), reporter.note)) != "complete":
            if now == "waited" != before:
                reporter.note("other workers have the last trials; waiting for them")
            before = now
        reporter.advance(trials)
    finally:
        reporter.stop()


def go_on(
    study: optuna.Study, job: Job, trials: int, watch: "Watch", reporter: Reporter
) -> Literal["ran", "waited", "complete"]:
    """Run a trial, or wait where other workers have the last places."""
    if (done := len(study.get_trials(deepcopy=False, states=FINISHED))) >= trials:
        return "complete"
    reporter.advance(done)
    watch.give_up_stale(study)
    if len(study.get_trials(deepcopy=False, states=FINISHED + RUNNING)) >= trials:
        time.sleep(POLL_SECONDS)  # one of the last places may yet be given up
        return "waited"
    run_trial(study, study.ask(), job, trials, watch, reporter)
    return "ran"


def run_trial(study: optuna.Study, trial: Trial, job: Job, trials: int, watch: "Watch", reporter: Reporter) -> None:
    """Find a trial's values and write them down; whatever happens, the trial is not left as running."""
    try:
        with beating(study, trial, watch):
            outcome = evaluate(study, trial, job, trials, watch, reporter)
        tell = partial(study.tell, trial, outcome.values, outcome.state, skip_if_finished=True)
        lost = answered(tell, reporter.note).state == TrialState.FAIL and outcome is not GIVEN_BACK
    except UpdateFinishedTrialError:
        lost = True
    except BaseException as error:
        with suppress(OptunaError, SQLAlchemyError):
            if isinstance(error, KeyboardInterrupt | Stopped):
                trial.set_user_attr(INTERRUPTED, True)
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        raise
    if lost:
        reporter.note(f"trial {trial.number} had been given up by another worker, which heard no beat of it")
    elif outcome.note:
        reporter.note(f"trial {trial.number}: {outcome.note}")


def evaluate(study: optuna.Study, trial: Trial, job: Job, trials: int, watch: "Watch", reporter: Reporter) -> Outcome:
    """Evaluate what is proposed, take over values that are known, or leave the place to earlier trials."""
    before = study.get_trials(deepcopy=False, states=FINISHED + RUNNING)
    if sum(other.number < trial.number for other in before) >= trials:
        return GIVEN_BACK
    name, refused = job.propose(trial)
    assert isinstance(study.sampler, Proposals)
    lost = study.sampler.lost
    if lost is not None:
        trial.set_user_attr(RETRIED, lost.number)
    trial.set_user_attr(job.key, name)
    if refused is not None:
        return Outcome(state=TrialState.PRUNED, note=f"{refused}, passed over")
    equal = find_equal(study, trial.number, name, watch, job.key, wait=lost is None)
    if equal is not None and lost is not None:
        return GIVEN_BACK  # another worker was faster to try it again
    if equal is not None:
        trial.set_user_attr(REUSED, equal.number)
        return known_from(equal, name, job)
    if failures(study.get_trials(deepcopy=False), job.key)[name] >= TRIES:
        return Outcome(state=TrialState.PRUNED, note=f"{name}, passed over: {TRIES} workers ended with it")
    trial.set_user_attr(SOURCE, job.source)
    if lost is not None:
        reporter.note(f"trial {trial.number}: {name} again, which trial {lost.number} did not finish")
    return job.evaluate(trial, name, lost)


def known_from(equal: FrozenTrial, name: str, job: Job) -> Outcome:
    """What a trial that evaluated the same came to; its last value stands for nothing where it was ended early."""
    if equal.state == TrialState.PRUNED:
        return Outcome(state=TrialState.PRUNED, note=f"{name}, ended early, known from {equal.number}")
    return Outcome(equal.values, note=f"{job.describe(name, equal.values)}, known from {equal.number}")


def find_equal(
    study: optuna.Study, number: int, name: str, watch: "Watch", key: str, wait: bool = True
) -> FrozenTrial | None:
    """The trial that evaluated the same, or ended early with it.

    Waits for earlier ones that do so now, or have not said what they evaluate.

    Without `wait` also an earlier trial that evaluates the same now.
    """
    while True:
        others = study.get_trials(deepcopy=False, states=FINISHED + RUNNING)
        alike = [other for other in others if other.user_attrs.get(key, name) == name]
        for other in alike:
            if other.state in FINISHED and SOURCE in other.user_attrs:
                return other
        earlier = [other for other in alike if other.state in RUNNING and other.number < number]
        if not earlier:
            return None
        if not wait and key in earlier[0].user_attrs:
            return earlier[0]
        watch.give_up_stale(study)
        time.sleep(POLL_SECONDS)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that count."""
    return answered(partial(study.get_trials, deepcopy=False, states=FINISHED))


# Signs of life.


@contextmanager
def beating(study: optuna.Study, trial: Trial, watch: "Watch") -> Iterator[None]:
    """Count up an attribute of the trial as long as the body runs, and look for other trials that no longer do."""
    stop = threading.Event()

    def beat() -> None:
        for number in itertools.count(1):
            if stop.wait(BEAT_SECONDS):
                return
            with suppress(Exception):  # the next beat may come through; the body finds out by itself
                trial.set_user_attr(BEAT, number)
                watch.give_up_stale(study)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watch:
    """Gives up running trials whose beat has stood still for so long by this clock that its worker must be dead.

    What it saw before it could not look for a while counts for nothing: this worker was suspended then, or the storage
    was away, and others may have had no chance to beat.
    """

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, float]] = {}  # by trial: its beat, and when that was first seen
        self.looked = time.monotonic()

    def give_up_stale(self, study: optuna.Study) -> None:
        """Mark such trials as failed; another worker may do the same at once."""
        running = study.get_trials(deepcopy=False, states=RUNNING)
        now = time.monotonic()
        if now - self.looked > STALE_SECONDS / 2:
            self.seen.clear()
        self.looked = now
        for trial in running:
            beat = trial.user_attrs.get(BEAT, 0)
            before, since = self.seen.setdefault(trial.number, (beat, now))
            if beat != before:
                self.seen[trial.number] = beat, now
            elif now - since > STALE_SECONDS:
                with suppress(UpdateFinishedTrialError):
                    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


# The study.


def open_shared(storage: str, name: str, sampler: Sampler, job: Job) -> optuna.Study:
    """Open or begin a study that minimises all values.

    Raises `ParnasError` where the storage cannot be opened, or the study was begun on other terms.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    proposals = Proposals(sampler, job.seed, job.key, job.first)
    return answered(partial(load_or_begin, open_storage(storage), name, proposals, job))


def load_or_begin(storage: BaseStorage, name: str, proposals: Proposals, job: Job) -> optuna.Study:
    """The study of that name in a storage."""
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=proposals,
        pruner=job.pruner,
        directions=["minimize"] * job.objectives,
        load_if_exists=True,
    )
    terms = json.loads(json.dumps(job.terms))
    trials = study.get_trials(deepcopy=False)  # read before the terms, which another worker writes before its first
    if len(study.directions) != job.objectives or (trials and TERMS not in study.user_attrs):
        raise ParnasError(f"The study {name} was not begun by parnas {job.command}; {job.cure}.")
    if TERMS not in study.user_attrs:
        study.set_user_attr(TERMS, terms)
    refuse_other_terms(study.user_attrs[TERMS], terms, name, job.cure)
    return study


def refuse_other_terms(before: dict[str, Any], now: dict[str, Any], name: str, cure: str) -> None:
    """Raise where values of a study's trials would not compare with new ones."""
    if before != now:
        changed = [key for key in before if key in now and before[key] != now[key]]
        changed = changed or [*(before.keys() ^ now.keys())]  # which alone say less: they follow from others
        lines = [f"  - {key}: {before.get(key)} before, {now.get(key)} now" for key in changed]
        if changed == ["costs"] and now.get("metric") == "latency":
            lines.append("Latencies are each machine's own: give all workers one search.cost.table, or other costs.")
        raise ParnasError(f"The study {name} was begun on other terms; {cure}:\n" + "\n".join(lines))
