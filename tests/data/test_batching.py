"""Every batching against Python lists, token by token."""

import numpy as np
import pytest
from helpers.data_helpers import distinct_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from parnas.data.batching import Shuffle, TrainingBatches, evaluation_batches, split_share
from parnas.errors import ParnasError

EOS = 7


def joined(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


@given(length=st.integers(2, 400), rows=st.integers(1, 5), tgt_len=st.integers(1, 9))
def test_training_rows_read_on_where_they_left_off(length: int, rows: int, tgt_len: int) -> None:
    tokens = distinct_tokens(length)
    if length < rows * tgt_len + 1:
        with pytest.raises(ParnasError, match="batch_size"):
            TrainingBatches(tokens, rows, tgt_len)
        return
    batches = TrainingBatches(tokens, rows, tgt_len)
    read: list[list[int]] = [[] for _ in range(rows)]
    targets: list[list[int]] = [[] for _ in range(rows)]
    for step in range(batches.segments):
        batch = batches.batch(step)
        assert batch.inputs.shape == batch.targets.shape == (rows, tgt_len)
        assert batch.inputs.dtype == batch.targets.dtype == np.int64
        assert type(batch.inputs) is np.ndarray
        assert batch.starts_epoch == (step == 0)
        for row in range(rows):
            read[row] += batch.inputs[row].tolist()
            targets[row] += batch.targets[row].tolist()
    everything = tokens.tolist()
    used = len(joined(targets))
    assert joined(read) == everything[:used]
    assert joined(targets) == everything[1 : used + 1]
    assert 0 <= length - 1 - used < rows * tgt_len


def test_a_training_step_needs_no_state() -> None:
    batches = TrainingBatches(distinct_tokens(101), 2, 5)
    assert batches.segments == 10
    for step in (0, 3, 9):
        again = batches.batch(step + 30)
        assert again.inputs.tolist() == batches.batch(step).inputs.tolist()
        assert again.starts_epoch == (step == 0)


@settings(max_examples=300)
@given(length=st.integers(1, 300), rows=st.integers(1, 9), tgt_len=st.integers(1, 9), burn_in=st.integers(0, 12))
def test_evaluation_scores_every_token_once_after_its_own_past(
    length: int, rows: int, tgt_len: int, burn_in: int
) -> None:
    tokens = distinct_tokens(length)
    sequence = [EOS, *tokens.tolist()]
    scored: list[int] = []
    read = 0
    history: dict[int, list[int]] = {}
    for step, batch in enumerate(evaluation_batches(tokens, EOS, rows, tgt_len, burn_in)):
        assert batch.inputs.shape == batch.targets.shape == batch.scored.shape
        assert batch.inputs.shape[0] <= rows
        read += batch.inputs.size
        for row in range(len(batch.inputs)):
            history.setdefault(row, []).extend(batch.inputs[row].tolist())
            for column in np.flatnonzero(batch.scored[row]):
                target = int(batch.targets[row, column])
                scored.append(target)
                place = sequence.index(target)
                seen = history[row][: step * tgt_len + column + 1]
                assert sequence[place - len(seen) : place] == seen
                # Enough past for memory: all there is, or the whole burn-in.
                assert len(seen) == place or step >= burn_in
    assert sorted(scored) == tokens.tolist()
    assert read <= 1.5 * length + (rows + burn_in + 2) * tgt_len


def test_evaluation_uses_the_rows_it_is_given_where_burn_in_is_small() -> None:
    # 625 segments, of which row 0 scores 6 during burn-in; 620 are 20 for each of 31 rows, and the 32nd would idle.
    batches = list(evaluation_batches(distinct_tokens(20_000), EOS, 32, 32, 6))
    assert batches[0].inputs.shape == (31, 32)
    assert len(batches) == 6 + 20


def test_evaluation_rows_are_cut_at_the_segments_of_batch_1() -> None:
    alone = [batch.inputs[0].tolist() for batch in evaluation_batches(distinct_tokens(200), EOS, 1, 4, 2)]
    for batch in evaluation_batches(distinct_tokens(200), EOS, 5, 4, 2):
        for row in batch.inputs[batch.scored.all(axis=1)].tolist():
            assert row in alone


def test_evaluation_of_nothing_is_refused() -> None:
    with pytest.raises(ParnasError):
        next(evaluation_batches(distinct_tokens(0), EOS, 1, 4, 0))


@pytest.mark.parametrize("share, left", [(0.0, 100), (0.25, 75), (0.5, 50)])
def test_split_share_cuts_off_the_end(share: float, left: int) -> None:
    weights, alpha = split_share(distinct_tokens(100), share)
    assert weights.tolist() == list(range(100, 100 + left))
    assert alpha.tolist() == list(range(100 + left, 200))


@pytest.mark.parametrize("partial", [False, True])
def test_batches_after_earlier_ones_are_the_later_ones(partial: bool) -> None:
    shuffle = Shuffle(3, partial)
    whole = TrainingBatches(np.arange(61), 2, 5, shuffle=shuffle)
    later = TrainingBatches(np.arange(61), 2, 5, shuffle=shuffle, first=4)
    for step in range(2 * whole.segments):  # across the ends of epochs
        for one, other in zip(later.batch(step), whole.batch(step + 4), strict=True):
            np.testing.assert_array_equal(one, other)
