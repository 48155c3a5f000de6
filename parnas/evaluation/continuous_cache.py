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

    summed over the `size` positions i before it (Grave et al. 2017, equations 2 and 3). `log_probs` computes it for the
    true next tokens. At the first position of a text the cache is empty, and the network's probability is used instead.
    """

    def __init__(self, size: int, theta: float) -> None:
        self.size, self.theta = size, theta
        self._states: Tensor | None = None  # [C, D]
        self._followers: Tensor | None = None  # [C] the token after each state

    def log_probs(self, hidden: Tensor, targets: Tensor, model_log_probs: Tensor) -> Tensor:
        """Return log p_cache of each target of a segment, [T] in nats, and add the segment to the cache.

        `hidden` [T, D] holds the hidden states from which the network predicts `targets` [T]. A target that is not in
        the cache has -inf. Where the cache is empty, the network's own log-probability in `model_log_probs` [T] is
        returned.
        """
        # 1. Append the segment, so that its later positions see its earlier ones.
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
    """Return the loss of each token in nats, [N], if the probabilities of the network and of the cache are mixed.

    The loss is -log((1 - weight) exp(-nats) + weight exp(cache_log_probs)) (Grave et al. 2017, equation 4), where
    `nats` [N] is the loss of the network and `weight`, from 0 to below 1, weights the cache's probability.
    """
    if not weight:
        return nats
    return -torch.logaddexp(math.log1p(-weight) - nats, math.log(weight) + cache_log_probs)
