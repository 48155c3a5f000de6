"""Looking on at a run that goes on elsewhere, from the files that it writes."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parnas.errors import ParnasError
from parnas.figures.history import PiHistory
from parnas.run import METRICS, PI, Run
from parnas.training.reporter import FIGURES, Loop, Reporter

POLL_SECONDS = 1.0  # or ten times what reading takes, where that is more
SILENT_SECONDS = 120.0
Record = Mapping[str, Any]
Stamp = tuple[int, int] | None


@dataclass(frozen=True)
class State:
    """What the files of a run say."""

    kind: str
    steps: int
    finished: bool
    space: tuple[str, ...]  # the candidates of a search
    metrics: Sequence[Record]
    pi: Sequence[Record]

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def latest(self) -> dict[str, Record]:
        """The last line of metrics of each split."""
        return {record["split"]: record for record in self.metrics}

    def to_dict(self) -> dict[str, Any]:
        """As plain values: the last lines, not those before."""
        last = {"latest": self.latest(), "pi": self.pi[-1] if self.pi else None}
        return {"kind": self.kind, "step": self.step, "steps": self.steps, "finished": self.finished, **last}


def read_state(run: Run) -> State:
    """The present state of a run; raises `ParnasError` where there is none, or its files are broken."""
    config, kind, finished = run.config(), run.kind(), run.finished()
    metrics, pi = (run.records(name) if (run.folder / name).is_file() else [] for name in (METRICS, PI))
    told = [checked(record, run) for record in metrics]
    if pi:
        PiHistory.from_run(run)  # which refuses what no search wrote
    steps = config.search.steps if kind == "search" else config.train.steps
    return State(kind, steps, finished, config.search.candidates, told, pi)


def checked(record: Record, run: Run) -> Record:
    """A line of metrics as it is shown; raises `ParnasError` for one that no training wrote."""
    figures = {name: record[name] for name in ("loss", "ppl", *FIGURES) if name in record}
    if record.get("split") not in ("train", "valid") or not {"loss", "ppl"} <= figures.keys():
        raise ParnasError(
            f"{run.folder / METRICS} has a line that is not of train or valid with loss and ppl; remove it."
        )
    if not all(value is None or type(value) in (int, float) for value in figures.values()):
        raise ParnasError(f"{run.folder / METRICS} has a line whose figures are no numbers; remove it.")
    return {**record, **{name: math.nan if value is None else value for name, value in figures.items()}}


def watch(run: Run, reporter: Reporter, sleep: Callable[[float], None] = time.sleep) -> State:
    """Tell a reporter what a run has last written, and all that it writes until it is finished; its last state."""
    stamps, state = stamps_of(run), read_state(run)
    reporter.start(Loop(f"{run.name} ({state.kind})", state.step, state.steps))
    try:
        tell(reporter, state, list(state.latest().values()), state.pi[-1:])
        warned, took = False, 0.0
        while not state.finished:
            sleep(max(POLL_SECONDS, 10 * took))
            before, stamps = stamps, stamps_of(run)  # before reading: what is written meanwhile shows the next time
            if stamps != before:
                began, old = time.perf_counter(), state
                state, warned = read_state(run), False
                took = time.perf_counter() - began
                # Fewer lines where the run was stopped and goes on from a checkpoint: what comes again is told again.
                tell(reporter, state, state.metrics[len(old.metrics) :], state.pi[len(old.pi) :])
            elif not warned and idle_seconds(run) > SILENT_SECONDS:
                reporter.note(
                    f"warning: nothing was written for {SILENT_SECONDS / 60:.0f} minutes: it may be validating, or "
                    "have been stopped"
                )
                warned = True
    finally:
        reporter.stop()
    return state


def tell(reporter: Reporter, state: State, metrics: Sequence[Record], pi: Sequence[Record]) -> None:
    """Give a reporter some lines of a run, and how far it is."""
    for record in metrics:
        reporter.metrics(record)
    for record in pi:
        reporter.pi(state.space, record)
    reporter.advance(state.step)


def stamps_of(run: Run) -> list[Stamp]:
    """Size and time of what a run adds to, and of what it ends with; none for a file that is not there."""
    return [stamp(run, name) for name in (METRICS, PI, "summary.json")]


def stamp(run: Run, name: str) -> Stamp:
    """Size in bytes and time in nanoseconds of a file of a run."""
    try:
        status = (run.folder / name).stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def idle_seconds(run: Run) -> float:
    """Since a file that a run adds to was last written, or since it was begun."""
    newest = max(found[1] for found in [*stamps_of(run), stamp(run, "config.yaml")] if found is not None)
    return time.time() - newest / 1e9
