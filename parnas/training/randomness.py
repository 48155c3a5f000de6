"""The state of every generator of random numbers, kept in checkpoints."""

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from parnas.training.device import Device


def seed_process(seed: int, rank: int) -> None:
    """Seed torch's generators so that each process of a training has dropout of its own; the first has `seed` itself.

    Mixed, since torch's generator on the CPU looks at the lower 32 bits alone.
    """
    torch.manual_seed(seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))


def random_states(device: Device) -> dict[str, Any]:
    """Of all generators: torch's in each process, [processes, bytes], Python's and numpy's in this one."""
    cuda = torch.cuda.get_rng_state(device.device) if device.device.type == "cuda" else None
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "cpu": device.ranks.gather(torch.get_rng_state()[None]),
        "cuda": None if cuda is None else device.ranks.gather(cuda[None]),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def restore_random_states(states: Mapping[str, Any], device: Device, new_seed: int) -> None:
    """Take up the states; a process more than there were when they were kept begins with `new_seed`."""
    rank = device.ranks.rank
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
