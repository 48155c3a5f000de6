"""The continuous cache (Grave et al. 2017, arXiv 1612.04426): what followed hidden states like this one, comes again.

Shapes: T tokens of a segment, D model width, C positions in the cache.
"""

import math

import torch
from torch import Tensor


class ContinuousCache:
    """The last `size` hidden states, each with the token that followed it.

    At each position it gives every token w the probability

        p_cache(w) ∝ Σ_i 1{w followed h_i} exp(theta h · h_i)

    over the last `size` positions i before it (equations 2 and 3). Only that of the true next token is computed. An
    empty cache, as before the first token of a text, agrees with the network.
    """

    def __init__(self, size: int, theta: float) -> None:
        self.size, self.theta = size, theta
        self._states: Tensor | None = None  # [C, D]
        self._followers: Tensor | None = None  # [C]

    def log_probs(self, hidden: Tensor, targets: Tensor, model: Tensor) -> Tensor:
        """log p_cache of `targets` [T], of which `hidden` [T, D] are the states before them; then it holds these too.

        `model` [T] are the network's own log-probabilities of them. -inf where the token is not in the cache.
        """
        hidden = hidden.float()
        states = hidden if self._states is None else torch.cat([self._states, hidden])
        followers = targets if self._followers is None else torch.cat([self._followers, targets])
        before = len(states) - len(hidden)
        places = torch.arange(len(states), device=hidden.device)
        age = places[before:, None] - places  # [T, C + T]
        seen = (age > 0) & (age <= self.size)
        with torch.autocast(hidden.device.type, enabled=False):  # the exponential of a large product must be exact
            scores = self.theta * hidden @ states.t()
        shares = scores.masked_fill_(~seen, -torch.inf).softmax(dim=1)
        found = shares.masked_fill_(followers != targets[:, None], 0).sum(dim=1).log()
        self._states, self._followers = states[-self.size :], followers[-self.size :]
        return torch.where(seen.any(dim=1), found, model.float())


def mix(nats: Tensor, cached: Tensor, weight: float) -> Tensor:
    """Nats of each token [N] where the cache's log-probabilities [N] have a share of `weight` (0 to below 1).

    -log((1 - weight) exp(-nats) + weight exp(cached)), the linear interpolation of equation 4.
    """
    if not weight:
        return nats
    return -torch.logaddexp(math.log1p(-weight) - nats, math.log(weight) + cached)
