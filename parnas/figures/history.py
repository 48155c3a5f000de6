"""pi over time, as the pictures need it: the lines of `pi.jsonl` in arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.run import PI, Run

ROUNDING = 1e-6  # a softmax of single precision may lie just above 1


@dataclass(frozen=True)
class PiHistory:
    """Probabilities pi of N logged steps, B blocks and C candidates."""

    space: tuple[str, ...]  # [C] layer names
    steps: NDArray[np.int64]  # [N]
    taus: NDArray[np.float64]  # [N]
    pi: NDArray[np.float64]  # [N, B, C]
    derived: tuple[tuple[str, ...], ...]  # [N][B] what derive would take within the target, or the likeliest layers

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]], space: Sequence[str], source: str = PI) -> Self:
        """Gather the lines of a `pi.jsonl`; raises `ParnasError`, naming `source`, if they are none or do not fit."""
        if not records:
            raise ParnasError(f"{source} holds no line yet; the search writes one every train.log_every steps.")
        try:
            steps = np.array([record["step"] for record in records], dtype=np.int64)
            taus = np.array([record["tau"] for record in records], dtype=np.float64)
            pi = np.array([record["pi"] for record in records], dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ParnasError(
                f"{source} has a line without step, tau or a pi of the shape of the others; remove that line."
            ) from error
        if pi.ndim != 3 or pi.shape[1] == 0 or pi.shape[2] != len(space):
            raise ParnasError(
                f"{source} holds pi of shape {list(pi.shape[1:])}, which does not fit the candidates "
                f"{', '.join(space)}; mend search.space in config.yaml."
            )
        if not (np.isfinite(taus).all() and ((pi >= 0) & (pi <= 1 + ROUNDING)).all()):
            raise ParnasError(f"{source} has a line whose tau or pi is no number, or no probability; remove that line.")
        derived = tuple(
            Architecture.parse(record["arch"]).layers if "arch" in record else tuple(space[of] for of in likeliest)
            for record, likeliest in zip(records, pi.argmax(axis=2), strict=True)
        )
        if any(len(layers) != pi.shape[1] or not set(layers) <= set(space) for layers in derived):
            raise ParnasError(f"{source} has a line whose arch does not fit its pi; remove that line.")
        return cls(tuple(space), steps, taus, pi, derived)

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """The history of a search; raises `ParnasError` if the run has none, or one of another depth."""
        search = run.config().search
        history = cls.from_records(run.records(PI), search.candidates, str(run.folder / PI))
        if history.blocks != search.blocks:
            raise ParnasError(f"{run.folder / PI} is of {history.blocks} blocks, not {search.blocks}; restore it.")
        return history

    @property
    def blocks(self) -> int:
        """Number of blocks B."""
        return int(self.pi.shape[1])

    def __len__(self) -> int:
        return len(self.steps)

    def string(self, index: int) -> str:
        """The derived string of a logged step."""
        return str(Architecture(self.derived[index]))
