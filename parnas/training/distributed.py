"""Data-parallel training: the processes that torchrun starts, and collective operations between them."""

import atexit
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
from parnas.runs.resolve import launched_by_torchrun

__all__ = ["SINGLE_PROCESS", "DistributedContext"]

_TIMEOUT = timedelta(minutes=30)  # long, since others wait while the main process prepares text or measures latencies
_LOST_PROCESS_SIGNS = (
    *("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "ncclRemoteError", "was aborted"),
)
"""Parts of the messages of torch's errors that mean that another process does not answer."""

_cpu_group: list[dist.ProcessGroup] = []
"""The process group for tensors on the CPU; empty before the processes have joined and after they have left.

DistributedDataParallel keeps the default group alive until the interpreter exits, and its threads abort the process if
they still hold a tensor then. Collectives on CPU tensors therefore use this group, which is destroyed with its
threads before the exit.
"""


class LostProcess(ParnasError):
    """Raised if another process of the same training no longer answers."""


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process, the number of processes, and collective operations between the processes.

    All processes must call the same methods in the same order. A collective operation raises `LostProcess` if another
    process has died, and has no effect if there is a single process.
    """

    rank: int = 0  # of this process
    world_size: int = 1  # number of processes

    @property
    def is_main(self) -> bool:
        """Whether this is the main process (rank 0), the only one that writes files and reports progress."""
        return self.rank == 0

    def local_slice(self, rows: int, setting: str = "data.batch_size") -> slice:
        """Return the slice of a batch of `rows` rows that this process reads; all slices have one size.

        Raises:
            ParnasError: `rows` is not a multiple of the number of processes; the message names `setting`, the setting
                that determines the number of rows.
        """
        if rows % self.world_size:
            raise ParnasError(
                f"{setting} gives {rows} rows, which {self.world_size} processes cannot share evenly; change "
                f"data.batch_size so that the number of these rows is a multiple of {self.world_size}."
            )
        each = rows // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all processes.

        All tensors must have the same dtype and device, since they are sent in one message.
        """
        if self.world_size == 1 or not tensors:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        with detecting_lost_processes():
            dist.all_reduce(flat, group=_group_for(flat))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its mean over all processes; all must have the same dtype and device."""
        self.all_reduce_sum(tensors)
        if self.world_size > 1:
            for tensor in tensors:
                tensor.detach().div_(self.world_size)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return, in the main process, the `rows` of all processes concatenated; in other processes, their own `rows`.

        The result is on the CPU. `rows` [rows, …] must have the same shape in all processes and may have any dtype.
        """
        own = rows.detach().to("cpu").contiguous()
        if self.world_size == 1:
            return own
        sent = own.view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.world_size)] if self.is_main else None
        with detecting_lost_processes():
            dist.gather(sent, parts, group=_group_for(sent))
        return own if parts is None else torch.cat([part.view(own.dtype) for part in parts])

    def max(self, number: int) -> int:
        """Return the largest `number` of all processes, which the CPUs exchange without waiting for the GPUs."""
        if self.world_size == 1:
            return number
        largest = torch.tensor([number])
        with detecting_lost_processes():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=_group_for(largest))
        return int(largest)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true in at least one process."""
        return bool(self.max(int(flag)))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Make each process wait at the end of the context until all processes, also the main process, reach it.

        If a process raises `ParnasError` or `OSError` inside the context, all others raise `ParnasError` at the end.
        """
        failure = None
        try:
            yield
        except (ParnasError, OSError) as error:
            failure = error
        failed = self.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise ParnasError("Another process failed, usually the main process (rank 0); see its error message.")


SINGLE_PROCESS = DistributedContext()


def _group_for(tensor: Tensor) -> dist.ProcessGroup | None:
    """Return the process group for collective operations on a tensor; `None` means torch's default group."""
    return _cpu_group[0] if _cpu_group and tensor.device.type == "cpu" else None


@contextmanager
def detecting_lost_processes() -> Iterator[None]:
    """Raise `LostProcess` instead of torch's error if another process does not answer inside the context."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _LOST_PROCESS_SIGNS):
            raise
        raise LostProcess(
            "Another process of this job was lost. Run the same command again to resume from the last checkpoint; "
            "torchrun --max-restarts=3 does so automatically."
        ) from error


def join_processes(cuda: bool) -> DistributedContext:
    """Join the other processes that torchrun started; without torchrun, return the context of a single process."""
    if not launched_by_torchrun():
        return SINGLE_PROCESS
    if not dist.is_initialized():
        store, rank, count = next(rendezvous("env://", timeout=_TIMEOUT))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=own_store(store, rank, count),
            rank=rank,
            world_size=count,
            timeout=_TIMEOUT,
        )
        _cpu_group.append(dist.new_group(backend="gloo", timeout=_TIMEOUT))
        atexit.register(_leave)
    return DistributedContext(dist.get_rank(), dist.get_world_size())


def own_store(store: Store, rank: int, count: int) -> Store:
    """Return a view of torchrun's key-value store that only the `count` processes of this start of the job use.

    torchrun keeps the store when it restarts a job. The store then holds addresses of processes that died, and
    connecting to such an address fails. Every start therefore puts a new prefix before all keys. The main process draws
    the prefix at random. Each other process asks for the prefix under a random key, so that it cannot read an answer
    from an earlier start.
    """
    name = uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", name)
        own = PrefixStore(store.get(f"answer/{name}").decode(), store)
        own.set(f"met/{rank}", "")
        return own
    own = PrefixStore(name, store)
    missing = set(range(1, count))
    until = time.monotonic() + _TIMEOUT.total_seconds()
    while missing:
        if time.monotonic() > until:
            raise LostProcess(
                f"Only {count - len(missing)} of the {count} processes of this job joined within {_TIMEOUT} (h:mm:ss); "
                "start the job again."
            )
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
        missing = {other for other in missing if not own.check([f"met/{other}"])}
        time.sleep(0.01)
    return own


def _leave() -> None:
    _cpu_group.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
