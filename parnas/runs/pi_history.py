"""pi over the steps of a search: the records of `pi.jsonl` stacked into arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.runs.records import PiRecord
from parnas.runs.run import PI, Run

__all__ = ["PiHistory"]


@dataclass(frozen=True)
class PiHistory:
    """The probabilities pi that a search logged at N steps, for B blocks with C candidates."""

    space: tuple[str, ...]  # [C] layer names
    steps: NDArray[np.int64]  # [N]
    taus: NDArray[np.float64]  # [N] temperatures
    pi: NDArray[np.float64]  # [N, B, C]
    derived: tuple[tuple[str, ...], ...]  # [N][B] layers that derive would select; the argmax of pi if not logged

    @classmethod
    def from_records(cls, records: Sequence[PiRecord], space: Sequence[str], source: str = PI) -> Self:
        """Stack records of the file `source`; raise `ParnasError` if one does not fit the layers `space` [C]."""
        if not records:
            raise ParnasError(f"{source} holds no line yet; wait: the search writes one every train.log_every steps.")
        steps = np.array([record.step for record in records], dtype=np.int64)
        taus = np.array([record.tau for record in records], dtype=np.float64)
        try:
            pi = np.array([record.pi for record in records], dtype=np.float64)
        except ValueError as error:
            raise ParnasError(
                f"{source} has a line whose pi differs in shape from that of the other lines; remove that line."
            ) from error
        if pi.ndim != 3 or pi.shape[1] == 0 or pi.shape[2] != len(space):
            raise ParnasError(
                f"{source} holds pi of shape {list(pi.shape[1:])}, but search.space in config.yaml has "
                f"{len(space)} candidates ({', '.join(space)}); correct search.space."
            )
        derived = tuple(
            Architecture.parse(record.arch).layers if record.arch else tuple(space[column] for column in argmax)
            for record, argmax in zip(records, pi.argmax(axis=2), strict=True)
        )
        for number, layers in enumerate(derived, 1):
            if len(layers) != pi.shape[1] or not set(layers) <= set(space):
                raise ParnasError(
                    f"{source}, line {number}, has an arch of {len(layers)} layers, {Architecture(layers)!s:.80}; "
                    f"expected {pi.shape[1]} layers among {', '.join(space)}. Remove that line."
                )
        return cls(tuple(space), steps, taus, pi, derived)

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Read `pi.jsonl` of a search; raise `ParnasError` if it is missing or does not fit the configuration."""
        search = run.config().search
        history = cls.from_records(run.pi_records(), search.candidates, str(run.folder / PI))
        if history.blocks != search.blocks:
            problem = (
                f"has pi of {history.blocks} blocks, but search.blocks is {search.blocks}; restore it or config.yaml."
            )
            raise ParnasError(f"{run.folder / PI} {problem}")
        return history

    @property
    def blocks(self) -> int:
        """Number of blocks B."""
        return int(self.pi.shape[1])

    def __len__(self) -> int:
        return len(self.steps)

    def string(self, index: int) -> str:
        """Return the architecture derived at a logged step as text; `index` counts the logged steps from 0."""
        return str(Architecture(self.derived[index]))
