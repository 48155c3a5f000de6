"""The search space: which layers each block may choose from."""

from collections.abc import Sequence
from typing import cast

from parnas.architecture import IDENTITY, LETTERS, LayerName
from parnas.errors import ParnasError

MAX_CANDIDATES = 100  # of a block

Space = Sequence[str] | Sequence[Sequence[str]]
"""Layer names that all blocks may choose from, or a list of them for each block."""


def spread_space(space: Space, blocks: int) -> tuple[tuple[str, ...], ...]:
    """The candidates of each block: one list of layer names holds for all, or there is a list for each.

    Names come as `str(LayerName)` writes them. Raises `ParnasError` for what is no name, and for too many in a block.
    """
    shared = all(isinstance(name, str) for name in space)
    rows: Sequence[Sequence[str]] = [cast(Sequence[str], space)] if shared else space
    if (most := max(map(len, rows), default=0)) > MAX_CANDIDATES:
        raise ParnasError(f"A block has {most} candidates, and {MAX_CANDIDATES} are the most.")
    spread = tuple(tuple(str(LayerName.parse(name)) for name in row) for row in rows)
    return spread * blocks if shared else spread


def unite(spaces: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All candidates of the blocks, in the order of their first appearance."""
    return tuple(dict.fromkeys(name for space in spaces for name in space))


def space_problem(space: Space, blocks: int) -> str | None:
    """What is wrong with `search.space` for so many blocks, with what is allowed; none where nothing is."""
    known = ", ".join(LETTERS)
    try:
        rows = spread_space(space, blocks)
    except ParnasError as error:
        hint = " Quote names that hold a comma: 's:heads=2,d_head=16'." if "=" in str(space) else ""
        return f"is {_show(space)}; give different letters among {known}: {error}{hint}"
    if not rows or not all(rows):
        return f"is {_show(space)}; give every block a candidate or more"
    if twice := next((row for row in rows if len(set(row)) < len(row)), None):
        return f"is {_show(twice)}; give different letters among {known}, or different options"
    if len(rows) != blocks:
        return f"has {len(rows)} lists, but search.blocks is {blocks}; give one list for each block, or one for all"
    if unite(rows) == (IDENTITY,):
        return "has identity alone, so there is nothing to train; add s or f"
    return None


def _show(space: Space) -> str:
    shown = str([row if isinstance(row, str) else list(row) for row in space])
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
