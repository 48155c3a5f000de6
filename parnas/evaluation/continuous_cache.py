"""The continuous cache: tokens that followed similar hidden states become more probable.

Grave et al. 2017, "Improving Neural Language Models with a Continuous Cache" (arXiv 1612.04426).
Shapes: T tokens of a segment, D model width, C positions in the cache.
"""

import math

import torch
from torch import Tensor


class ContinuousCache:
    """A cache of the last `size` hidden states of a text, each with the token that followed it.

    At a position with hidden state h, the cache gives each token w the probability

        p_cache(w) ∝ Σ_i 1{w followed h_i} exp(theta h · h_i),

    summed over the `size` positions i before it (equations 2 and 3). Only the probability of the true next token is
    computed. At the first position of a text, where the cache is empty, the network's
    probability is used instead.
    """

    def __init__(self, size: int, theta: float) -> None:
        self.size, self.theta = size, theta
        self._states: Tensor | None = None  # [C, D]
        self._followers: Tensor | None = None  # [C] the token after each state

    def log_probs(self, hidden: Tensor, targets: Tensor, model_log_probs: Tensor) -> Tensor:
        """Return log p_cache of each token of a segment, [T], and add the segment to the cache.

        The cache of each token includes the earlier tokens of the same segment.

        Args:
            hidden: the hidden states that predict the targets, [T, D].
            targets: the true next tokens, [T].
            model_log_probs: the network's log-probabilities of the targets, [T]; returned where the cache is empty.

        Returns:
            Natural logarithms, -inf for tokens that are not in the cache.
        """
        # 1. Append the segment, so that later positions of it see earlier ones.
        hidden = hidden.float()
        states = hidden if self._states is None else torch.cat([self._states, hidden])
        followers = targets if self._followers is None else torch.cat([self._followers, targets])
        # 2. Each position sees the `size` positions before it.
        positions = torch.arange(len(states), device=hidden.device)
        age = positions[-len(hidden) :, None] - positions  # [T, C + T]
        visible = (age > 0) & (age <= self.size)
        # 3. Softmax over theta h · h_i, summed over the positions that the target followed.
        with torch.autocast(hidden.device.type, enabled=False):  # the exponential of a large product must be exact
            scores = self.theta * hidden @ states.t()
        shares = scores.masked_fill_(~visible, -torch.inf).softmax(dim=1)
        log_probs = shares.masked_fill_(followers != targets[:, None], 0).sum(dim=1).log()
        self._states, self._followers = states[-self.size :], followers[-self.size :]
        return torch.where(visible.any(dim=1), log_probs, model_log_probs.float())


def mix(nats: Tensor, cache_log_probs: Tensor, weight: float) -> Tensor:
    """Return the loss of each token in nats, [N], under a mixture of the probabilities of network and cache.

    The loss is -log((1 - weight) exp(-nats) + weight exp(cache_log_probs)), equation 4.

    Args:
        nats: the network's loss of each token, [N].
        cache_log_probs: the cache's log-probability of each token, [N].
        weight: of the cache's probability, from 0 to below 1.
    """
    if not weight:
        return nats
    return -torch.logaddexp(math.log1p(-weight) - nats, math.log(weight) + cache_log_probs)
