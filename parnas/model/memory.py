"""What blocks keep of the segments before. It is never differentiated through.

A block's memory is a tensor, a tuple of memories, or none, so that a checkpoint can hold it as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

BlockMemory: TypeAlias = Any
"""Of a block with plain memory: what it was given for the last positions, [B, M, D], or in inference its keys and
values of them, [B, M, 2·H·E]. Of compressive attention, see `compressive.py`; of a stochastic block, a tuple with the
memory of each candidate. None where there is nothing."""

Memory: TypeAlias = tuple[BlockMemory, ...]
"""The memory of each block."""


class KeyLengths(NamedTuple):
    """How many positions of memory a block sees."""

    plain: int = 0
    compressed: int = 0


def longest(lengths: Iterable[KeyLengths]) -> KeyLengths:
    """The most of each that any has: blocks with compressed memory see as much plain memory as others, or more."""
    plain, compressed = 0, 0
    for each in lengths:
        plain, compressed = max(plain, each.plain), max(compressed, each.compressed)
    return KeyLengths(plain, compressed)


def remember(memory: Tensor | None, x: Tensor, mem_len: int) -> Tensor | None:
    """The last `mem_len` positions of memory and segment, [B, M, D], without gradient; none for no positions."""
    if mem_len == 0:
        return None
    x = x.detach()
    return (x if x.shape[1] >= mem_len else join(memory, x))[:, -mem_len:]


def join(*parts: Tensor | None) -> Tensor:
    """Tensors [B, *, D] in a row, the oldest first; those that are none are left out."""
    given = [part for part in parts if part is not None]
    return given[0] if len(given) == 1 else torch.cat(given, dim=1)


def gather(parts: Iterable[BlockMemory]) -> BlockMemory:
    """Several memories as one; none where all are."""
    together = tuple(parts)
    return None if all(part is None for part in together) else together


def map_memory(change: Callable[[Tensor], Tensor], memory: BlockMemory) -> BlockMemory:
    """The same memory with every tensor changed."""
    if isinstance(memory, tuple):
        return tuple(map_memory(change, part) for part in memory)
    return None if memory is None else change(memory)


def join_rows(parts: Sequence[Memory]) -> Memory:
    """Memories of parts of a batch, alike in form, as one of all its rows."""
    if len(parts) == 1:
        return parts[0]
    return tuple(_join_blocks(blocks) for blocks in zip(*parts, strict=True))


def _join_blocks(blocks: Sequence[BlockMemory]) -> BlockMemory:
    first = blocks[0]
    if isinstance(first, tuple):
        return tuple(map(_join_blocks, zip(*blocks, strict=True)))
    return None if first is None else torch.cat(list(blocks))
