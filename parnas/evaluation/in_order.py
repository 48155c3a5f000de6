"""Scoring a text in one row, from its first token to its last, so that what was read can change what follows."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from parnas.data.batching import evaluation_batches
from parnas.evaluation.cache import ContinuousCache
from parnas.evaluation.dynamic import Learn
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.sections import Reach
from parnas.training.device import Device
from parnas.training.perplexity import score_batches
from parnas.training.ranks import ALONE


def score_in_order(
    model: TransformerXL,
    tokens: np.ndarray,
    first: int,
    device: Device,
    *,
    tgt_len: int,
    reach: Reach,
    learn: Learn | None = None,
    caches: Sequence[ContinuousCache] = (),
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Nats of each token, and below them the log-probabilities that each empty cache comes to give it, [1 + caches, N].

    `learn` is given the mean loss of each segment once all its tokens are scored. `advance` is told how many segments
    are done. Without `learn`, the first row is that of `score_tokens`.
    """
    memory: Memory | None = None
    done = 0

    def read(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal memory, done
        learns = learn is not None
        with torch.set_grad_enabled(learns):  # and through keys and values that are kept, nothing would be learnt
            output = model(inputs, memory, reach=reach, inference=not learns)
            nll = model.score(output.hidden, targets)
            loss = nll.mean()
        memory, losses = output.memory, nll.detach()
        hidden, asked = output.hidden.detach()[0], targets[0]
        cached = [cache.log_probs(hidden, asked, -losses[0])[None] for cache in caches]
        if learn is not None:
            learn(loss)
        done += 1
        advance(done)
        return torch.stack([losses, *cached])

    batches = evaluation_batches(tokens, first, 1, tgt_len, 0)
    return score_batches(model, read, batches, len(tokens), replace(device, ranks=ALONE))
