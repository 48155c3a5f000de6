"""Random number generators: seeding, and their states in checkpoints."""

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from parnas.training.device import Device


def seed_process(seed: int, rank: int) -> None:
    """Seed torch's generators so that each process has its own dropout; the main process uses `seed` itself.

    The seeds of the others are mixed, since torch's CPU generator uses the lower 32 bits only.
    """
    torch.manual_seed(seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))


def random_states(device: Device) -> dict[str, Any]:
    """Return the generators' states: torch's of each process, [processes, bytes], Python's and numpy's of this one."""
    cuda = torch.cuda.get_rng_state(device.device) if device.device.type == "cuda" else None
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "cpu": device.distributed.gather_rows(torch.get_rng_state()[None]),
        "cuda": None if cuda is None else device.distributed.gather_rows(cuda[None]),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def restore_random_states(states: Mapping[str, Any], device: Device, new_seed: int) -> None:
    """Restore the states; a process that did not exist when they were saved starts with `new_seed`."""
    rank = device.distributed.rank
    if rank < len(states["cpu"]):
        torch.set_rng_state(states["cpu"][rank].clone())  # of which it reads the storage from its beginning
        if states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"][rank].clone(), device.device)
    else:
        seed_process(new_seed, rank)
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numpy_keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(numpy_keys, np.uint32), *rest))
