"""Batches of segments: how a stream of N tokens is laid out in B rows of segments of T tokens, to train or to score."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parnas.config import Config
from parnas.data.streams import Tokens
from parnas.errors import ParnasError

Int64s = NDArray[np.int64]

READ_TWICE = 0.5
"""Rows of an evaluation are so few that burn-in adds at most this share to what is read."""


class Batch(NamedTuple):
    """One training step: inputs [B, T], targets [B, T], and whether the rows begin anew, without memory."""

    inputs: Int64s
    targets: Int64s
    starts_epoch: bool


class Order(NamedTuple):
    """What differs from epoch to epoch in how a text is read, by a seed and the epoch alone."""

    seed: int = 0
    rotated: bool = False  # each row begins at a place of its own, and goes on at its beginning after its end

    @classmethod
    def of(cls, config: Config) -> Self:
        """What a configuration says."""
        return cls(config.runtime.seed, config.data.shuffle == "partial")

    def offsets(self, epoch: int, rows: int, tokens: int) -> Int64s:
        """Where in its `tokens` each of so many rows begins (Press 2019, arXiv 1903.04167), [rows]."""
        return np.random.default_rng([self.seed, epoch]).integers(tokens, size=rows)


class EvaluationBatch(NamedTuple):
    """One step of an evaluation: inputs, targets, which of them to score, and their places in the text; [B, T] each."""

    inputs: Int64s
    targets: Int64s
    scored: NDArray[np.bool_]
    places: Int64s


class TrainingBatches:
    """Contiguous batching: row b of every batch reads on where row b of the batch before left off, in an epoch.

    Of N tokens, each row gets `segments` = (N - 1) // (B T) segments of T, the rows following each other in the
    stream. Targets are the inputs one token on, across the ends of segments and rows alike. So in an epoch every
    token is a target once, except the first of the stream and fewer than B T at its end.

    tokens: [N], memory-mapped or not. `rows` of the batch alone, where others are read elsewhere. Raises `ParnasError`
    where N does not fill one segment in every row.
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, tgt_len: int, rows: slice | None = None, order: Order | None = None
    ) -> None:
        self._order = order or Order()
        self.segments = (len(tokens) - 1) // (batch_size * tgt_len)
        if self.segments < 1:
            raise ParnasError(
                f"The text, or what search.alpha_split leaves of it, has {len(tokens):,} tokens, too few for "
                f"data.batch_size {batch_size} rows of "
                f"data.tgt_len {tgt_len}, which need {batch_size * tgt_len + 1:,}. Lower one of them."
            )
        self._batch_size, self._tgt_len, used = batch_size, tgt_len, batch_size * tgt_len * self.segments
        self._own = slice(None) if rows is None else rows
        self._inputs = np.asarray(tokens[:used]).reshape(batch_size, -1)[self._own]
        self._targets = np.asarray(tokens[1 : used + 1]).reshape(batch_size, -1)[self._own]

    def batch(self, step: int) -> Batch:
        """The batch of a training step, counted from 0 through all epochs; depends on nothing but `step`."""
        epoch, segment = divmod(step, self.segments)
        places = self._places(epoch, segment * self._tgt_len, (segment + 1) * self._tgt_len)
        return Batch(self._inputs[places].astype(np.int64), self._targets[places].astype(np.int64), segment == 0)

    def _places(self, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        """Rows and columns of what all rows read in an epoch from `start` to `stop`."""
        if not self._order.rotated:
            return slice(None), slice(start, stop)
        rows, length = self._inputs.shape
        offsets = self._order.offsets(epoch, self._batch_size, length)[self._own]
        return np.arange(rows)[:, None], (offsets[:, None] + np.arange(start, stop)) % length


def evaluation_batches(
    tokens: Tokens, first: int, batch_size: int, tgt_len: int, burn_in: int, alignment: int = 1
) -> Iterator[EvaluationBatch]:
    """Batches that score each of N tokens exactly once, given all tokens before it as far as memory reaches.

    The stream is preceded by the token `first`, so that its own first token has a context too. It has
    S = ceil(N / T) segments, aligned to multiples of T, and R = ceil((S - burn_in) / B) of them are each row's: row b
    reads segments b R to b R + R + burn_in. All rows start with empty memory and go in step. Row 0 scores all that it
    reads; the others only warm up their memory on their first `burn_in` segments, which the row before scores.

    A layer's memory holds outputs of the layer below for `mem_len` positions, made from memories that reach as far
    again. So after `burn_in` = (attention layers) * ceil(mem_len / T) segments nothing that a row computes depends on
    where it began, and as the segments are the same for any B, the scores equal those of batch 1. Rows begin at
    multiples of `alignment` tokens, for networks that take so many together.

    Fewer rows than `batch_size` are used where burn-in would add more than `READ_TWICE` to what is read. Positions
    past the end of the stream hold token 0 and are not scored. Raises `ParnasError` for an empty stream.
    """
    if not len(tokens):
        raise ParnasError("The split to evaluate has no tokens; give it some text.")
    segments = -(-len(tokens) // tgt_len)
    rows, segments_per_row = _share_out(segments, batch_size, burn_in, alignment // math.gcd(alignment, tgt_len))
    starts = np.arange(rows) * segments_per_row
    burning = starts > 0
    for step in range(min(segments, segments_per_row + burn_in)):
        # Of this step's targets [B, T]; the input is the token before.
        places = ((starts + step) * tgt_len)[:, None] + np.arange(tgt_len)
        inside = places < len(tokens)
        inputs, targets = _take(tokens, places - 1), _take(tokens, places)
        inputs[places == 0] = first
        inputs[~inside] = targets[~inside] = 0
        yield EvaluationBatch(inputs, targets, inside & ~(burning & (step < burn_in))[:, None], places)


def split_share(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """A training stream without its last `share` (0 to 1), and that share: for the weights and for alpha."""
    cut = len(tokens) - round(len(tokens) * share)
    return tokens[:cut], tokens[cut:]


def _share_out(segments: int, batch_size: int, burn_in: int, multiple: int) -> tuple[int, int]:
    """Number of rows, and of segments that each row after row 0 scores, a multiple of `multiple`."""
    rows = 1 + min(batch_size - 1, int(READ_TWICE * segments) // burn_in if burn_in else segments - 1)
    per_row = max(1, -(-(segments - burn_in) // (rows * multiple))) * multiple
    # Rounding up may leave the last rows without a segment of their own.
    return max(1, -(-(segments - burn_in) // per_row)), per_row


def _take(tokens: Tokens, positions: Int64s) -> Int64s:
    return np.asarray(tokens[np.clip(positions, 0, len(tokens) - 1)], np.int64)
