"""Two ways of scoring a text beside `score_tokens`: overlapping segments, and one row from first to last token.

Shapes: N tokens of the text, B rows, T tokens of a segment, C caches.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from parnas.config.schema import Reach, Shape
from parnas.data.batching import evaluation_batches
from parnas.errors import ParnasError
from parnas.evaluation.continuous_cache import ContinuousCache
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.distributed import SINGLE_PROCESS
from parnas.training.perplexity import score_batches


def score_sliding(
    model: TransformerXL, tokens: np.ndarray, first: int, device: Device, shape: Shape, stride: int
) -> Tensor:
    """Score a text in overlapping segments (sliding window) and return the loss of each token in nats, [N].

    Each segment of `tgt_len` tokens begins `stride` tokens after the previous segment, and its last `stride` tokens are
    scored. So the context of each token is at least `tgt_len - stride` tokens of its segment, and the memory of
    positions before the segment. A stride of `tgt_len` is the plain evaluation. `first` is the token before the text.
    Raises `ParnasError` if `stride` does not divide `tgt_len`.
    """
    batch_size, tgt_len, reach = shape
    if tgt_len % stride:
        raise ParnasError(
            f"evaluation.stride is {stride}, but segments have {tgt_len} tokens; give a divisor of {tgt_len}."
        )
    strides = tgt_len // stride
    window: deque[tuple[Tensor, Memory | None]] = deque(maxlen=strides)  # (inputs [B, stride], memory before them)
    memory: Memory | None = None

    def read(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal memory
        window.append((inputs, memory))
        # 1. Read the whole segment with the memory from before its first token.
        segment = torch.cat([part for part, _ in window], dim=1)
        output = model(segment, window[0][1], reach=reach, inference=True)
        # 2. Advance the memory by the newest stride alone; the first segment is that stride.
        first_segment = len(window) == 1
        memory = output.memory if first_segment else model(inputs, memory, reach=reach, inference=True).memory
        # 3. Score the newest stride.
        return model.score(output.last(stride), targets)

    # Memory must be full before the first token of the first scored segment, which begins strides - 1 strides before
    # its scored tokens; so each row begins this much earlier than in plain evaluation.
    burn_in = model.burn_in(stride, reach) + strides - 1
    batches = evaluation_batches(tokens, first, batch_size, stride, burn_in, model.alignment())
    return score_batches(model, read, batches, len(tokens), device)


def score_sequentially(
    model: TransformerXL,
    tokens: np.ndarray,
    first: int,
    device: Device,
    *,
    tgt_len: int,
    reach: Reach,
    update: Callable[[Tensor], None] | None = None,
    caches: Sequence[ContinuousCache] = (),
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Score a text as one row from first to last token, for methods that learn from the text already scored.

    Each scored segment may update the weights (`update`) and is added to the `caches`. Without `update`, the losses
    equal those of `score_tokens`.

    Args:
        model: the network.
        tokens: the text, [N].
        first: the token before the text.
        device: where to compute.
        tgt_len: tokens of a segment.
        reach: memory lengths.
        update: called with the mean loss of each segment after the segment is scored; may change the weights.
        caches: caches to score the text with and to fill, empty at first.
        advance: called with the number of segments scored so far.

    Returns:
        [1 + C, N]: in the first row the network's loss of each token in nats, in each further row the log-probability
        of each token in one cache, in nats.
    """
    memory: Memory | None = None
    done = 0

    def read(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal memory, done
        # Keys and values cached for inference carry no gradient, so dynamic evaluation computes them again.
        with torch.set_grad_enabled(update is not None):
            output = model(inputs, memory, reach=reach, inference=update is None)
            nll = model.score(output, targets)
            loss = nll.mean()
        memory, losses = output.memory, nll.detach()
        hidden = output.hidden.detach()[0]
        cached = [cache.log_probs(hidden, targets[0], -losses[0])[None] for cache in caches]
        if update is not None:
            update(loss)
        done += 1
        advance(done)
        return torch.stack([losses, *cached])

    batches = evaluation_batches(tokens, first, 1, tgt_len, 0)
    return score_batches(model, read, batches, len(tokens), replace(device, distributed=SINGLE_PROCESS))
