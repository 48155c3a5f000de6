"""Dynamic evaluation: after each segment is scored, the weights take a gradient step on it.

Krause et al. 2018, "Dynamic Evaluation of Neural Sequence Models" (arXiv 1709.07432).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from parnas.config.schema import DynamicConfig, Shape
from parnas.data.batching import TrainingBatches
from parnas.model.memory import Memory
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.optimizers import clone_weights, copy_weights


def dynamic_weights(model: TransformerXL) -> list[nn.Parameter]:
    """Return the parameters that dynamic evaluation updates: all except the alpha of a SuperNet and empty tensors."""
    weights = model.weights() if isinstance(model, SuperNet) else dict(model.named_parameters())
    return [weight for weight in weights.values() if weight.numel()]  # a full softmax has empty cluster weights


def gradient_rms(model: TransformerXL, tokens: np.ndarray, device: Device, shape: Shape, batches: int) -> list[Tensor]:
    """Return √MS_g, the root mean square of each weight's gradient over training batches, for the `dynamic_weights`.

    There is one tensor per parameter, of the parameter's shape. The gradients are those of the mean loss of a batch,
    with the trained weights and without dropout, for the first `batches` batches of the training text `tokens` [N]. A
    text that is too short for `shape.batch_size` rows is read in fewer rows. Raises `ParnasError` if the text is
    shorter than one segment.
    """
    rows = max(1, min(shape.batch_size, (len(tokens) - 1) // shape.tgt_len))
    weights, text = dynamic_weights(model), TrainingBatches(tokens, rows, shape.tgt_len)
    squares = [torch.zeros_like(weight) for weight in weights]
    memory: Memory | None = None
    count = min(batches, text.segments)
    model.eval()
    for step in range(count):
        inputs, targets = (torch.from_numpy(part).to(device.device) for part in text.batch(step)[:2])
        with device.autocast():
            nll, memory = model.nll(inputs, targets, memory, reach=shape.reach)
        for square, gradient in zip(squares, _gradients(nll.mean(), weights), strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient)
    return [square.div_(count).sqrt_() for square in squares]


@contextmanager
def dynamic_evaluation(
    model: TransformerXL, settings: DynamicConfig, rms: Sequence[Tensor]
) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that updates the weights, given the mean loss of a segment; restore the trained weights at exit.

    With g the gradient of that loss and theta_0 the trained weights, the function changes each weight theta to

        theta - lr g / (√MS_g + epsilon m) + decay √MS_g / m (theta_0 - theta),

    where `rms` holds √MS_g of each weight tensor (see `gradient_rms`), m is the average over tensors of each tensor's
    mean √MS_g, and `decay √MS_g / m` is limited to 1. Krause et al. 2018 add a constant epsilon to √MS_g instead of
    `epsilon m`. With the setting `update: sgd` (section 5 of their paper), theta becomes
    theta - lr g + decay (theta_0 - theta), and `rms` is not used.
    """
    weights = dynamic_weights(model)
    trained_weights = clone_weights(weights)
    lr = settings.lr or 0.0
    # 1. Compute the learning rate and the decay of each weight once, before the text is read.
    if settings.update == "rms":
        mean = torch.stack([root.mean() for root in rms]).mean().clamp(min=torch.finfo(torch.float32).tiny)
        rates = [lr / (root + settings.epsilon * mean) for root in rms]
        decays = [(settings.decay / mean * root).clamp(max=1) for root in rms]
    else:
        rates = [weight.new_tensor(lr) for weight in trained_weights]
        decays = [weight.new_tensor(settings.decay) for weight in trained_weights]

    def update(loss: Tensor) -> None:
        steps = zip(weights, trained_weights, _gradients(loss, weights), rates, decays, strict=True)
        with torch.no_grad():
            for weight, trained, gradient, rate, decay in steps:
                # 2. Decay towards the trained weights, from the weights before the gradient step.
                if settings.decay:
                    weight.lerp_(trained, decay)
                # 3. Gradient step.
                if gradient is not None:
                    weight.addcmul_(gradient, rate, value=-1)

    try:
        yield update
    finally:
        copy_weights(trained_weights, weights)


def _gradients(loss: Tensor, weights: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
    """Return the gradient of a loss for each weight, or `None` for a weight that the loss does not depend on.

    For example, it does not depend on the weights of a softmax cluster that contains no target of the segment.
    """
    with torch.autocast(loss.device.type, enabled=False):  # PyTorch advises against autocast in backward passes
        return torch.autograd.grad(loss, weights, allow_unused=True)
