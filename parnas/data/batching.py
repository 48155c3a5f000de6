"""Batches of segments: a stream of N tokens in B rows of segments of T tokens, for training or evaluation."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parnas.config.loader import Config
from parnas.data.streams import Tokens
from parnas.errors import ParnasError

Int64s = NDArray[np.int64]

_MAX_BURN_IN = 0.5
"""Largest number of burn-in segments of an evaluation, as a share of the segments of the text."""


class Batch(NamedTuple):
    """One training step: inputs [B, T], targets [B, T]; the first one of an epoch is read without memory."""

    inputs: Int64s
    targets: Int64s
    starts_epoch: bool


class Shuffle(NamedTuple):
    """Partial shuffling (Press 2019, arXiv 1903.04167): rows that begin at other positions in each epoch.

    A row continues at its beginning after its end. The positions depend on the seed and the epoch alone.
    """

    seed: int = 0
    partial: bool = False

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the shuffling of `data.shuffle`."""
        return cls(config.runtime.seed, config.data.shuffle == "partial")

    def offsets(self, epoch: int, rows: int, tokens: int) -> Int64s:
        """Return the position in its `tokens` at which each row begins, [rows]."""
        return np.random.default_rng([self.seed, epoch]).integers(tokens, size=rows)


class EvaluationBatch(NamedTuple):
    """One step of an evaluation: inputs, targets, a mask of those to score, and positions in the text; [B, T] each."""

    inputs: Int64s
    targets: Int64s
    scored: NDArray[np.bool_]
    positions: Int64s


class TrainingBatches:
    """Contiguous batches: within an epoch, row b of a batch continues row b of the batch before.

    Of N tokens, each row gets `segments` = (N - 1) // (B T) segments of T; row b + 1 follows row b in the stream.
    Targets are the inputs shifted by one token, across the ends of segments and rows. So in an epoch every token is a
    target once, except the first of the stream and fewer than B T at its end.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        tgt_len: int,
        rows: slice | None = None,
        shuffle: Shuffle | None = None,
        source: str = "training text",
    ) -> None:
        """Lay out `tokens` [N], memory-mapped or not.

        Args:
            tokens: The stream.
            batch_size: Number of rows B.
            tgt_len: Length of a segment T.
            rows: The rows that this process reads, where other processes read the others.
            shuffle: Beginnings of the rows; without it, rows begin at their first token.
            source: Name of the stream in the message of an error.

        Raises:
            ParnasError: N does not fill one segment in every row.
        """
        self._shuffle = shuffle or Shuffle()
        self.segments = (len(tokens) - 1) // (batch_size * tgt_len)
        if self.segments < 1:
            raise ParnasError(
                f"The {source} has {len(tokens):,} tokens, but {batch_size} rows of {tgt_len} need "
                f"{batch_size * tgt_len + 1:,}. Give more text, or lower data.batch_size or data.tgt_len."
            )
        self._batch_size, self._tgt_len, used = batch_size, tgt_len, batch_size * tgt_len * self.segments
        self._own = slice(None) if rows is None else rows
        self._inputs = np.asarray(tokens[:used]).reshape(batch_size, -1)[self._own]
        self._targets = np.asarray(tokens[1 : used + 1]).reshape(batch_size, -1)[self._own]

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step, counted from 0 through all epochs; it depends on `step` alone."""
        epoch, segment = divmod(step, self.segments)
        index = self._index(epoch, segment * self._tgt_len, (segment + 1) * self._tgt_len)
        return Batch(self._inputs[index].astype(np.int64), self._targets[index].astype(np.int64), segment == 0)

    def _index(self, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        """Return the index, by rows and columns, of the tokens that an epoch reads from `start` to `stop`."""
        if not self._shuffle.partial:
            return slice(None), slice(start, stop)
        rows, length = self._inputs.shape
        offsets = self._shuffle.offsets(epoch, self._batch_size, length)[self._own]
        return np.arange(rows)[:, None], (offsets[:, None] + np.arange(start, stop)) % length


def evaluation_batches(
    tokens: Tokens, first: int, batch_size: int, tgt_len: int, burn_in: int, alignment: int = 1
) -> Iterator[EvaluationBatch]:
    """Yield batches that score each of N tokens exactly once, given the tokens before it as far as memory reaches.

    The stream is preceded by the token `first`, so that its own first token has a context too. It has S = ceil(N / T)
    segments, aligned to multiples of T, of which each row scores R = ceil((S - burn_in) / B): row b reads segments b R
    to b R + R + burn_in. All rows start with empty memory at the same time. Row 0 scores all that it reads; the others
    fill their memory on their first `burn_in` segments, which the row before them scores.

    A layer's memory holds outputs of the layer below for `mem_len` positions, made from memories of the same reach. So
    after `burn_in` = (attention layers) * ceil(mem_len / T) segments nothing that a row computes depends on its
    beginning; and as the segments are the same for any B, the scores equal those of batch 1. Rows begin at multiples of
    `alignment` tokens, for networks that compress positions in groups.

    Fewer rows than `batch_size` are used where burn-in would exceed `_MAX_BURN_IN`. Positions past the end of the
    stream hold token 0 and are not scored. An empty stream is a `ParnasError`.
    """
    if not len(tokens):
        raise ParnasError("The split to evaluate has no tokens; give it some text.")
    segments = -(-len(tokens) // tgt_len)
    rows, segments_per_row = _share_out(segments, batch_size, burn_in, alignment // math.gcd(alignment, tgt_len))
    starts = np.arange(rows) * segments_per_row
    burning = starts > 0
    for step in range(min(segments, segments_per_row + burn_in)):
        # positions of this step's targets [B, T]; the input is the token before
        positions = ((starts + step) * tgt_len)[:, None] + np.arange(tgt_len)
        inside = positions < len(tokens)
        inputs, targets = _take(tokens, positions - 1), _take(tokens, positions)
        inputs[positions == 0] = first
        inputs[~inside] = targets[~inside] = 0
        yield EvaluationBatch(inputs, targets, inside & ~(burning & (step < burn_in))[:, None], positions)


def split_share(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """Split a training stream into the tokens for the weights and its last `share` (0 to 1), the arch split."""
    cut = len(tokens) - round(len(tokens) * share)
    return tokens[:cut], tokens[cut:]


def _share_out(segments: int, batch_size: int, burn_in: int, multiple: int) -> tuple[int, int]:
    """Return the number of rows and of segments that each row after row 0 scores, a multiple of `multiple`."""
    rows = 1 + min(batch_size - 1, int(_MAX_BURN_IN * segments) // burn_in if burn_in else segments - 1)
    per_row = max(1, -(-(segments - burn_in) // (rows * multiple))) * multiple
    # Rounding up may leave the last rows without a segment of their own.
    return max(1, -(-(segments - burn_in) // per_row)), per_row


def _take(tokens: Tokens, positions: Int64s) -> Int64s:
    """Return the tokens at these positions, with those outside the stream clipped to its ends."""
    return np.asarray(tokens[np.clip(positions, 0, len(tokens) - 1)], np.int64)
