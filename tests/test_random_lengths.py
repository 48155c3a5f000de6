"""Segments whose lengths are drawn for each epoch, against Python lists, and in trainings that are cut off."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import small_config
from data_helpers import distinct_tokens, read_epoch
from hypothesis import given
from hypothesis import strategies as st
from training_helpers import Phase, assert_resumes, without_times

from parnas.config import Config
from parnas.data.batching import Order, TrainingBatches, mean_len, random_lengths
from parnas.data.foreseen import zipf
from parnas.data.streams import StreamHeader
from parnas.errors import ParnasError
from parnas.nas.search import search
from parnas.run import METRICS, STREAMS
from parnas.training.plan import Machine, plan_phase
from parnas.training.ranks import Ranks
from parnas.training.reporter import Silent
from parnas.training.retrain import retrain

ORDER = Order(7, halved=0.2)


@given(
    rows=st.integers(1, 4),
    tgt_len=st.integers(1, 70),
    length=st.integers(300, 900),
    halved=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 3),
    rotated=st.booleans(),
)
def test_every_token_of_an_epoch_is_a_target_once(
    rows: int, tgt_len: int, length: int, halved: float, seed: int, epoch: int, rotated: bool
) -> None:
    batches = TrainingBatches(distinct_tokens(length), rows, tgt_len, order=Order(seed, rotated, halved))
    read = read_epoch(batches, epoch)
    assert [batch.starts_epoch for batch in read] == [True] + [False] * (batches.segments - 1)
    assert all(1 <= batch.inputs.shape[1] <= tgt_len for batch in read)
    inputs, targets = (np.hstack([getattr(batch, name) for batch in read]) for name in ("inputs", "targets"))
    assert (targets == inputs + 1).all()
    used = targets.size
    assert sorted(targets.flatten().tolist()) == list(range(101, 101 + used))
    assert 0 <= length - 1 - used < rows * tgt_len
    if not rotated:
        assert inputs.flatten().tolist() == list(range(100, 100 + used))


def test_lengths_are_as_often_as_asked_and_in_another_order_in_each_epoch() -> None:
    batches = TrainingBatches(distinct_tokens(400_001), 2, 64, order=ORDER)
    orders = [[batch.inputs.shape[1] for batch in read_epoch(batches, epoch)] for epoch in range(2)]
    assert orders[0] != orders[1]
    counts = Counter(orders[0])
    assert counts == Counter(orders[1])
    assert sorted(counts) == [24, 26, 28, 30, 32, 56, 58, 60, 62, 64]
    share = sum(count for length, count in counts.items() if length <= 32) / batches.segments
    assert share == pytest.approx(0.2, abs=0.002)
    expected = mean_len(Config().replace(data__tgt_len=64, data__random_tgt_len=0.2).data)
    assert expected == pytest.approx(0.8 * 60 + 0.2 * 28)
    assert np.mean(orders[0]) == pytest.approx(expected, rel=0.002)
    other = TrainingBatches(distinct_tokens(400_001), 2, 64, order=ORDER._replace(seed=8))
    assert [batch.inputs.shape[1] for batch in read_epoch(other, 0)[:20]] != orders[0][:20]


@pytest.mark.parametrize("tgt_len", [2, 7, 16, 31, 64, 100, 150])
def test_no_segment_is_shorter_by_more_than_an_eighth(tgt_len: int) -> None:
    possible, shares = random_lengths(tgt_len, 0.2)
    assert sum(shares) == pytest.approx(1)
    for base, lengths in ((tgt_len, possible[:5]), (tgt_len // 2, possible[5:])):
        assert (max(lengths), min(lengths)) == (base, base - tgt_len // 8)


def test_a_step_needs_no_state() -> None:
    one, other = (TrainingBatches(distinct_tokens(801), 2, 20, order=ORDER) for _ in range(2))
    expected = [one.batch(step).inputs.tolist() for step in range(90)]
    assert [other.batch(step).inputs.tolist() for step in reversed(range(90))] == expected[::-1]


def test_several_processes_cut_at_the_same_places() -> None:
    whole = TrainingBatches(distinct_tokens(801), 4, 20, order=ORDER)
    shares = [TrainingBatches(distinct_tokens(801), 4, 20, Ranks(rank, 2).share(4), ORDER) for rank in (0, 1)]
    for step in (0, 3, 45):
        inputs = [share.batch(step).inputs for share in shares]
        assert np.array_equal(np.vstack(inputs), whole.batch(step).inputs)


@pytest.mark.parametrize("phase", [search, retrain])
def test_a_run_cut_off_within_an_epoch_goes_on_as_if_it_had_not_been(
    phase: Phase, corpus: Path, tmp_path: Path
) -> None:
    drawn = {"data__random_tgt_len": 0.3, "data__batch_size": 16, "data__tgt_len": 48}
    config = small_config(corpus, model__arch="sc", model__memory__cmem_len=4, **drawn)
    whole = assert_resumes(phase, config, tmp_path, 18)
    assert StreamHeader.read(whole.folder / STREAMS).splits["train"].tokens / 16 / 38 < 18, "it is the first epoch"
    fixed = phase(config.replace(data__random_tgt_len=0.0), tmp_path / "fixed", Silent())
    assert without_times(whole.records(METRICS)) != without_times(fixed.records(METRICS))


def test_a_plan_counts_the_tokens_that_are_read() -> None:
    """Memory is that of the longest segment."""
    config = Config().replace(model__arch="f", data__batch_size=4, data__tgt_len=64, train__steps=24)
    plans = []
    for share in (0.0, 0.2):
        changed = config.replace(data__random_tgt_len=share)
        plans.append(plan_phase(changed, "retrain", zipf(50).tolist(), Machine(), None))
    fixed, drawn = plans
    assert fixed.tokens == 24 * 4 * 64
    assert drawn.tokens == 24 * round(4 * (0.8 * 60 + 0.2 * 28))
    assert drawn.bytes == fixed.bytes


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(ParnasError, match="batch_size"):
        TrainingBatches(distinct_tokens(0), 2, 20, order=ORDER)
