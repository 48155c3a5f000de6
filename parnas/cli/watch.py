"""The progress of a run in another process, read from the files that it writes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parnas.runs.pi_history import PiHistory
from parnas.runs.records import MetricsRecord, PiRecord
from parnas.runs.run import METRICS, PI, Run
from parnas.training.progress import Loop, Reporter

_POLL_SECONDS = 1.0  # or ten times the duration of reading, if that is more
SILENT_SECONDS = 120.0
_Stamp = tuple[int, int] | None


@dataclass(frozen=True)
class State:
    """The state of a run, as its files describe it."""

    kind: str
    steps: int
    finished: bool
    space: tuple[str, ...]  # the candidates of a search
    metrics: Sequence[MetricsRecord]
    pi: Sequence[PiRecord]

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.metrics[-1].step if self.metrics else 0

    def latest(self) -> dict[str, MetricsRecord]:
        """Return the last line of metrics of each split."""
        return {record.split: record for record in self.metrics}

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values, with the last lines only."""
        latest = {split: record.to_dict() for split, record in self.latest().items()}
        last = {"latest": latest, "pi": self.pi[-1].to_dict() if self.pi else None}
        return {"kind": self.kind, "step": self.step, "steps": self.steps, "finished": self.finished, **last}


def read_state(run: Run) -> State:
    """Return the state of a run; raises `ParnasError` if the folder is no run, or its files are broken."""
    config, kind, finished = run.config(), run.kind(), run.finished()
    metrics = run.metrics() if (run.folder / METRICS).is_file() else []
    pi = run.pi_records() if (run.folder / PI).is_file() else []
    if pi:
        PiHistory.from_run(run)  # raises if no search wrote this file
    steps = config.search.steps if kind == "search" else config.train.steps
    return State(kind, steps, finished, config.search.candidates, metrics, pi)


def watch(run: Run, reporter: Reporter, sleep: Callable[[float], None] = time.sleep) -> State:
    """Report the last lines of a run and all further ones until it finishes; return its final state."""
    stamps, state = _stamps_of(run), read_state(run)
    reporter.start(Loop(f"{run.name} ({state.kind})", state.step, state.steps))
    try:
        report(reporter, state, list(state.latest().values()), state.pi[-1:])
        warned, took = False, 0.0
        while not state.finished:
            sleep(max(_POLL_SECONDS, 10 * took))
            before, stamps = stamps, _stamps_of(run)  # before reading, so that a later change is seen in the next round
            if stamps != before:
                began, old = time.perf_counter(), state
                state, warned = read_state(run), False
                took = time.perf_counter() - began
                # A run that resumes from a checkpoint has fewer lines; repeated steps are reported again.
                report(reporter, state, state.metrics[len(old.metrics) :], state.pi[len(old.pi) :])
            elif not warned and _idle_seconds(run) > SILENT_SECONDS:
                reporter.note(
                    f"warning: nothing was written for {SILENT_SECONDS / 60:.0f} minutes: it may be validating, or "
                    "have been stopped"
                )
                warned = True
    finally:
        reporter.stop()
    return state


def report(reporter: Reporter, state: State, metrics: Sequence[MetricsRecord], pi: Sequence[PiRecord]) -> None:
    """Report lines of metrics and pi, and the current step."""
    for record in metrics:
        reporter.metrics(record)
    for line in pi:
        reporter.pi(state.space, line)
    reporter.advance(state.step)


def _stamps_of(run: Run) -> list[_Stamp]:
    """Return the stamps of the files that a run appends to and of its summary; `None` for missing files."""
    return [stamp(run, name) for name in (METRICS, PI, "summary.json")]


def stamp(run: Run, name: str) -> _Stamp:
    """Return size in bytes and time in nanoseconds of a file of a run."""
    try:
        status = (run.folder / name).stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _idle_seconds(run: Run) -> float:
    """Return the seconds since the run was started or last wrote a line."""
    newest = max(found[1] for found in [*_stamps_of(run), stamp(run, "config.yaml")] if found is not None)
    return time.time() - newest / 1e9
