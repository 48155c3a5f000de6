"""Perplexity of a text: score every token exactly once, add up all losses, then divide by the number of tokens."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from parnas.config.schema import Reach, Shape
from parnas.data.batching import EvaluationBatch, evaluation_batches
from parnas.data.streams import SplitCounts
from parnas.model.memory import Memory, join_rows, list_tensors, map_memory
from parnas.model.recurrence import WHOLE_TEXT
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import SplitLoss
from parnas.training.device import Device

__all__ = ["TotalLoss", "exp_or_infinity", "measure_loss", "score_batches", "score_tokens"]

_ROUNDING = 1e-3  # largest relative difference of memories that differ by rounding only
_LEAST_ROWS, _LEAST_ROW = 4, 4096  # rows that are read repeatedly, and tokens of each: recurrences forget slowly
_FIRST_KEPT = 8  # segments after which memory is compared first


@dataclass(frozen=True)
class TotalLoss:
    """Negative log-likelihood of a text in nats, summed over its tokens, and the number of tokens."""

    nats: float
    tokens: int

    @classmethod
    def of(cls, nats: Tensor) -> Self:
        """Return the total loss of a text, given the loss in nats of each token, [N]."""
        return cls(float(nats.double().sum()), len(nats))

    @property
    def per_token(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return exp_or_infinity(self.per_token)

    def word_perplexity(self, counts: SplitCounts) -> float:
        """Return the perplexity per word of the original text, with the word counts in `counts`.

        Words are separated by whitespace; a predicted line end counts as a word too.
        """
        return exp_or_infinity(self.nats / (counts.words + counts.line_ends))

    def bits_per_byte(self, counts: SplitCounts) -> float:
        """Return the loss in bits per byte of the original text, whose number of bytes is in `counts`."""
        return float(self.nats / math.log(2) / counts.bytes)

    def describe(self, counts: SplitCounts) -> SplitLoss:
        """Return the loss per token, per word and per byte, with the counts of tokens, words and bytes."""
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
    model: TransformerXL, tokens: np.ndarray, first: int, device: Device, shape: Shape, burn_in: int | None = None
) -> TotalLoss:
    """Return the loss of `model` over the text `tokens`, read after the token `first`; see `score_tokens`."""
    return TotalLoss.of(score_tokens(model, tokens, first, device, shape, burn_in))


def score_tokens(
    model: TransformerXL, tokens: np.ndarray, first: int, device: Device, shape: Shape, burn_in: int | None = None
) -> Tensor:
    """Return the negative log-likelihood of each of the N `tokens` in nats: [N], in float32, on the device.

    The model reads the token `first` before `tokens`, to predict `tokens[0]`. For speed the text is divided into
    `shape.batch_size` rows that are read in parallel. Each row except the first begins with text from the end of the
    previous row, unscored and as long as memory reaches back: so the result does not depend on the batch size, except
    for rounding. If memory reaches back to the beginning of the text, as that of recurrences does, see
    `_score_recurrent`. Blocks of a SuperNet mix their candidates with the weights pi.

    `burn_in` limits the unscored text to this number of segments. Then the losses are approximate, since memory can
    lack its older part, but a short text can be divided into more rows.
    """
    reaching = model.burn_in(shape.tgt_len, shape.reach)
    segments = reaching if burn_in is None else min(reaching, burn_in)
    if segments * shape.tgt_len >= WHOLE_TEXT and shape.batch_size > 1 and device.distributed.world_size == 1:
        nll = _score_recurrent(model, tokens, first, device, shape)
        if nll is not None:
            return nll
    batches = evaluation_batches(tokens, first, shape.batch_size, shape.tgt_len, segments, model.alignment())
    return _Reader(model, shape.reach, None).read(batches, len(tokens), device)


class _Reader:
    """A network that reads a text by segments, with its memory.

    Args:
        model: the network.
        reach: the memory lengths.
        memory: the memory before the first segment.
        known: memories of an earlier pass over the text, by the number of segments before them: empty in the first of
            several passes, `None` if there is one pass, which keeps no memories.
    """

    def __init__(
        self,
        model: TransformerXL,
        reach: Reach,
        memory: Memory | None,
        known: Mapping[int, Memory | None] | None = None,
    ) -> None:
        self.model, self.reach, self.memory, self.known = model, reach, memory, known
        self.kept: dict[int, Memory | None] = {}  # as `known`, of this pass
        self.agrees = False  # whether reading ended with a memory of the earlier pass
        self.tokens = 0  # scored

    def read(
        self, batches: Iterable[EvaluationBatch], count: int, device: Device, earlier: Tensor | None = None
    ) -> Tensor:
        """Return the losses in nats of `count` tokens, [count], in float32.

        Reading ends when memory is as in the earlier pass, since the rest would be the same. The losses of the rest
        are then those in `earlier`, [count].
        """
        nats = score_batches(self.model, self._score, self._until_known(batches), count, device, earlier)
        # Without earlier losses, `score_batches` counts the tokens that all processes score.
        assert earlier is None or self.agrees or self.tokens == count, "every token is scored, or its loss known"
        return nats

    def _score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        nll, self.memory = self.model.nll(inputs, targets, self.memory, reach=self.reach, inference=True)
        return nll

    def _until_known(self, batches: Iterable[EvaluationBatch]) -> Iterator[EvaluationBatch]:
        """Yield batches until memory is known; look after `_FIRST_KEPT` segments, twice as many, and so on."""
        segments, due = 0, _FIRST_KEPT
        for segments, batch in enumerate(batches, 1):
            self.tokens += int(batch.scored.sum())
            yield batch  # the caller scores it, which changes memory
            if segments == due:
                self._keep(segments)
                due *= 2
                if self.agrees:
                    return
        self._keep(segments)

    def _keep(self, segments: int) -> None:
        if self.known is None:
            return
        self.kept[segments] = self.memory
        if segments in self.known:
            self.agrees = _agree(self.known[segments], self.memory)


def _score_recurrent(
    model: TransformerXL, tokens: np.ndarray, first: int, device: Device, shape: Shape
) -> Tensor | None:
    """Return what `score_tokens` does, by reading parallel rows repeatedly, if memory has no end.

    A row whose first memory is exact has exact losses and an exact last memory, the first one of the next row. So n
    passes over the text make n rows exact. Since a recurrence forgets, a second pass usually ends after some segments:
    from there on memories, and so losses, are those of the first pass, however it began. Return `None` if rows are
    shorter than memory or too few to be faster.
    """
    rows = min(shape.batch_size, len(tokens) // _LEAST_ROW)
    if rows < _LEAST_ROWS:
        return None

    def batches() -> Iterator[EvaluationBatch]:
        return evaluation_batches(tokens, first, rows, shape.tgt_len, 0, model.alignment())

    starts_of_rows = next(batches()).positions[:, 0]
    if len(starts_of_rows) < _LEAST_ROWS:  # segments are so long that there are fewer rows
        return None
    # 1. Read all rows from empty memory, which is right for the first row.
    reader = _Reader(model, shape.reach, None, {})
    nll = reader.read(batches(), len(tokens), device)
    own = int(starts_of_rows[1])  # number of tokens of the first row
    before, rest = map_memory(lambda each: each[:-1], reader.memory), nll[own:]
    kept = {segments: map_memory(lambda each: each[1:], memory) for segments, memory in reader.kept.items()}
    # 2. Read the other rows from the last memory of the row before, until these memories stay the same.
    for _ in starts_of_rows[1:]:
        others = (
            EvaluationBatch(each.inputs[1:], each.targets[1:], each.scored[1:], each.positions[1:] - own)
            for each in batches()
        )
        reader = _Reader(model, shape.reach, before, kept)
        rest = reader.read(others, len(tokens) - own, device, rest)
        if reader.agrees:
            break
        if not _same_shapes(kept[max(kept)], reader.memory):
            return None
        kept = reader.kept
        exact = map_memory(lambda each: each[:1], before)
        before = join_rows([exact, map_memory(lambda each: each[:-1], reader.memory)])
    return torch.cat([nll[:own], rest])


def _same_shapes(memory: Memory | None, other: Memory | None) -> bool:
    """Return whether two memories have tensors of the same shapes: not if one of them is not filled yet."""
    return [each.shape for each in list_tensors(memory)] == [each.shape for each in list_tensors(other)]


def _agree(memory: Memory | None, other: Memory | None) -> bool:
    """Return whether two memories of equal rows [B, …] are the same, except for rounding, in every row."""
    return _same_shapes(memory, other) and all(
        bool(((one - two).flatten(1).norm(dim=1) <= _ROUNDING * two.flatten(1).norm(dim=1)).all())
        for one, two in (
            (one.float(), two.float()) for one, two in zip(*map(list_tensors, (memory, other)), strict=True)
        )
    )


_BatchScorer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function from inputs and targets [B, T] of a batch to the losses in nats: [B, T], or [S, B, T] if it scores the text
by S settings at once. It is called with batches in the order of the text, so that it can keep memory between them."""


