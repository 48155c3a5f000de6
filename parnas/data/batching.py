"""Batches of a token stream for training or evaluation: N tokens are read in B rows, in segments of T tokens."""

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
"""Largest number of segments that an evaluation reads twice to fill memory, as a share of the text's segments."""


class Batch(NamedTuple):
    """The token ids of a training step."""

    inputs: Int64s  # [B, T]
    targets: Int64s  # [B, T]
    starts_epoch: bool  # then memory of earlier batches is not used


class Shuffle(NamedTuple):
    """Partial shuffling (Press 2019, arXiv 1903.04167): in each epoch, each row begins at another position.

    A row that reaches its last token continues at its first. The positions depend on the seed and the epoch alone.
    """

    seed: int = 0
    partial: bool = False  # false: rows begin at their first token

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the shuffling that the settings `data.shuffle` and `runtime.seed` select."""
        return cls(config.runtime.seed, config.data.shuffle == "partial")

    def offsets(self, epoch: int, rows: int, tokens: int) -> Int64s:
        """Return the positions [rows] at which the rows begin in an epoch; a row has `tokens` tokens."""
        return np.random.default_rng([self.seed, epoch]).integers(tokens, size=rows)


class EvaluationBatch(NamedTuple):
    """The data of an evaluation step, [B, T] each."""

    inputs: Int64s  # token ids
    targets: Int64s  # token ids
    scored: NDArray[np.bool_]  # whether the target counts; false for burn-in and after the end of the text
    positions: Int64s  # positions of the targets in the text


class TrainingBatches:
    """Contiguous batches: within an epoch, row b of a batch continues row b of the batch before.

    Each row has `segments` = (N - 1) // (B T) segments of T tokens; row b + 1 follows row b in the stream. Targets are
    the inputs shifted by one token, across the ends of segments and rows. So in an epoch every token is a target once,
    except the first token of the stream and fewer than B T tokens at its end.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        tgt_len: int,
        rows: slice | None = None,
        shuffle: Shuffle | None = None,
        source: str = "training text",
        first: int = 0,
    ) -> None:
        """Divide a stream into rows.

        Args:
            tokens: The stream [N], memory-mapped or not.
            batch_size: Number of rows B.
            tgt_len: Length of a segment T.
            rows: The rows that this process reads in a distributed training; by default all.
            shuffle: Positions at which rows begin in each epoch; by default their first tokens.
            source: Name of the stream for the error message.
            first: Number of batches before the first one that is read.

        Raises:
            ParnasError: N does not fill one segment in every row.
        """
        self._shuffle, self._first = shuffle or Shuffle(), first
        self.segments = (len(tokens) - 1) // (batch_size * tgt_len)
        if self.segments < 1:
            raise ParnasError(
                f"The {source} has {len(tokens):,} tokens, but {batch_size} rows of {tgt_len} tokens need "
                f"{batch_size * tgt_len + 1:,}. Give more text, or lower data.batch_size or data.tgt_len."
            )
        self._batch_size, self._tgt_len, used = batch_size, tgt_len, batch_size * tgt_len * self.segments
        self._own = slice(None) if rows is None else rows
        self._inputs = np.asarray(tokens[:used]).reshape(batch_size, -1)[self._own]
        self._targets = np.asarray(tokens[1 : used + 1]).reshape(batch_size, -1)[self._own]

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step; steps count from 0 over all epochs."""
        epoch, segment = divmod(self._first + step, self.segments)
        index = self._index(epoch, segment * self._tgt_len, (segment + 1) * self._tgt_len)
        return Batch(self._inputs[index].astype(np.int64), self._targets[index].astype(np.int64), segment == 0)

    def _index(self, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        """Return the index (rows, columns) of the tokens that an epoch reads as columns `start` to `stop`."""
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

    The scores equal those of batch size 1. The segments are the same for any B, and after `burn_in` segments
    (`TransformerXL.burn_in`) the scores of a row no longer depend on where the row began: an attention layer's memory
    holds `mem_len` outputs of the layer below, each of which depends on `mem_len` positions of the layer below it.
    Rows begin at multiples of `alignment` tokens, for networks that compress positions in groups.

    If burn-in would exceed a share `_MAX_BURN_IN` of the segments, there are fewer rows than `batch_size`. Positions
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
    """Split a training stream [N] into the tokens that train the weights and the held-out last `share` (0 to 1)."""
    cut = len(tokens) - round(len(tokens) * share)
    return tokens[:cut], tokens[cut:]


def _share_out(segments: int, batch_size: int, burn_in: int, multiple: int) -> tuple[int, int]:
    """Return the number of rows, and how many segments (divisible by `multiple`) each row after row 0 scores."""
    rows = 1 + min(batch_size - 1, int(_MAX_BURN_IN * segments) // burn_in if burn_in else segments - 1)
    per_row = max(1, -(-(segments - burn_in) // (rows * multiple))) * multiple
    # Rounding up may leave the last rows without a segment to score.
    return max(1, -(-(segments - burn_in) // per_row)), per_row


def _take(tokens: Tokens, positions: Int64s) -> Int64s:
    """Return the tokens at `positions`; a position outside the stream gives the first or last token of the stream."""
    return np.asarray(tokens[np.clip(positions, 0, len(tokens) - 1)], np.int64)
