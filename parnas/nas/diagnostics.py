"""Diagnostics of a search: the entropy of pi, the share of identity, and changes of the most probable network."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parnas.architecture import IDENTITY, Architecture, drop_identity

COLLAPSED = 0.6
"""A search counts as collapsed if the mean probability of identity over the blocks is at least this: most blocks would
do nothing, which no reasonable cost target requires."""


def entropies(pi: Tensor) -> Tensor:
    """Return the entropy of each block in nats, [blocks], given pi [blocks, candidates]; differentiable."""
    tiny = torch.finfo(pi.dtype).tiny  # keeps the logarithm finite where pi is 0, so that its gradient is zero there
    return -(pi * pi.clamp(min=tiny).log()).sum(dim=-1)


class Monitor:
    """Compute diagnostics of pi at each log line of a search, and count changes of the network `derive` would select.

    Attributes:
        network: the layers that `derive` would select at the last log line, without identity; `None` before any.
        changes: how many times `network` has changed from one log line to the next.
    """

    def __init__(self, space: Sequence[str]) -> None:
        self.space = tuple(space)
        self.network: str | None = None
        self.changes = 0

    def observe(self, pi: Tensor, architecture: Architecture) -> dict[str, Any]:
        """Return the diagnostics of one log line, given pi [blocks, candidates] and the architecture to be derived.

        entropy          entropy of pi in nats, mean over the blocks
        identity_share   probability of identity, mean over the blocks
        argmax           `architecture` as text
        argmax_changes   number of changes of the selected network so far; moving identity does not count as a change
        """
        network = " ".join(drop_identity(architecture))  # moving identity is no change of the network
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
    """Return a warning with advice if the mean probability of identity is at least `COLLAPSED`, else `None`."""
    if identity_share < COLLAPSED:
        return None
    other = "" if estimator == "uniform" else "use search.estimator uniform, "
    return (
        f"the search is collapsing: the mean probability of identity is {identity_share:.0%}. Train the weights longer "
        f"before alpha (search.alpha_start_step), raise search.entropy_start, {other}or leave i out of search.space"
    )