@torch.no_grad()
def score_batches(
    model: TransformerXL,
    score: _BatchScorer,
    batches: Iterable[EvaluationBatch],
    count: int,
    device: Device,
    earlier: Tensor | None = None,
) -> Tensor:
    """Return the loss in nats that `score` computes for each of the N = `count` tokens, in float32.

    The shape of the result is [N], or [S, N] if `score` scores the text by S settings at once. Every token is scored
    exactly once, without dropout, and without gradients unless `score` enables them. With several processes, each
    process scores a part of the rows of every batch, and all processes return the losses of all tokens. If `earlier`
    losses [N] are given, which a single process can do, the batches need not score all tokens.
    """
    was_training = model.training
    model.eval()
    distributed = device.distributed
    scored = torch.zeros((), dtype=torch.long, device=device.device)
    nats = torch.zeros(count + 1, device=device.device)  # the last place receives the tokens that are not scored
    if earlier is not None:
        nats[:-1] = earlier
    try:
        for batch in batches:
            places = np.where(batch.scored, batch.positions, count)
            own = [part[distributed.rank :: distributed.world_size] for part in (*batch[:2], places, batch.scored)]
            if not len(own[0]):
                break
            inputs, targets, to = (torch.from_numpy(part).to(device.device) for part in own[:3])
            with device.autocast():
                losses = score(inputs, targets)
            if losses.shape[:-2] != nats.shape[:-1]:  # the first batch, if `score` has several settings
                nats = nats.new_zeros(*losses.shape[:-2], count + 1)
            nats[..., to] = losses.float()
            scored += int(own[3].sum())
    finally:
        model.train(was_training)
    distributed.all_reduce_sum([nats])
    distributed.all_reduce_sum([scored])
    assert earlier is not None or int(scored) == count, "every token is scored exactly once"
    return nats[..., :-1]


def exp_or_infinity(value: float) -> float:
    """Return exp(value), or infinity if exp(value) is too large for a float."""
    return math.inf if value > 700 else math.exp(value)
