"""Measure the latency of networks in turns, so that a change of the machine's speed affects all networks alike."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from parnas.config.schema import Shape
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device

__all__ = ["TimedNetwork", "measure_latencies", "prepare_scoring", "prepare_training", "time_in_turns"]

_Key = TypeVar("_Key", bound=Hashable)


class TimedNetwork(NamedTuple):
    """A network to time, and the token ids that it reads; they are repeated if a batch needs more."""

    model: TransformerXL
    tokens: np.ndarray


class Latency(NamedTuple):
    """Median and 95th percentile of the milliseconds that a network takes to score one segment."""

    median: float
    p95: float


def measure_latencies(
    networks: Mapping[str, tuple[TimedNetwork, Shape, Device]], rounds: int = 100
) -> dict[str, Latency]:
    """Return the latency of each network in `networks`, by name, for scoring one segment with full memory.

    Networks on the same device are timed in turns, `rounds` times each (see `time_in_turns`).
    """
    calls = {name: prepare_scoring(network, device, shape) for name, (network, shape, device) in networks.items()}
    devices = {str(device.device): device for _, _, device in networks.values()}
    times: dict[str, np.ndarray] = {}
    for kind, device in devices.items():
        on_device = {name: call for name, call in calls.items() if str(networks[name][2].device) == kind}
        times |= time_in_turns(on_device, device, rounds)
    return {name: Latency(float(np.median(ms)), float(np.percentile(ms, 95))) for name, ms in times.items()}


def time_in_turns(
    calls: Mapping[_Key, Callable[[], object]], device: Device, rounds: int, warm_up: int | None = None
) -> dict[_Key, np.ndarray]:
    """Return the milliseconds that each function in `calls` took in each of `rounds` rounds, [rounds], by its key.

    A round calls every function once (A B A B …), so that a change of the machine's speed affects all of them alike.
    Before these, `warm_up` rounds run whose times are dropped: by default a tenth of `rounds`, but at least 3.
    """
    warm_up = max(3, rounds // 10) if warm_up is None else warm_up
    times = {key: np.zeros(warm_up + rounds) for key in calls}
    for number in range(warm_up + rounds):
        for key, call in calls.items():
            device.synchronize()
            started = time.perf_counter()
            call()
            device.synchronize()
            times[key][number] = 1000 * (time.perf_counter() - started)
    return {key: ms[warm_up:] for key, ms in times.items()}


def prepare_scoring(network: TimedNetwork, device: Device, shape: Shape) -> Callable[[], None]:
    """Return a function that computes the loss of one segment with full memory, stored as keys and values.

    The network is moved to `device` and put in evaluation mode.
    """
    model = network.model.to(device.device).eval()
    segment, memory = read_memory(network, device, shape, inference=True)

    def score() -> None:
        with torch.no_grad(), device.autocast():
            model.nll(segment, segment, memory, reach=shape.reach, inference=True)

    return score


def prepare_training(network: TimedNetwork, device: Device, shape: Shape) -> Callable[[], None]:
    """Return a function that runs forward and backward pass of one segment with full memory and drops the gradients.

    The network is moved to `device` and put in training mode.
    """
    model = network.model.to(device.device).train()
    segment, memory = read_memory(network, device, shape, inference=False)

    def train() -> None:
        with device.autocast():
            output = model(segment, memory, reach=shape.reach)
            loss = model.score(output, segment).mean()
        (loss if output.loss is None else loss + output.loss).backward()
        model.zero_grad(set_to_none=True)

    return train


@torch.no_grad()
def read_memory(
    network: TimedNetwork, device: Device, shape: Shape, inference: bool
) -> tuple[torch.Tensor, Memory | None]:
    """Return the token ids of a segment [B, T], and the full memory, which holds further tokens.

    The segment is the same for all networks, whatever their memory, since the time of an adaptive softmax depends on
    how rare its words are. The memory is `None` if no block uses memory and there is no pointer. With `inference`, the
    memory of attention consists of keys and values instead of hidden states.
    """
    batch_size, tgt_len, reach = shape
    model = network.model
    mem_len = model.memory_tokens(reach)
    count = batch_size * (tgt_len + mem_len)
    ids = torch.from_numpy(np.resize(network.tokens[:count], count).astype(np.int64)).to(device.device)
    segment, before = ids[: batch_size * tgt_len].view(batch_size, -1), ids[batch_size * tgt_len :].view(batch_size, -1)
    if not mem_len:
        return segment, None
    with device.autocast():
        memory = None
        for part in before.split(tgt_len, dim=1):
            memory = model(part, memory, reach=reach, inference=inference).memory
        return segment, memory
