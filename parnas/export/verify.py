"""Whether what was exported computes what the network computes, over several segments with memory fed back."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from parnas.errors import ParnasError
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL

LIMIT = 1e-4
"""Largest difference of a log-probability, in nats: float32 in another order of sums stays far below it."""
ROWS, LONGEST, MOST = 2, 64, 8  # rows, tokens of a segment, segments

Step: TypeAlias = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""From ids [B, T] and a state to log-probabilities [B, T, V] and the next state."""


@torch.no_grad()
def largest_difference(network: TransformerXL, step: Step, start: Callable[[int], Any], tgt_len: int) -> float:
    """Of any log-probability in nats, over segments of several lengths that fill the memory, or eight at most."""
    whole = min(tgt_len, LONGEST)
    fill = math.ceil(network.config.mem_len / whole)
    lengths = [whole, 1, whole // 2 + 1, *[whole] * fill][:MOST]
    draw = torch.Generator().manual_seed(0)
    worst = 0.0
    for rows in (1, ROWS):
        memory: Memory | None = None
        state = start(rows)
        for length in lengths:
            tokens = torch.randint(network.vocab_size, (rows, length), generator=draw)
            output = network(tokens, memory, inference=True)
            memory = output.memory
            found, state = step(tokens, state)
            difference = (found - network.log_probs(output.hidden)).abs().max().item()
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def refuse_different(difference: float, what: str) -> None:
    """Raise where the difference is above what float32 explains."""
    if difference > LIMIT:
        raise ParnasError(
            f"What was written as {what} differs from the network by {difference:.2g} nats in a log-probability, above "
            f"{LIMIT:g}, and was removed. Try another version of torch or onnxruntime, or --to safetensors."
        )
