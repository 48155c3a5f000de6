"""Latency of networks, measured side by side."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device


class Candidate(NamedTuple):
    """A network to be timed, and tokens of its kind of text for it to read, [at least batch · (M + T)]."""

    model: TransformerXL
    tokens: np.ndarray


class Latency(NamedTuple):
    """Milliseconds to score one segment."""

    median: float
    p95: float


@torch.no_grad()
def measure_latencies(
    candidates: Mapping[str, Candidate],
    device: Device,
    *,
    tgt_len: int,
    mem_len: int,
    batch_size: int = 1,
    rounds: int = 100,
) -> dict[str, Latency]:
    """Latency of each network for a segment [batch_size, tgt_len] with full memory.

    The networks take turns (A B A B …), so that a change of the machine's speed meets all of them alike; the first
    rounds are a warm-up and not counted.
    """
    warm_up = max(3, rounds // 10)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    inputs = {}
    for name, (model, tokens) in candidates.items():
        model.to(device.device).eval()
        read = batch_size * (mem_len + tgt_len)
        rows = torch.from_numpy(np.resize(tokens[:read], read).astype(np.int64)).view(batch_size, -1).to(device.device)
        before, segment = rows.split([mem_len, tgt_len], dim=1)
        with device.autocast():
            memory = model(before, mem_len=mem_len, inference=True).memory if mem_len else None
        inputs[name] = model, segment, memory
    for number in range(warm_up + rounds):
        for name, (model, segment, memory) in inputs.items():
            device.synchronize()
            started = time.perf_counter()
            with device.autocast():
                model.nll(segment, segment, memory, mem_len=mem_len, inference=True)
            device.synchronize()
            if number >= warm_up:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: Latency(float(np.median(of)), float(np.percentile(of, 95))) for name, of in times.items()}
