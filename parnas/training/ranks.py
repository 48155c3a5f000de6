"""The processes that train together, as torchrun starts them: which of them this one is, and what they do together."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from parnas.errors import ParnasError

PATIENCE = timedelta(minutes=30)  # for a process that prepares text or measures latencies while the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among `count` that train together; by default it is alone, and nothing here does anything.

    All processes call the same methods in the same order.
    """

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def share(self, rows: int, of: str = "data.batch_size") -> slice:
        """Which of so many rows are this process's; raises `ParnasError` where they cannot be shared out evenly."""
        if rows % self.count:
            raise ParnasError(f"{of} gives {rows} rows, which {self.count} processes cannot share evenly; change it.")
        each = rows // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype and device by their sums over all processes, in one message."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def average(self, tensors: Sequence[Tensor]) -> None:
        """As `add`, with means."""
        self.add(tensors)
        if self.count > 1:
            for tensor in tensors:
                tensor.detach().div_(self.count)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes one after another, of tensors [rows, …] of one shape."""
        if self.count == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.count)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process; by way of the CPU, so that no work of a GPU is waited for."""
        if self.count == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags)
        return bool(flags)

    def wait(self) -> None:
        """Until all have come here."""
        self.any(False)


ALONE = Ranks()


def launched_by_torchrun() -> bool:
    """Whether this process is one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_ranks(cuda: bool) -> Ranks:
    """Meet the other processes that torchrun has started; alone where it has not."""
    if not launched_by_torchrun():
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
        atexit.register(_leave)
    return Ranks(dist.get_rank(), dist.get_world_size())


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
