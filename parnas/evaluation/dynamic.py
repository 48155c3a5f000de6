"""Dynamic evaluation (Krause et al. 2018, arXiv 1709.07432): weights learn from text once it is scored."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from parnas.data.batching import TrainingBatches
from parnas.model.memory import Memory
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.sections import DynamicConfig, Reach
from parnas.training.device import Device

Learn: TypeAlias = Callable[[Tensor], None]
"""Lets weights learn from the mean loss of a segment, a scalar."""


def learning_weights(model: TransformerXL) -> list[nn.Parameter]:
    """What dynamic evaluation changes: all weights, but not the alpha of a SuperNet."""
    weights = model.weights() if isinstance(model, SuperNet) else dict(model.named_parameters())
    return [weight for weight in weights.values() if weight.numel()]  # a full softmax has no weights of clusters


def gradient_rms(
    model: TransformerXL,
    tokens: np.ndarray,
    device: Device,
    *,
    batch_size: int,
    tgt_len: int,
    reach: Reach,
    batches: int,
) -> list[Tensor]:
    """√MS_g of each of the `learning_weights`: the root of its mean squared gradient over the first training batches.

    The gradients are those of the mean loss of a batch, without dropout, with trained weights. `tokens` [N] are the
    training text; where they do not fill so many rows, fewer are read, and `ParnasError` is raised for none.
    """
    rows = max(1, min(batch_size, (len(tokens) - 1) // tgt_len))
    weights, text = learning_weights(model), TrainingBatches(tokens, rows, tgt_len)
    sums = [torch.zeros_like(weight) for weight in weights]
    memory: Memory | None = None
    count = min(batches, text.segments)
    model.eval()
    for step in range(count):
        inputs, targets = (torch.from_numpy(part).to(device.device) for part in text.batch(step)[:2])
        with device.autocast():
            nll, memory = model.nll(inputs, targets, memory, reach=reach)
        for of, gradient in zip(sums, gradients(nll.mean(), weights), strict=True):
            if gradient is not None:
                of.addcmul_(gradient, gradient)
    return [of.div_(count).sqrt_() for of in sums]


@contextmanager
def adapting(model: TransformerXL, settings: DynamicConfig, rms: Sequence[Tensor]) -> Iterator[Learn]:
    """Let a network learn from what it scores, by what is given; afterwards its weights are what they were.

    With g the gradient of a segment's mean loss and theta_0 the trained weights, each weight becomes

        theta - lr g / (√MS_g + epsilon m) + decay √MS_g / m (theta_0 - theta),

    m being the mean over all parameters (matrices, biases, gains) of their means of √MS_g, and `decay √MS_g / m` at
    most 1. The paper's epsilon is `epsilon m`. With the update `sgd`, theta - lr g + decay (theta_0 - theta), `rms` is
    not read (section 5).
    """
    weights = learning_weights(model)
    trained = [weight.detach().clone() for weight in weights]
    lr = settings.lr or 0.0
    if settings.update == "rms":
        mean = torch.stack([of.mean() for of in rms]).mean().clamp(min=torch.finfo(torch.float32).tiny)
        rates = [lr / (of + settings.epsilon * mean) for of in rms]
        pulls = [(settings.decay / mean * of).clamp(max=1) for of in rms]
    else:
        rates = [weight.new_tensor(lr) for weight in trained]
        pulls = [weight.new_tensor(settings.decay) for weight in trained]

    def learn(loss: Tensor) -> None:
        found = gradients(loss, weights)
        with torch.no_grad():
            for weight, before, pull, gradient, rate in zip(weights, trained, pulls, found, rates, strict=True):
                if settings.decay:
                    weight.lerp_(before, pull)
                if gradient is not None:
                    weight.addcmul_(gradient, rate, value=-1)

    try:
        yield learn
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, trained, strict=True):
                weight.copy_(before)


def gradients(loss: Tensor, weights: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
    """Of a loss with regard to weights; none for those that it does not depend on, as clusters without a target."""
    with torch.autocast(loss.device.type, enabled=False):  # which is of forward passes
        return torch.autograd.grad(loss, weights, allow_unused=True)
