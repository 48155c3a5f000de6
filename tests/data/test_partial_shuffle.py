"""Partial shuffling against Python lists, and in trainings that are interrupted."""

from pathlib import Path

import numpy as np
import pytest
from conftest import small_config
from helpers.data_helpers import distinct_tokens, english, read_rows, write_corpus
from helpers.training_helpers import Phase, assert_resumes, without_times
from hypothesis import given
from hypothesis import strategies as st

from parnas.data.batching import Shuffle, TrainingBatches
from parnas.data.streams import StreamHeader
from parnas.nas.search import search
from parnas.runs.run import STREAMS
from parnas.training.distributed import DistributedContext
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


@given(
    rows=st.integers(1, 5),
    tgt_len=st.integers(1, 9),
    segments=st.integers(1, 9),
    rest=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 9),
)
def test_each_row_is_rotated_by_itself_and_every_token_is_a_target_once(
    rows: int, tgt_len: int, segments: int, rest: int, seed: int, epoch: int
) -> None:
    tokens = distinct_tokens(rows * tgt_len * segments + 1 + rest % (rows * tgt_len))
    plain = read_rows(TrainingBatches(tokens, rows, tgt_len), epoch)
    read = read_rows(TrainingBatches(tokens, rows, tgt_len, shuffle=Shuffle(seed, partial=True)), epoch)
    assert (read[1] == read[0] + 1).all()  # after its end a row predicts what follows there, not its beginning
    for one, other in zip(read[1].tolist(), plain[1].tolist(), strict=True):
        place = other.index(one[0])
        assert one == other[place:] + other[:place]


def test_places_differ_between_rows_epochs_and_seeds() -> None:
    batches = [TrainingBatches(distinct_tokens(8001), 4, 5, shuffle=Shuffle(seed, partial=True)) for seed in (1, 2)]
    firsts = {
        int(first) - 2000 * row
        for each in batches
        for epoch in range(3)
        for row, first in enumerate(each.batch(epoch * each.segments).inputs[:, 0])
    }
    assert len(firsts) == 2 * 3 * 4


def test_a_step_needs_no_state() -> None:
    one, other = (TrainingBatches(distinct_tokens(401), 2, 5, shuffle=Shuffle(7, partial=True)) for _ in range(2))
    expected = [one.batch(step).inputs.tolist() for step in range(90)]
    assert [other.batch(step).inputs.tolist() for step in reversed(range(90))] == expected[::-1]


def test_several_processes_read_the_rows_of_one() -> None:
    whole = TrainingBatches(distinct_tokens(401), 4, 5, shuffle=Shuffle(7, partial=True))
    shares = [
        TrainingBatches(
            distinct_tokens(401), 4, 5, DistributedContext(rank, 2).local_slice(4), Shuffle(7, partial=True)
        )
        for rank in (0, 1)
    ]
    for step in (0, 3, 25):
        parts = [share.batch(step) for share in shares]
        assert np.array_equal(np.vstack([part.inputs for part in parts]), whole.batch(step).inputs)
        assert np.array_equal(np.vstack([part.targets for part in parts]), whole.batch(step).targets)


@pytest.mark.parametrize("phase", [search, retrain])
def test_a_run_stopped_after_its_first_epoch_resumes_identically(phase: Phase, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", english(40), english(5), english(5))
    config = small_config(corpus, model__arch="sf", data__shuffle="partial")
    whole = assert_resumes(phase, config, tmp_path, 18)
    assert StreamHeader.read(whole.folder / STREAMS).splits["train"].tokens / 4 / 8 < 18, "the first epoch has ended"
    other = phase(config.replace(data__shuffle="none"), tmp_path / "other", Silent())
    assert without_times(whole.metrics()) != without_times(other.metrics())
