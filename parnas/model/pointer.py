"""Pointer: copy one of the tokens that followed earlier positions, or take the softmax over the vocabulary.

The pointer sentinel mixture (Merity et al. 2017, arXiv 1609.07843) compares the hidden state of a position with those
of the K positions before it and with a sentinel g, in one softmax. A weight on a position is a probability of the token
that followed it; the weight on the sentinel goes to the softmax over the vocabulary:

    p(token) = a(g) · p_vocabulary(token) + sum of a(i) over the positions i that the token followed

So a rare word that occurred once is likely to occur again. Keys are the hidden states themselves, as in the continuous
cache (Grave et al. 2017, arXiv 1612.04426), but the pointer is trained with the network.

Shapes: B batch, T segment, D model width, V vocabulary, P positions of memory, K = P + T positions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parnas.config.schema import ModelConfig, Reach
from parnas.model import fused
from parnas.model.memory import BlockMemory, append_memory, join

_MASKED = -1e9  # finite, since the first token of a text has no position before it
_INITIAL_SHARE = 0.1  # of the probability, for all positions together, before training


class PointerScores(NamedTuple):
    """The scores of a pointer, logits of one softmax for each token to predict."""

    positions: Tensor  # [B, T, K] of the positions, in float32; _MASKED for positions that are not before the token
    sentinel: Tensor  # [B, T] of the softmax over the vocabulary, in float32
    followers: Tensor  # [B, K] the token that followed each position; -1 after the last one

    def last(self, count: int) -> "PointerScores":
        """Return the scores for the last `count` tokens."""
        return self._replace(positions=self.positions[:, -count:], sentinel=self.sentinel[:, -count:])


class Pointer(nn.Module):
    """Compares hidden states with earlier ones; see the module."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.length = config.pointer_len
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.sentinel = nn.Linear(config.d_model, 1)

    def initialise(self) -> None:
        """Set the sentinel so that all positions together have little probability."""
        nn.init.constant_(self.sentinel.bias, math.log(self.length * (1 - _INITIAL_SHARE) / _INITIAL_SHARE))

    def forward(
        self, hidden: Tensor, tokens: Tensor, memory: BlockMemory, reach: Reach
    ) -> tuple[PointerScores, BlockMemory]:
        """Return the scores for the tokens that follow a segment's, and the memory for the next segment.

        Args:
            hidden: hidden states [B, T, D] of the segment.
            tokens: ids [B, T] of the segment.
            memory: hidden states [B, P, D] and ids [B, P] of the positions before; `None` if there are none.
            reach: memory lengths; P is `pointer_len` at most.
        """
        states, ids = (None, None) if memory is None else memory
        new = hidden.to(fused.product_dtype(hidden))
        query: Tensor = self.query(new) / math.sqrt(hidden.shape[-1])
        # 1. Scores of the positions of the segment, and, in a product of its own, of those of the memory: these need no
        #    gradient, and most positions are there.
        own = (query @ new.transpose(1, 2)).float().masked_fill(_not_before(hidden.shape[1], hidden.device), _MASKED)
        scores = own if states is None else torch.cat([(query @ states.transpose(1, 2)).float(), own], dim=2)
        # 2. The token that followed a position is the next one that was read, so the position itself has none yet.
        read = join(ids, tokens)
        followers = torch.cat([read[:, 1:], read.new_full((len(read), 1), -1)], dim=1)
        new_memory = tuple(append_memory(old, new, reach.pointer_len) for old, new in ((states, new), (ids, tokens)))
        return PointerScores(scores, self.sentinel(hidden).squeeze(-1).float(), followers), new_memory

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Return the multiply-adds per token with full memory."""
        d_model = self.query.in_features
        return d_model * (d_model + 1 + tgt_len + reach.pointer_len)


@fused.cache_tensors
def _not_before(tgt_len: int, device: torch.device) -> Tensor:
    """Return a mask [T, T], true for the positions of a segment that are not before each of its positions."""
    return torch.ones(tgt_len, tgt_len, dtype=torch.bool, device=device).triu()


def mix_nll(nll: Tensor, targets: Tensor, scores: PointerScores) -> Tensor:
    """Return the negative log-likelihood in nats of targets [B, T], given that of the softmax, [B, T]."""
    copies = scores.followers[:, None] == targets[..., None]
    return fused.mix_copying(nll, scores.sentinel, scores.positions, copies)


def mix_log_probs(log_probs: Tensor, scores: PointerScores) -> Tensor:
    """Return the log-probabilities of all ids, [B, T, V], given those of the softmax."""
    total = torch.logaddexp(scores.positions.logsumexp(dim=-1), scores.sentinel)[..., None]
    followers = scores.followers[:, None].clamp(min=0).expand_as(scores.positions)
    copied = torch.zeros_like(log_probs).scatter_add(-1, followers, (scores.positions - total).exp())
    # A probability of zero would have a gradient that is not a number.
    log_copied = copied.clamp(min=torch.finfo(copied.dtype).tiny).log()
    return torch.logaddexp(scores.sentinel[..., None] - total + log_probs, log_copied)
