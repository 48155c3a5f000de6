"""How a search step draws its gates: the weights of the candidates of every block.

The network itself is never random: it uses the gates that it is given, or pi where it is given none.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def gumbel_softmax(alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """softmax((alpha + g) / tau) with Gumbel noise g: [blocks, candidates] (Jang et al. 2017, equation 2)."""
    # -log E is Gumbel-distributed where E is exponential.
    noise = -torch.empty_like(alpha).exponential_(generator=generator).log()
    return ((alpha + noise) / tau).softmax(dim=-1)


def harden(gates: Tensor) -> Tensor:
    """One-hot gates at the likeliest candidates, with the gradient of the soft ones (straight-through)."""
    one_hot = F.one_hot(gates.argmax(dim=-1), gates.shape[-1]).to(gates.dtype)
    return one_hot + (gates - gates.detach())


def draw_gates(estimator: str, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Gates [blocks, candidates] of one step by the estimator of that name in `search.estimator`."""
    soft = gumbel_softmax(alpha, tau, generator)
    return harden(soft) if runs_single_path(estimator) else soft


def runs_single_path(estimator: str) -> bool:
    """Whether each step runs one candidate per block, so that the argmax network is what the SuperNet stands for."""
    return estimator == "straight_through"
