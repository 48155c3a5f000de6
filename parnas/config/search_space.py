"""The search space: the candidate layers of each block."""

from collections.abc import Sequence
from typing import cast

from parnas.architecture import IDENTITY, LETTERS, LayerName
from parnas.errors import ParnasError

_MAX_CANDIDATES = 100  # per block

Space = Sequence[str] | Sequence[Sequence[str]]
"""Layer names that all blocks may choose from, or a list of them for each block."""


def spread_space(space: Space, blocks: int) -> tuple[tuple[str, ...], ...]:
    """Return the candidates of each block, given one list for all blocks or one for each.

    Names are written as `str(LayerName)` does. Raises `ParnasError` for an invalid name or too many candidates.
    """
    shared = all(isinstance(name, str) for name in space)
    rows: Sequence[Sequence[str]] = [cast(Sequence[str], space)] if shared else space
    if (most := max(map(len, rows), default=0)) > _MAX_CANDIDATES:
        raise ParnasError(f"A block has {most} candidates; give {_MAX_CANDIDATES} at most.")
    spread = tuple(tuple(str(LayerName.parse(name)) for name in row) for row in rows)
    return spread * blocks if shared else spread


def unite(spaces: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return all candidates of the blocks, in order of first appearance."""
    return tuple(dict.fromkeys(name for space in spaces for name in space))


def space_problem(space: Space, blocks: int) -> str | None:
    """Return the error of `search.space` for that number of blocks, with the allowed values; `None` if it is valid."""
    known = ", ".join(LETTERS)
    try:
        rows = spread_space(space, blocks)
    except ParnasError as error:
        hint = " Quote names that hold a comma: 's:heads=2,d_head=16'." if "=" in str(space) else ""
        return f"is {_show(space)}; give different letters among {known}: {error}{hint}"
    if not rows or not all(rows):
        return f"is {_show(space)}; give every block a candidate or more"
    if repeated := next((row for row in rows if len(set(row)) < len(row)), None):
        return f"is {_show(repeated)}; give different letters among {known}, or different options"
    if len(rows) != blocks:
        return f"has {len(rows)} lists, but search.blocks is {blocks}; give one list for each block, or one for all"
    if unite(rows) == (IDENTITY,):
        return "has identity alone, so there is nothing to train; add s or f"
    return None


def _show(space: Space) -> str:
    shown = str([row if isinstance(row, str) else list(row) for row in space])
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
