"""Follow a run of another process by reading the files that it writes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parnas.runs.pi_history import PiHistory
from parnas.runs.records import MetricsRecord, PiRecord
from parnas.runs.run import METRICS, PI, SUMMARY, Run
from parnas.training.progress import Loop, Reporter

_POLL_SECONDS = 1.0  # between two readings; ten times the duration of a reading, if that is longer
SILENT_SECONDS = 120.0


@dataclass(frozen=True)
class State:
    """The state of a run, as its files describe it."""

    kind: str
    steps: int  # of the whole run
    finished: bool
    space: tuple[str, ...]  # the candidates of a search
    metrics: Sequence[MetricsRecord]
    pi: Sequence[PiRecord]

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return self.metrics[-1].step if self.metrics else 0

    def latest(self) -> dict[str, MetricsRecord]:
        """Return the last line of metrics by split, such as `train` and `valid`."""
        return {record.split: record for record in self.metrics}

    def to_dict(self) -> dict[str, Any]:
        """Return the state for JSON, with the last line of metrics of each split and the last line of pi."""
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
    """Report the last logged lines of a run, then each new line until the run finishes; return the final state."""
    stamps, state = _file_stamps(run), read_state(run)
    reporter.start(Loop(f"{run.name} ({state.kind})", state.step, state.steps))
    try:
        _report(reporter, state, list(state.latest().values()), state.pi[-1:])
        warned, read_seconds = False, 0.0
        while not state.finished:
            sleep(max(_POLL_SECONDS, 10 * read_seconds))
            # Stamps are taken before reading, so that the next round sees what is written in the meantime.
            earlier_stamps, stamps = stamps, _file_stamps(run)
            if stamps != earlier_stamps:
                started, earlier = time.perf_counter(), state
                state, warned = read_state(run), False
                read_seconds = time.perf_counter() - started
                # A run that resumes from a checkpoint has fewer lines; repeated steps are reported again.
                _report(reporter, state, state.metrics[len(earlier.metrics) :], state.pi[len(earlier.pi) :])
            elif not warned and time.time() - max(stamps)[0] / 1e9 > SILENT_SECONDS:
                reporter.note(
                    f"warning: nothing was written for {SILENT_SECONDS / 60:.0f} minutes: the run may be validating, "
                    "or may have been stopped"
                )
                warned = True
    finally:
        reporter.stop()
    return state


def _report(reporter: Reporter, state: State, metrics: Sequence[MetricsRecord], pi: Sequence[PiRecord]) -> None:
    """Pass lines of metrics and pi, and the current step, to the reporter."""
    for record in metrics:
        reporter.metrics(record)
    for line in pi:
        reporter.pi(state.space, line)
    reporter.advance(state.step)


def _file_stamps(run: Run) -> list[tuple[int, int]]:
    """Return modification time in nanoseconds and size in bytes of each existing file that a run writes to."""
    paths = [run.folder / name for name in ("config.yaml", METRICS, PI, SUMMARY)]
    stats = [path.stat() for path in paths if path.exists()]
    return [(status.st_mtime_ns, status.st_size) for status in stats]
