"""Batches of a token stream: N tokens in B rows of segments of T tokens, for training or evaluation."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parnas.config.loader import Config
from parnas.data.streams import Tokens
from parnas.errors import ParnasError

__all__ = ["Batch", "EvaluationBatch", "Shuffle", "TrainingBatches", "evaluation_batches", "split_share"]

Int64s = NDArray[np.int64]

_MAX_BURN_IN = 0.5
"""Largest number of burn-in segments of an evaluation, as a share of the segments of the text."""


class Batch(NamedTuple):
    """The data of a training step, [B, T] each; the first batch of an epoch is read without memory."""

    inputs: Int64s
    targets: Int64s
    starts_epoch: bool


class Shuffle(NamedTuple):
    """Partial shuffling (Press 2019, arXiv 1903.04167): each epoch reads each row from another position.

    After its end, a row continues at its beginning. The positions depend on the seed and the epoch alone.
    """

    seed: int = 0
    partial: bool = False

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the shuffling that `data.shuffle` selects."""
        return cls(config.runtime.seed, config.data.shuffle == "partial")

    def offsets(self, epoch: int, rows: int, tokens: int) -> Int64s:
        """Return the position in each row, of `tokens` tokens, at which the epoch begins, [rows]."""
        return np.random.default_rng([self.seed, epoch]).integers(tokens, size=rows)


class EvaluationBatch(NamedTuple):
    """The data of an evaluation step: also which targets to score, and their positions in the text; [B, T] each."""

    inputs: Int64s
    targets: Int64s
    scored: NDArray[np.bool_]
    positions: Int64s


class TrainingBatches:
    """Contiguous batches: within an epoch, row b of a batch continues row b of the batch before.

    Each row has `segments` = (N - 1) // (B T) segments of T tokens; row b + 1 follows row b in the stream. Targets are
    the inputs shifted by one token, across the ends of segments and rows. So in an epoch every token is a target once,
    except the first of the stream and fewer than B T at its end.
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
        """Divide a stream into rows.

        Args:
            tokens: The stream [N], memory-mapped or not.
            batch_size: Number of rows B.
            tgt_len: Length of a segment T.
            rows: The rows that this process reads in a distributed training.
            shuffle: Where rows begin; by default at their first token.
            source: Name of the stream in the error message.

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
        """Return the batch of a training step, counted from 0 over all epochs; it depends on `step` alone."""
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

    The token `first` precedes the stream, so that the first token of the stream has a context too. The stream has
    S = ceil(N / T) segments, aligned to multiples of T, and each row scores R = ceil((S - burn_in) / B) of them: row b
    reads segments b R to b R + R + burn_in. All rows start with empty memory. Row 0 scores all its segments. The other
    rows fill their memory on their first `burn_in` segments, which the row before scores.

    The scores equal those of batch size 1: the segments are the same for any B, and after `burn_in` = (attention
    layers) * ceil(mem_len / T) segments, a row no longer depends on where it began, because a layer's memory holds
    `mem_len` outputs of the layer below, which themselves reach back over as many positions. Rows begin at multiples
    of `alignment` tokens, for networks that compress positions in groups.

    Burn-in is limited to a share of the text (`_MAX_BURN_IN`), by fewer rows than `batch_size` if needed. Positions
    after the end of the stream hold token 0 and are not scored.

    Raises:
        ParnasError: The stream is empty.
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
    """Split a training stream [N] into the tokens for the weights and the held-out rest, its last `share` (0 to 1)."""
    cut = len(tokens) - round(len(tokens) * share)
    return tokens[:cut], tokens[cut:]


def _share_out(segments: int, batch_size: int, burn_in: int, multiple: int) -> tuple[int, int]:
    """Return the number of rows, and of the segments that each row but row 0 scores, a multiple of `multiple`."""
    rows = 1 + min(batch_size - 1, int(_MAX_BURN_IN * segments) // burn_in if burn_in else segments - 1)
    per_row = max(1, -(-(segments - burn_in) // (rows * multiple))) * multiple
    # Rounding up may leave the last rows without a segment to score.
    return max(1, -(-(segments - burn_in) // per_row)), per_row


def _take(tokens: Tokens, positions: Int64s) -> Int64s:
    """Return the tokens at these positions, which are clipped to the stream."""
    return np.asarray(tokens[np.clip(positions, 0, len(tokens) - 1)], np.int64)
