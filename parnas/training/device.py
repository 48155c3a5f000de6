"""The device of a training or evaluation: its precision, its processes and its random number generators."""

import ctypes
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from parnas.config.schema import RuntimeConfig
from parnas.errors import ParnasError
from parnas.runs.resolve import launched_by_torchrun
from parnas.training.distributed import SINGLE_PROCESS, DistributedContext, join_processes

__all__ = ["Device", "choose_device"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of malloc.h


@dataclass(frozen=True)
class Device:
    """A torch device, the precision of matrix products on it, and the processes that share the work."""

    device: torch.device
    precision: str  # fp32 or bf16
    distributed: DistributedContext = SINGLE_PROCESS

    def autocast(self) -> torch.autocast:
        """Return a context in which matrix products are computed in the configured precision, bf16 or fp32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work, so that a clock read afterwards includes it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, Any]:
        """Return the device, its name, the precision and the number of CPU threads, for `environment.json`."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else _processor()
        threads = torch.get_num_threads()
        return {"device": str(self.device), "device_name": name, "precision": self.precision, "threads": threads}


def choose_device(runtime: RuntimeConfig) -> Device:
    """Return the configured device; also set the number of CPU threads, configure malloc and join torchrun's processes.

    Processes that torchrun starts on one machine get one GPU each, or equal shares of the CPU cores.

    Raises:
        ParnasError: `runtime.device` is not the name of a device, or this machine does not have that device.
    """
    keep_freed_memory()
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    elif launched_by_torchrun():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    cuda = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if cuda else "cpu") if runtime.device == "auto" else runtime.device)
    except RuntimeError as error:
        raise ParnasError(f"runtime.device is {runtime.device!r}; give auto, cpu, cuda or cuda:N.") from error
    on_machine = {"cpu": 1, "cuda": torch.cuda.device_count() if cuda else 0}
    if (device.index or 0) >= on_machine.get(device.type, 0):
        raise ParnasError(
            f"runtime.device {runtime.device} is not on this machine, which has {on_machine['cuda']} CUDA GPU(s); "
            "give auto, cpu or the number of an existing GPU (cuda:N, from 0)."
        )
    if device.type == "cuda" and launched_by_torchrun():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    precision = runtime.precision
    if precision == "auto":
        # torch.cuda.is_bf16_supported() is also true for GPUs that emulate bf16, slowly.
        on_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        fast = on_gpu or (device.type == "cpu" and _processor_has_bf16())
        precision = "bf16" if fast else "fp32"
    return Device(device, precision, join_processes(device.type == "cuda"))


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next tensor; do nothing on a system without glibc.

    By default glibc returns the memory of every tensor above some hundred kilobytes to the system, and a training step
    then spends much of its time in page faults (`benchmarks/choices.py`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def seed_process(seed: int, rank: int) -> None:
    """Seed torch's generators, differently in each process, so that processes draw different dropout masks.

    The main process (rank 0) uses `seed` itself. The others use a hash of `seed` and `rank`, of 32 bits because torch's
    CPU generator ignores higher bits.
    """
    torch.manual_seed(seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))


def random_states(device: Device) -> dict[str, Any]:
    """Return the states of the random number generators of torch, Python and numpy, for a checkpoint.

    In the main process, which writes checkpoints, torch's states are those of all processes, [processes, bytes]. The
    states of Python's and numpy's generators are those of the calling process.
    """
    cuda = torch.cuda.get_rng_state(device.device) if device.device.type == "cuda" else None
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "cpu": device.distributed.gather_rows(torch.get_rng_state()[None]),
        "cuda": None if cuda is None else device.distributed.gather_rows(cuda[None]),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def restore_random_states(states: Mapping[str, Any], device: Device, new_seed: int) -> None:
    """Restore the states of the random number generators that `random_states` returned.

    If a run is resumed with more processes than before, the additional processes have no state; they seed torch's
    generators from `new_seed`.
    """
    rank = device.distributed.rank
    if rank < len(states["cpu"]):
        torch.set_rng_state(states["cpu"][rank].clone())  # torch ignores the offset of a view
        if states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"][rank].clone(), device.device)
    else:
        seed_process(new_seed, rank)
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numpy_keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(numpy_keys, np.uint32), *rest))


def _cpuinfo(key: str) -> str:
    """Return the value in the first line of /proc/cpuinfo that starts with `key`; empty if there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _processor_has_bf16() -> bool:
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(_cpuinfo("flags").split())


def _processor() -> str:
    return _cpuinfo("model name") or torch.backends.cpu.get_cpu_capability()
