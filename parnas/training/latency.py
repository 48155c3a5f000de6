"""Time that networks take, measured side by side."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from parnas.model.transformer_xl import Memory, TransformerXL
from parnas.training.device import Device

Key = TypeVar("Key", bound=Hashable)


class Candidate(NamedTuple):
    """A network to be timed, and tokens of its kind of text for it to read, [at least batch · (M + T)]."""

    model: TransformerXL
    tokens: np.ndarray


class Latency(NamedTuple):
    """Milliseconds to score one segment."""

    median: float
    p95: float


class Shape(NamedTuple):
    """What is read in one call: `tgt_len` tokens of each of `batch_size` rows, with `mem_len` positions of memory."""

    batch_size: int
    tgt_len: int
    mem_len: int


def measure_latencies(
    candidates: Mapping[str, Candidate],
    device: Device,
    *,
    tgt_len: int,
    mem_len: int,
    batch_size: int = 1,
    rounds: int = 100,
) -> dict[str, Latency]:
    """Latency of each network for a segment [batch_size, tgt_len] with full memory; see `time_in_turns`."""
    shape = Shape(batch_size, tgt_len, mem_len)
    calls = {name: prepare_scoring(candidate, device, shape) for name, candidate in candidates.items()}
    times = time_in_turns(calls, device, rounds)
    return {name: Latency(float(np.median(of)), float(np.percentile(of, 95))) for name, of in times.items()}


def time_in_turns(calls: Mapping[Key, Callable[[], None]], device: Device, rounds: int) -> dict[Key, np.ndarray]:
    """Milliseconds of each call in each round, [rounds].

    The calls take turns (A B A B …), so that a change of the machine's speed meets all of them alike; the first
    rounds are a warm-up and not counted.
    """
    warm_up = max(3, rounds // 10)
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for number in range(warm_up + rounds):
        for key, call in calls.items():
            device.synchronize()
            started = time.perf_counter()
            call()
            device.synchronize()
            if number >= warm_up:
                times[key].append(1000 * (time.perf_counter() - started))
    return {key: np.array(of) for key, of in times.items()}


def prepare_scoring(candidate: Candidate, device: Device, shape: Shape) -> Callable[[], None]:
    """A call that scores one segment with full memory, kept as keys and values; the network is left evaluating."""
    model = candidate.model.to(device.device).eval()
    segment, memory = read_memory(candidate, device, shape, inference=True)

    def score() -> None:
        with torch.no_grad(), device.autocast():
            model.nll(segment, segment, memory, mem_len=shape.mem_len, inference=True)

    return score


def prepare_training(candidate: Candidate, device: Device, shape: Shape) -> Callable[[], None]:
    """A call that finds the gradients of one segment with full memory and drops them; the network is left training."""
    model = candidate.model.to(device.device).train()
    segment, memory = read_memory(candidate, device, shape, inference=False)

    def train() -> None:
        with device.autocast():
            nll, _ = model.nll(segment, segment, memory, mem_len=shape.mem_len)
        nll.mean().backward()
        model.zero_grad(set_to_none=True)

    return train


@torch.no_grad()
def read_memory(
    candidate: Candidate, device: Device, shape: Shape, inference: bool
) -> tuple[torch.Tensor, Memory | None]:
    """A segment of ids [B, T], and the memory of the `mem_len` tokens before it; none where that is 0."""
    batch_size, tgt_len, mem_len = shape
    read = batch_size * (mem_len + tgt_len)
    rows = np.resize(candidate.tokens[:read], read).astype(np.int64).reshape(batch_size, -1)
    before, segment = torch.from_numpy(rows).to(device.device).split([mem_len, tgt_len], dim=1)
    if not mem_len:
        return segment, None
    with device.autocast():
        return segment, candidate.model(before, mem_len=mem_len, inference=inference).memory
