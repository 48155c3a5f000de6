"""The processes that train together, as torchrun starts them: which of them this one is, and what they do together."""

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from parnas.errors import ParnasError

PATIENCE = timedelta(minutes=30)  # for a process that prepares text or measures latencies while the others wait
LOST = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "ncclRemoteError", "was aborted")
"""What torch says where another process does not answer."""

_messages: list[dist.ProcessGroup] = []
"""The group by which processes speak of tensors on the CPU; none before they have met, and none after they have left.

DistributedDataParallel has the default group to itself: it keeps that alive to the end of the interpreter, with threads
that abort the process where they still hold a tensor then. What is said last, just before the end, goes by this group,
whose threads end when it is left.
"""


class LostProcess(ParnasError):
    """Another process of a training does not answer any more."""


@dataclass(frozen=True)
class Ranks:
    """This process among `count` that train together; by default it is alone, and nothing here does anything.

    All processes call the same methods in the same order. Raises `LostProcess` where another one has died.
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
        with answered():
            dist.all_reduce(flat, group=group_of(flat))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def average(self, tensors: Sequence[Tensor]) -> None:
        """As `add`, with means."""
        self.add(tensors)
        if self.count > 1:
            for tensor in tensors:
                tensor.detach().div_(self.count)

    def gather(self, rows: Tensor) -> Tensor:
        """On the CPU, the rows of all processes one after another, of tensors [rows, …] of one shape.

        The first process gets them, the others their own. Bytes are sent, so that any dtype may be.
        """
        own = rows.detach().to("cpu").contiguous()
        if self.count == 1:
            return own
        sent = own.view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.count)] if self.leads else None
        with answered():
            dist.gather(sent, parts, group=group_of(sent))
        return own if parts is None else torch.cat([part.view(own.dtype) for part in parts])

    def most(self, number: int) -> int:
        """The greatest of the processes' numbers; by way of the CPU, so that no work of a GPU is waited for."""
        if self.count == 1:
            return number
        told = torch.tensor([number])
        with answered():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=group_of(told))
        return int(told)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return bool(self.most(int(flag)))

    @contextmanager
    def led(self) -> Iterator[None]:
        """Enter what the first process does for all, such as writing; where it fails there, all end."""
        trouble = None
        try:
            yield
        except (ParnasError, OSError) as error:
            trouble = error
        failed = self.any(trouble is not None)
        if trouble is not None:
            raise trouble
        if failed:
            raise ParnasError("the first process ended, with a message of its own.")


ALONE = Ranks()


def group_of(tensor: Tensor) -> dist.ProcessGroup | None:
    """The group that a tensor is sent by; none stands for torch's default one."""
    return _messages[0] if _messages and tensor.device.type == "cpu" else None


@contextmanager
def answered() -> Iterator[None]:
    """Turn what torch raises where another process does not answer into a `LostProcess`."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST):
            raise
        raise LostProcess(
            "Another process of this job was lost. The same command goes on from the last checkpoint; "
            "torchrun --max-restarts=3 gives it by itself."
        ) from error


def launched_by_torchrun() -> bool:
    """Whether this process is one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_ranks(cuda: bool) -> Ranks:
    """Meet the other processes that torchrun has started; alone where it has not."""
    if not launched_by_torchrun():
        return ALONE
    if not dist.is_initialized():
        store, rank, count = next(rendezvous("env://", timeout=PATIENCE))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=own_store(store, rank, count),
            rank=rank,
            world_size=count,
            timeout=PATIENCE,
        )
        _messages.append(dist.new_group(backend="gloo", timeout=PATIENCE))
        atexit.register(_leave)
    return Ranks(dist.get_rank(), dist.get_world_size())


def own_store(store: Store, rank: int, count: int) -> Store:
    """The part of a store that belongs to this start of the job alone.

    torchrun hands one store to all its restarts, and with it the addresses of processes that died: whoever reads them
    before the new ones stand there is refused. Here the first process answers to names that are drawn anew at each
    start, so that nothing of an earlier one can be taken for an answer.
    """
    name = uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", name)
        own = PrefixStore(store.get(f"answer/{name}").decode(), store)
        own.set(f"met/{rank}", "")
        return own
    own = PrefixStore(name, store)
    missing = set(range(1, count))
    until = time.monotonic() + PATIENCE.total_seconds()
    while missing:
        if time.monotonic() > until:
            raise LostProcess(f"Not all processes of this job came within {PATIENCE}; start it again.")
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
        missing = {other for other in missing if not own.check([f"met/{other}"])}
        time.sleep(0.01)
    return own


def _leave() -> None:
    _messages.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
