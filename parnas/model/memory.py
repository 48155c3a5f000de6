"""Memory: what blocks keep from earlier segments. No gradient flows through it.

A block's memory is a tensor, a tuple of memories, or `None`, so that checkpoints can store it as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

BlockMemory: TypeAlias = Any
"""Plain memory: the block's inputs at the last positions, [B, M, D], or in inference their keys and values,
[B, M, 2·H·E]. For compressive attention see `compressive.py`. A stochastic block has a tuple with the memory of each
candidate. `None` is an empty memory."""

Memory: TypeAlias = tuple[BlockMemory, ...]
"""The memory of each block."""


class KeyLengths(NamedTuple):
    """The number of memory positions that a block sees."""

    plain: int = 0
    compressed: int = 0


def longest(lengths: Iterable[KeyLengths]) -> KeyLengths:
    """Return the largest of each length; blocks with compressed memory see at least as much plain memory as others."""
    plain, compressed = 0, 0
    for each in lengths:
        plain, compressed = max(plain, each.plain), max(compressed, each.compressed)
    return KeyLengths(plain, compressed)


def append_memory(memory: Tensor | None, x: Tensor, mem_len: int) -> Tensor | None:
    """Return the last `mem_len` positions of memory and segment, [B, M, D], detached; `None` for `mem_len` 0."""
    if mem_len == 0:
        return None
    x = x.detach()
    return (x if x.shape[1] >= mem_len else join(memory, x))[:, -mem_len:]


def join(*parts: Tensor | None) -> Tensor:
    """Concatenate tensors [B, *, D] along positions, oldest first, leaving out `None`."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present, dim=1)


def gather(parts: Iterable[BlockMemory]) -> BlockMemory:
    """Return several memories as one; `None` where all are `None`."""
    together = tuple(parts)
    return None if all(part is None for part in together) else together


def map_memory(change: Callable[[Tensor], Tensor], memory: BlockMemory) -> BlockMemory:
    """Return the memory with a function applied to every tensor."""
    if isinstance(memory, tuple):
        return tuple(map_memory(change, part) for part in memory)
    return None if memory is None else change(memory)


def join_rows(parts: Sequence[Memory]) -> Memory:
    """Return the memories of several micro-batches as that of the whole batch."""
    if len(parts) == 1:
        return parts[0]
    return tuple(_join_blocks(blocks) for blocks in zip(*parts, strict=True))


def _join_blocks(blocks: Sequence[BlockMemory]) -> BlockMemory:
    first = blocks[0]
    if isinstance(first, tuple):
        return tuple(map(_join_blocks, zip(*blocks, strict=True)))
    return None if first is None else torch.cat(list(blocks))
