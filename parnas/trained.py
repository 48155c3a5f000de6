"""A training that was run, as Python sees it: what is in its run folder, as plain values and frames."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

import pandas as pd

from parnas.figures.draw import draw_run
from parnas.figures.heatmap import FRAME_MS, AnimationOptions
from parnas.figures.history import PiHistory
from parnas.run import METRICS, Run


@dataclass(frozen=True)
class TrainedRun:
    """A finished search or retraining."""

    folder: Path
    kind: str
    """`search` or `retrain`."""
    arch: str
    """The string that the run stood for when it was read: of a retraining what was trained, of a search what its
    `arch.yaml` says, or where there is none what pi spoke for last."""
    summary: Mapping[str, Any] = field(repr=False)
    """The content of `summary.json`: steps, seconds, parameters, and `valid` with `loss` (nats per token), `ppl`,
    `word_ppl` and `bits_per_byte` of the validation split."""
    metrics: pd.DataFrame = field(repr=False, compare=False)
    """A row for each line of `metrics.jsonl`: `step`, `split`, `loss` (nats per token), `ppl`, `tokens_per_s`, `lr`,
    and of a search `tau` and more; missing where a line has no such figure."""
    pi: pd.DataFrame | None = field(repr=False, compare=False)
    """Of a search, a row for each logged step, block and candidate: `step`, `tau`, `block` (from 1), `layer`, `pi`. The
    pi of a block's candidates add up to 1."""

    @classmethod
    def read(cls, run: "RunLike") -> Self:
        """What is in a run folder; raises `ParnasError` where the training has not come to its end."""
        opened = open_run(run)
        summary, kind = opened.summary(), opened.kind()
        return cls(
            opened.folder,
            kind,
            str(opened.architecture() or summary["arch"]),
            summary,
            pd.DataFrame(opened.records(METRICS)),
            pi_frame(opened) if kind == "search" else None,
        )

    def draw(self, frame_ms: int | None = None, width: int | None = None) -> dict[str, Path]:
        """Draw every picture anew into the folder `figures` of the run; their paths by file name, such as `pi.gif`.

        frame_ms: milliseconds for a frame of the animation; width: its pixels, by default as many as the blocks need.
        """
        options = AnimationOptions(frame_ms or FRAME_MS, width)
        return {path.name: path for path in draw_run(Run(self.folder), options)}


RunLike: TypeAlias = str | Path | Run | TrainedRun
"""A run folder, however it is named."""


def pi_frame(run: Run) -> pd.DataFrame:
    """The probabilities of a search as a tidy table; see `TrainedRun.pi`."""
    history, spaces = PiHistory.from_run(run), run.config().search.block_spaces
    cells = [(block, layer, history.space.index(layer)) for block, layers in enumerate(spaces, 1) for layer in layers]
    rows = [
        (int(step), float(tau), block, layer, float(pi[block - 1, column]))
        for step, tau, pi in zip(history.steps, history.taus, history.pi, strict=True)
        for block, layer, column in cells
    ]
    return pd.DataFrame(rows, columns=["step", "tau", "block", "layer", "pi"])


def open_run(run: RunLike) -> Run:
    """The run folder that is meant."""
    if isinstance(run, Run):
        return run
    return Run(run.folder if isinstance(run, TrainedRun) else run)
