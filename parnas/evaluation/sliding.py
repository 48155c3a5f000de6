"""Sliding evaluation: every token is scored with most of a segment before it, besides what memory holds."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from parnas.data.batching import evaluation_batches
from parnas.errors import ParnasError
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.sections import Reach
from parnas.training.device import Device
from parnas.training.perplexity import score_batches


def score_sliding(
    model: TransformerXL,
    tokens: np.ndarray,
    first: int,
    device: Device,
    *,
    batch_size: int,
    tgt_len: int,
    reach: Reach,
    stride: int,
) -> Tensor:
    """As `score_tokens`, but of each segment of `tgt_len` the last `stride` tokens alone are scored, in nats [N].

    Each segment begins `stride` tokens after the one before, so that a token has at least `tgt_len - stride` others of
    its segment before it. Memory is what it would be with segments of `stride`: a segment is read with the memory
    from before its first token. With a stride of `tgt_len` it is the plain evaluation. Raises `ParnasError` for a
    stride that does not divide the segment.
    """
    if tgt_len % stride:
        raise ParnasError(f"evaluation.stride is {stride}, but segments have {tgt_len} tokens; give a divisor of that.")
    strides = tgt_len // stride
    window: deque[tuple[Tensor, Memory | None]] = deque(maxlen=strides)  # inputs, and the memory from before them
    memory: Memory | None = None

    def read(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal memory
        window.append((inputs, memory))
        segment = torch.cat([each for each, _ in window], dim=1)
        output = model(segment, window[0][1], reach=reach, inference=True)
        alone = len(window) == 1
        memory = output.memory if alone else model(inputs, memory, reach=reach, inference=True).memory
        return model.score(output.hidden[:, -stride:], targets)

    # The memory that a segment is read with must itself be warm, so that rows begin earlier by the rest of a segment.
    burn_in = model.burn_in(stride, reach) + strides - 1
    batches = evaluation_batches(tokens, first, batch_size, stride, burn_in, model.alignment())
    return score_batches(model, read, batches, len(tokens), device)
