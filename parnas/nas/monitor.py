"""What tells a search that goes well from one that collapses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parnas.architecture import IDENTITY, Architecture, drop_identity

COLLAPSED = 0.6
"""Mean probability of identity from which on a search is said to collapse: most blocks do nothing, while no target
of cost that one would set asks for that."""


def entropies(pi: Tensor) -> Tensor:
    """Entropy of each block's probabilities in nats, [blocks], given pi [blocks, candidates]; differentiable."""
    tiny = torch.finfo(pi.dtype).tiny  # where pi is 0 its logarithm is to be finite, so that gradients are zero there
    return -(pi * pi.clamp(min=tiny).log()).sum(dim=-1)


class Monitor:
    """Follows pi over a search; `changes`, of the network that derive would take, and its layers are all its state."""

    def __init__(self, space: Sequence[str]) -> None:
        self.space = tuple(space)
        self.network: str | None = None  # without identity
        self.changes = 0

    def look(self, pi: Tensor, architecture: Architecture) -> dict[str, Any]:
        """The figures of one line of metrics, given pi [blocks, candidates] and what derive would take.

        entropy          of pi in nats, mean over the blocks
        identity_share   probability of identity, mean over the blocks
        argmax_changes   how many lines so far named another network than the line before
        """
        network = " ".join(drop_identity(architecture))
        self.changes += self.network not in (None, network)
        self.network = network
        identity = pi[:, self.space.index(IDENTITY)].mean().item() if IDENTITY in self.space else 0.0
        return {
            "entropy": entropies(pi).mean().item(),
            "identity_share": identity,
            "argmax": str(architecture),
            "argmax_changes": self.changes,
        }


def describe_collapse(identity_share: float, estimator: str) -> str | None:
    """What to say where a search by that estimator collapses."""
    if identity_share < COLLAPSED:
        return None
    other = "" if estimator == "uniform" else "use search.estimator uniform, "
    return (
        f"the search is collapsing: identity holds {identity_share:.0%} of pi. Train weights longer before alpha "
        f"(search.alpha_start_step), raise search.entropy_start, {other}or leave i out of search.space"
    )
