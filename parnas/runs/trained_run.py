"""A finished training for use in Python: the contents of its run folder as typed values and data frames."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

import pandas as pd

from parnas.runs.pi_history import PiHistory
from parnas.runs.records import RunSummary
from parnas.runs.run import Run

__all__ = ["RunLike", "TrainedRun", "open_run"]


@dataclass(frozen=True)
class TrainedRun:
    """A finished search or retraining."""

    folder: Path
    kind: str
    """`search` or `retrain`."""
    arch: str
    """The trained architecture; for a search that of `arch.yaml` or, without the file, the last line of `pi.jsonl`."""
    summary: RunSummary = field(repr=False)
    """The content of `summary.json`: `steps`, `seconds`, `parameters`, and the validation losses `valid.loss` (nats per
    token), `valid.ppl`, `valid.word_ppl` and `valid.bits_per_byte`."""
    metrics: pd.DataFrame = field(repr=False, compare=False)
    """A row for each line of `metrics.jsonl`, with the fields of `MetricsRecord` as columns; missing values are NaN."""
    pi: pd.DataFrame | None = field(repr=False, compare=False)
    """For a search, a row for each logged step, block and candidate: `step`, `tau`, `block` (from 1), `layer`, `pi`.
    The pi of a block sum to 1."""

    @classmethod
    def read(cls, run: "RunLike") -> Self:
        """Read a run folder; raise `ParnasError` if the training has not finished."""
        opened = open_run(run)
        summary, kind = opened.summary(), opened.kind()
        return cls(
            opened.folder,
            kind,
            str(opened.architecture() or summary.arch),
            summary,
            pd.DataFrame([record.to_dict() for record in opened.metrics()]),
            _pi_frame(opened) if kind == "search" else None,
        )


RunLike: TypeAlias = str | Path | Run | TrainedRun
"""A run folder, as a path or an object."""


def _pi_frame(run: Run) -> pd.DataFrame:
    """Return the logged probabilities of a search as a data frame; see `TrainedRun.pi`."""
    history, spaces = PiHistory.from_run(run), run.config().search.block_spaces
    cells = [(block, layer, history.space.index(layer)) for block, layers in enumerate(spaces, 1) for layer in layers]
    rows = [
        (int(step), float(tau), block, layer, float(pi[block - 1, column]))
        for step, tau, pi in zip(history.steps, history.taus, history.pi, strict=True)
        for block, layer, column in cells
    ]
    return pd.DataFrame(rows, columns=["step", "tau", "block", "layer", "pi"])


def open_run(run: RunLike) -> Run:
    """Return a `Run`, given its folder, a `TrainedRun` or a `Run`."""
    if isinstance(run, Run):
        return run
    return Run(run.folder if isinstance(run, TrainedRun) else run)
