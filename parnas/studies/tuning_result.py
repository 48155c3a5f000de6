"""The results of `parnas tune`: its trials, the best settings, the importance of each setting, and the files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from parnas.config.loader import Config, dump_config
from parnas.runs.files import write_json, write_text
from parnas.runs.run import TUNING
from parnas.studies.tuning_space import Phase, Space, describe_space, to_label

BEST, TRIALS = "best.yaml", "trials"
_STATES = ("complete", "pruned", "diverged", "skipped")


class TrialResult(NamedTuple):
    """A finished trial."""

    number: int
    state: str  # one of _STATES; skipped: its settings do not fit together
    loss: float | None  # nats per token of the validation split; of a pruned trial the last one
    step: int | None  # of the last validation
    seconds: float | None
    folder: str | None  # of its run, below the study's
    settings: Mapping[str, Any]  # by dotted key

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**self._asdict(), "settings": dict(self.settings)}


@dataclass(frozen=True)
class TuningResult:
    """The trials of a study, the best of them, and the importance of each setting."""

    folder: Path
    study: str
    phase: Phase
    space: Space = field(repr=False)
    trials: tuple[TrialResult, ...] = field(repr=False)
    best: TrialResult | None
    """The least loss of the complete trials; `None` if there is none."""
    config: Config | None = field(repr=False)
    """The configuration with the best settings."""
    configured: TrialResult | None = field(repr=False)
    """The trial of the configuration as it was given, if there is one."""
    importance: Mapping[str, float] | None = field(repr=False)
    """Shares that add up to 1, by dotted key; `None` if there are too few trials."""

    @property
    def table(self) -> pd.DataFrame:
        """Return a row for each finished trial, by number."""
        columns = ["number", "state", "loss", "step", "seconds", "folder"]
        rows = [each._asdict() | {key: each.settings[key] for key in self.space} for each in self.trials]
        return pd.DataFrame(rows, columns=[*columns, *self.space]).rename(columns={"number": "trial"})

    def counts(self) -> dict[str, int]:
        """Return the number of trials by state."""
        states: Sequence[str] = [each.state for each in self.trials]
        return {state: states.count(state) for state in _STATES}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `tuning.json`."""
        return {
            "study": self.study,
            "phase": self.phase,
            "counts": self.counts(),
            "best": None if self.best is None else self.best.to_dict(),
            "configured": None if self.configured is None else self.configured.to_dict(),
            "importance": self.importance,
            "space": describe_space(self.space),
            "trials": [each.to_dict() for each in self.trials],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `trials.csv`, `trials.md`, `tuning.json`, and `best.yaml` for `parnas retrain` or `parnas search`."""
        table = self.table.map(lambda value: to_label(value) if isinstance(value, list | tuple) else value)
        texts = {
            f"{TRIALS}.csv": table.to_csv(index=False),
            f"{TRIALS}.md": table.to_markdown(index=False, floatfmt=".4g", missingval="") + "\n",
        }
        if self.best is not None and self.config is not None:
            heading = f"# The best of {len(self.trials)} trials of {self.study}: trial {self.best.number}, "
            heading += f"validation loss {self.best.loss:.4f}.\n"
            texts[BEST] = heading + f"# parnas {self.phase} {BEST}\n" + dump_config(self.config)
        for name, text in texts.items():
            write_text(folder / name, text)
        write_json(folder / TUNING, self.to_dict())
        return [*(folder / name for name in texts), folder / TUNING]
