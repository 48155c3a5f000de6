"""Gates: the weights with which a SuperNet block adds up its candidates, and their gradients.

The estimators (`estimators.py`) sample gates, a SuperNet (`supernet.py`) computes with them, and the training loop
carries their gradient to alpha. With `PathGate`s the gradient of alpha takes this path, from the loss back to alpha:

1. `SinglePathFunction`, inside each block: the gradient of the block's output gives the gradients of the gates of the
   candidates that ran.
2. `DetachedGates`, in the training loop: collects the gradients of all micro-batches and processes.
3. The estimator's sampling function: replaces gradients of candidates that did not run (`single_path` only), and passes
   the result through the softmax to alpha.

Shapes: N blocks, C candidates, B batch, T segment, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["DetachedGates", "Gates", "PathGate", "backward_to_alpha"]

ABSENT = -1e20
"""Logit of a candidate that a block does not have. Its probability is exactly zero at every temperature; an infinite
logit would turn gradients of the temperature, and 0 · log 0 of an entropy, into NaN."""


class PathGate(NamedTuple):
    """The gate of a block that runs a single candidate instead of the weighted sum of all candidates."""

    weights: Tensor  # [C] one-hot, with a gradient where alpha is trained
    chosen: int  # index of the candidate that runs
    probed: int | None = None  # index of a candidate that also runs, without gradient, for the gradient of alpha


Gates = Tensor | Sequence[PathGate]
"""Weights [N, C], with which all candidates run; or a `PathGate` for each block, with which one candidate runs."""


class DetachedGates:
    """Gates cut off from alpha, so that gradients accumulate over micro-batches and reach alpha in one backward pass.

    All micro-batches of a sample's rows use the same gates, and the backward pass of each micro-batch frees its graph.
    Since the graph is cut at the gates, the part from gates to alpha survives until the gates' gradients are added up.

    Attributes:
        gates: the detached gates, to be passed to the network.
        leaf: the weights of `gates` as one leaf tensor [N, C], whose `.grad` accumulates.
        sampled: the weights of `leaf`, still connected to alpha.
    """

    def __init__(self, sampled: Gates) -> None:
        self.sampled = sampled if isinstance(sampled, Tensor) else torch.stack([gate.weights for gate in sampled])
        self.leaf = self.sampled.detach().requires_grad_(self.sampled.requires_grad)
        self.gates: Gates = self.leaf
        if not isinstance(sampled, Tensor):
            rows = zip(sampled, self.leaf.unbind(), strict=True)
            self.gates = [gate._replace(weights=row) for gate, row in rows]


def backward_to_alpha(
    samples: Sequence[DetachedGates], reduce: Callable[[list[Tensor]], None] = lambda _: None
) -> None:
    """Backpropagate the accumulated gradients of all samples of a step into alpha.

    `reduce` averages a list of gradients over processes in place. Samples that do not depend on alpha have no effect.
    """
    samples = [sample for sample in samples if sample.leaf.requires_grad]
    if not samples:
        return
    # A leaf has no gradient if this process reads no row of the part of the batch that its gates are for.
    gradients = [torch.zeros_like(each.leaf) if each.leaf.grad is None else each.leaf.grad for each in samples]
    reduce(gradients)
    torch.autograd.backward([sample.sampled for sample in samples], gradients)


class SinglePathFunction(torch.autograd.Function):
    """The output of the chosen candidate, with gradients for the gates of all candidates that ran.

    The output is y = sum_c gate[c] · layer_c(x) with a single gate of 1, so y = layer_chosen(x), yet gate c has the
    gradient <d loss / d y, layer_c(x)>. The gradient of identity, <d loss / d y, x>, is subtracted from the gradients
    of all gates; such a constant does not change the gradient of alpha, since the gates come from a softmax. The gate
    of a candidate that did not run gets gradient 0: it is treated as identity (`gdas`), not as a layer with output 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        probe: Tensor | None,
        weights: Tensor,
        indices: tuple[int, int | None],
    ) -> Tensor:
        """Return `output`, connected to the gates.

        Args:
            ctx: autograd's context.
            output: output of the chosen candidate, [B, T, D].
            x: the block's input, [B, T, D].
            probe: output of the probe, [B, T, D], or `None` if this block has none.
            weights: the gates, [C].
            indices: index of the chosen candidate and index of the probe or `None`.
        """
        ctx.save_for_backward(output, x, probe)
        ctx.candidates, ctx.indices = len(weights), indices
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return `grad` for `output`, the gradients of the gates for `weights`, and `None` for the other arguments."""
        output, x, probe = ctx.saved_tensors
        chosen, probed = ctx.indices
        # <d loss / d y, output_c - x> for the candidates that ran. The products sum over B, T and D, since one gate
        # weighs the whole output of its candidate.
        flat = grad.flatten()
        identity = flat @ x.flatten()
        weights = grad.new_zeros(ctx.candidates)  # [C]
        weights[chosen] = flat @ output.flatten() - identity
        if probed is not None:
            weights[probed] = flat @ probe.flatten() - identity
        return grad, None, None, weights, None
