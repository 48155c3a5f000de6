"""Perplexity: score every token once, without sampling noise; add up all losses, then divide once."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from parnas.config.schema import Reach
from parnas.data.batching import EvaluationBatch, evaluation_batches
from parnas.data.streams import SplitCounts
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import SplitLoss
from parnas.training.device import Device

__all__ = ["TotalLoss", "exp_or_infinity", "measure_loss", "score_batches", "score_tokens"]


@dataclass(frozen=True)
class TotalLoss:
    """Negative log-likelihood of a split, summed over its tokens."""

    nats: float
    tokens: int

    @classmethod
    def of(cls, nats: Tensor) -> Self:
        """Return the sum of the losses of single tokens [N], in nats."""
        return cls(float(nats.double().sum()), len(nats))

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return exp_or_infinity(self.per_token)

    def word_perplexity(self, counts: SplitCounts) -> float:
        """Return the perplexity per whitespace word of the original text; a predicted line end counts as a word."""
        return exp_or_infinity(self.nats / (counts.words + counts.line_ends))

    def bits_per_byte(self, counts: SplitCounts) -> float:
        """Return bits per byte of the original split."""
        return float(self.nats / math.log(2) / counts.bytes)

    def describe(self, counts: SplitCounts) -> SplitLoss:
        """Return all measures of the loss, with the counts that they divide by."""
        return SplitLoss(
            loss=self.per_token,
            ppl=self.perplexity,
            word_ppl=self.word_perplexity(counts),
            bits_per_byte=self.bits_per_byte(counts),
            nats=self.nats,
            tokens=self.tokens,
            words=counts.words + counts.line_ends,
            bytes=counts.bytes,
        )


def measure_loss(
    model: TransformerXL,
    tokens: np.ndarray,
    first: int,
    device: Device,
    *,
    batch_size: int,
    tgt_len: int,
    reach: Reach,
) -> TotalLoss:
    """Return the total loss of `model` over all of `tokens`, which token `first` precedes; see `score_tokens`."""
    return TotalLoss.of(score_tokens(model, tokens, first, device, batch_size=batch_size, tgt_len=tgt_len, reach=reach))


def score_tokens(
    model: TransformerXL,
    tokens: np.ndarray,
    first: int,
    device: Device,
    *,
    batch_size: int,
    tgt_len: int,
    reach: Reach,
) -> Tensor:
    """Return the negative log-likelihood of each token in nats, [N] in float32, on the device.

    Rows are read side by side for speed. Each row but the first reads, unscored, as much text before its own as memory
    can reach back, so that the result does not depend on `batch_size` beyond rounding. Stochastic blocks weigh by pi.
    """
    memory: Memory | None = None

    def score(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal memory
        nll, memory = model.nll(inputs, targets, memory, reach=reach, inference=True)
        return nll

    burn_in = model.burn_in(tgt_len, reach)
    batches = evaluation_batches(tokens, first, batch_size, tgt_len, burn_in, model.alignment())
    return score_batches(model, score, batches, len(tokens), device)


_BatchScorer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Returns the losses of a batch in nats, [B, T] or, for several settings at once, [S, B, T]; takes its inputs and
targets [B, T]. Batches come in the order of the text, so that it can carry memory along."""


@torch.no_grad()
def score_batches(
    model: TransformerXL, score: _BatchScorer, batches: Iterable[EvaluationBatch], count: int, device: Device
) -> Tensor:
    """Return the losses that `score` gives each of `count` tokens, [N] or [S, N] in float32, in nats.

    Every token is scored exactly once, without dropout and, unless `score` enables them, without gradients. With
    several processes each scores some of the rows, and all receive the result.
    """
    was_training = model.training
    model.eval()
    distributed = device.distributed
    scored = torch.zeros((), dtype=torch.long, device=device.device)
    nats = torch.zeros(count + 1, device=device.device)  # the last place receives the tokens that are not scored
    try:
        for batch in batches:
            places = np.where(batch.scored, batch.positions, count)
            own = [part[distributed.rank :: distributed.world_size] for part in (*batch[:2], places, batch.scored)]
            if not len(own[0]):
                break
            inputs, targets, to = (torch.from_numpy(part).to(device.device) for part in own[:3])
            with device.autocast():
                losses = score(inputs, targets)
            if losses.shape[:-2] != nats.shape[:-1]:  # the first batch of several settings
                nats = nats.new_zeros(*losses.shape[:-2], count + 1)
            nats[..., to] = losses.float()
            scored += int(own[3].sum())
    finally:
        model.train(was_training)
    distributed.all_reduce_sum([nats])
    distributed.all_reduce_sum([scored])
    assert int(scored) == count, "every token is scored exactly once"
    return nats[..., :-1]


def exp_or_infinity(value: float) -> float:
    """Return exp(value), or infinity where it exceeds a float."""
    return math.inf if value > 700 else math.exp(value)
