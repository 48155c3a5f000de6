"""What a study of settings came to, its files, and how a trial's training tells of itself; knows no optimiser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from parnas.config import Config, dump_config
from parnas.errors import ParnasError
from parnas.files import write_json, write_text
from parnas.nas.tuning_space import Phase, Space, describe_space, to_label
from parnas.run import METRICS, TUNING, Run
from parnas.training.reporter import Loop, Reporter, Silent

BEST, TRIALS = "best.yaml", "trials"


class TrialResult(NamedTuple):
    """A finished trial."""

    number: int
    state: str  # complete, pruned (ended early), diverged, or passed over
    loss: float | None  # nats per token of the validation split; of a pruned trial the last one
    step: int | None  # of the last validation
    seconds: float | None
    folder: str | None  # below the study's, where it trained
    settings: Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class Tuned:
    """A study of settings: its trials, the best of them, and how much each setting mattered."""

    folder: Path
    study: str
    phase: Phase
    space: Space = field(repr=False)
    trials: tuple[TrialResult, ...] = field(repr=False)
    best: TrialResult | None
    """The least loss of the trials that came to their end; none where all diverged or were ended early."""
    config: Config | None = field(repr=False)
    """The configuration with the best settings."""
    configured: TrialResult | None = field(repr=False)
    """The trial of the configuration as it was given, where there is one."""
    importance: Mapping[str, float] | None = field(repr=False)
    """Shares that add up to 1, by dotted key; none where there are too few trials to tell."""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each finished trial, in the order of their beginning."""
        rows = [
            {
                "trial": each.number,
                "state": each.state,
                "loss": each.loss,
                "step": each.step,
                "seconds": each.seconds,
                "folder": each.folder,
                **{key: each.settings[key] for key in self.space},
            }
            for each in self.trials
        ]
        return pd.DataFrame(rows)

    def counts(self) -> dict[str, int]:
        """How many trials ended how."""
        states = [each.state for each in self.trials]
        return {state: states.count(state) for state in ("complete", "pruned", "diverged", "passed over")}

    def to_dict(self) -> dict[str, Any]:
        """The content of `tuning.json`."""
        return {
            "study": self.study,
            "phase": self.phase,
            "counts": self.counts(),
            "best": None if self.best is None else to_plain(self.best),
            "configured": None if self.configured is None else to_plain(self.configured),
            "importance": self.importance,
            "space": describe_space(self.space),
            "trials": [to_plain(each) for each in self.trials],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `trials.csv`, `trials.md` and `tuning.json`, and `best.yaml`, which the phase takes as it is."""
        table = self.table.map(lambda value: to_label(value) if isinstance(value, list | tuple) else value)
        texts = {
            f"{TRIALS}.csv": table.to_csv(index=False),
            f"{TRIALS}.md": table.to_markdown(index=False, floatfmt=".4g", missingval="") + "\n",
        }
        if self.best is not None and self.config is not None:
            told = f"# The best of {len(self.trials)} trials of {self.study}: trial {self.best.number}, "
            told += f"validation loss {self.best.loss:.4f}.\n"
            texts[BEST] = told + f"# parnas {self.phase} {BEST}\n" + dump_config(self.config)
        for name, text in texts.items():
            write_text(folder / name, text)
        write_json(folder / TUNING, self.to_dict())
        return [*(folder / name for name in texts), folder / TUNING]


def to_plain(trial: TrialResult) -> dict[str, Any]:
    """A trial as it is written."""
    return {**trial._asdict(), "settings": dict(trial.settings)}


class Hopeless(Exception):
    """A training that is ended since others were better at its step; the text says where."""


class TrialReporter(Silent):
    """Hands on what a training tells, under the trial's name, and its validations to the study as well.

    A training that is taken up tells again of what it had validated before.
    """

    def __init__(self, reporter: Reporter, title: str, loss: str, report: Callable[[int, float, bool], None]) -> None:
        self.reporter, self.title, self.report = reporter, title, report
        self.key = "loss" if loss == "valid" else f"{loss}_loss"
        self.steps = 0

    def start(self, loop: Loop) -> None:
        self.steps = loop.steps
        self.reporter.start(loop._replace(title=self.title))
        if loop.first_step and loop.folder is not None:
            self.retell(loop.folder)

    def advance(self, step: int) -> None:
        self.reporter.advance(step)

    def metrics(self, record: Mapping[str, Any]) -> None:
        self.reporter.metrics(record)
        self.validated(record)

    def pi(self, space: Any, record: Mapping[str, Any]) -> None:
        self.reporter.pi(space, record)

    def note(self, text: str) -> None:
        self.reporter.note(text)

    def stop(self) -> None:
        self.reporter.stop()

    def retell(self, folder: Path) -> None:
        """Report the validations that a run folder holds; all as the last ones, where nothing has started."""
        for record in Run(folder).records(METRICS):
            self.validated(record)

    def validated(self, record: Mapping[str, Any]) -> None:
        """Report a line of the metrics, where it is of a validation."""
        if record.get("split") == "valid":
            if not isinstance(loss := record.get(self.key), float):
                raise ParnasError(f"A line of {METRICS} at step {record['step']} has no {self.key}; remove that trial.")
            self.report(record["step"], loss, record["step"] >= self.steps)
