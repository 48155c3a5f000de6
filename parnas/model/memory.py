"""Memory: the state that blocks pass from one segment of a text to the next. No gradient flows through it.

The memory of a block is a tensor, a tuple of memories, or `None`, so that checkpoints can store it as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Memory", "collect_memories", "count_numbers", "join_rows", "list_tensors", "map_memory"]

BlockMemory: TypeAlias = Any
"""Plain memory: the block's inputs at the last positions, [B, M, D], or in inference their keys and values,
[B, M, 2·H·E]. For compressive attention see `compressive.py`. A stochastic block has a tuple with the memory of each
candidate. `None` is an empty memory."""

Memory: TypeAlias = tuple[BlockMemory, ...]
"""The memory of each block; then that of the pointer, if there is one: hidden states [B, P, D] and ids [B, P]."""


class KeyLengths(NamedTuple):
    """The number of plain and of compressed memory positions that a block attends to."""

    plain: int = 0
    compressed: int = 0


def longest(lengths: Iterable[KeyLengths]) -> KeyLengths:
    """Return the largest plain and the largest compressed length of several blocks; zeros if there are no blocks."""
    return KeyLengths(*map(max, zip(*lengths, strict=True)))


def append_memory(memory: Tensor | None, x: Tensor, mem_len: int) -> Tensor | None:
    """Append `x` to memory and return the last `mem_len` positions, [B, M, D], detached; `None` if `mem_len` is 0."""
    if mem_len == 0:
        return None
    x = x.detach()
    return (x if x.shape[1] >= mem_len else join(memory, x))[:, -mem_len:]  # a long segment needs no old memory


def join(*parts: Tensor | None) -> Tensor:
    """Concatenate tensors [B, *, D] along the positions, in the given order; a part that is `None` is skipped."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present, dim=1)


def collect_memories(parts: Iterable[BlockMemory]) -> BlockMemory:
    """Return the memories of candidates as one tuple, the memory of a stochastic block; `None` if all are `None`."""
    memories = tuple(parts)
    return None if all(memory is None for memory in memories) else memories


def map_memory(change: Callable[[Tensor], Tensor], memory: BlockMemory) -> BlockMemory:
    """Return a copy of `memory` in which `change` has been applied to every tensor."""
    if isinstance(memory, tuple):
        return tuple(map_memory(change, part) for part in memory)
    return None if memory is None else change(memory)


def list_tensors(memory: BlockMemory) -> list[Tensor]:
    """Return all tensors in `memory`, in order."""
    if isinstance(memory, tuple):
        return [tensor for part in memory for tensor in list_tensors(part)]
    return [] if memory is None else [memory]


def count_numbers(memory: BlockMemory) -> int:
    """Return the number of elements of all tensors in `memory`."""
    return sum(tensor.numel() for tensor in list_tensors(memory))


def join_rows(parts: Sequence[BlockMemory]) -> BlockMemory:
    """Concatenate the memories of several micro-batches along the batch dimension, in order."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    return tuple(map(join_rows, zip(*parts, strict=True))) if isinstance(first, tuple) else torch.cat(list(parts))
