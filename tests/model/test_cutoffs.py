"""Optimal cutoffs against a brute force that tries all of them."""

import itertools

import numpy as np
import pytest

from parnas.errors import ParnasError
from parnas.model.cutoffs import HEAD_SHARE, optimal_cutoffs


def slow_cost(counts, cutoffs, dims):
    """Multiply-adds per token of an adaptive softmax, cluster by cluster."""
    ends = [*cutoffs, len(counts)]
    cost = dims[0] * (cutoffs[0] + len(cutoffs))
    for start, end, width in zip(ends, ends[1:], dims[1:], strict=False):
        probability = sum(counts[start:end]) / sum(counts)
        cost += probability * (dims[0] * width + width * (end - start))
    return cost


def holds_enough(counts, cutoffs, head_share):
    """True where the first k clusters hold their share of the text, or leave one word to each later cluster."""
    words, clusters = len(counts), len(cutoffs) + 1
    return all(
        sum(counts[:cut]) / sum(counts) >= 1 - (1 - head_share) ** k or cut == words - (clusters - k)
        for k, cut in enumerate(cutoffs, 1)
    )


def slow_best(counts, dims, head_share):
    """The least cost over all rising cutoffs whose first clusters hold enough."""
    candidates = itertools.combinations(range(1, len(counts)), len(dims) - 1)
    return min(slow_cost(counts, cutoffs, dims) for cutoffs in candidates if holds_enough(counts, cutoffs, head_share))


def falling_counts(rng, words):
    """Sorted counts with many ties, and often with words that never occur."""
    counts = np.sort(rng.integers(0, rng.choice([2, 5, 1000]), words))[::-1].copy()
    counts[0] = max(counts[0], 1)
    return counts.tolist()


@pytest.mark.parametrize("head_share", [0, 0.5, HEAD_SHARE])
@pytest.mark.parametrize("clusters", [2, 3, 4, 5])
def test_equals_brute_force(clusters, head_share):
    rng = np.random.default_rng(clusters)
    for _ in range(60):
        counts = falling_counts(rng, int(rng.integers(clusters, 15)))
        # Widths need not fall: every order must be cut right.
        dims = [int(width) for width in rng.integers(1, 24, clusters)]
        optimal = optimal_cutoffs(counts, clusters, dims[0], dims, head_share)
        assert optimal.cost == pytest.approx(slow_best(counts, dims, head_share), rel=1e-12)
        assert holds_enough(counts, optimal.cutoffs, head_share)
        assert optimal.cost == pytest.approx(slow_cost(counts, optimal.cutoffs, dims), rel=1e-12)
        assert list(optimal.cutoffs) == sorted(set(optimal.cutoffs))
        assert 0 < optimal.cutoffs[0] <= optimal.cutoffs[-1] < len(counts)


def test_zipf_text_gets_cheaper_with_every_cluster_up_to_a_few():
    counts = np.floor(1e7 / np.arange(1, 20_001))
    results = [optimal_cutoffs(counts, k, 512, [512 // 4**i for i in range(k)], head_share=0) for k in (2, 3, 4)]
    costs = [result.cost for result in results]
    assert costs == sorted(costs, reverse=True)
    assert all(result.relative == pytest.approx(result.cost / (512 * 20_000)) for result in results)
    assert costs[0] < 0.2 * 512 * 20_000


def test_head_and_tails_hold_their_shares_of_a_large_vocabulary():
    counts = np.floor(1e7 / np.arange(1, 20_001))
    cutoffs = optimal_cutoffs(counts, 3, 512, [512, 128, 32]).cutoffs
    first, second = (counts[:cut].sum() / counts.sum() for cut in cutoffs)
    assert first >= 0.75
    assert second >= 1 - 0.0625
    # The share binds here: by multiply-adds alone the head would hold less, and the bound is met by the next word.
    assert optimal_cutoffs(counts, 3, 512, [512, 128, 32], head_share=0).cutoffs[0] < cutoffs[0]
    assert counts[: cutoffs[0] - 1].sum() / counts.sum() < 0.75


def test_no_move_of_a_cutoff_helps_on_a_large_vocabulary():
    counts = np.floor(1e7 / np.arange(1, 30_001))
    dims = [256, 64, 16, 4]
    optimal = optimal_cutoffs(counts, 4, 256, dims, head_share=0)
    for place, move in itertools.product(range(3), (-200, -10, -1, 1, 10, 200)):
        moved = list(optimal.cutoffs)
        moved[place] += move
        if 0 < moved[0] < moved[1] < moved[2]:
            assert slow_cost(counts, moved, dims) > optimal.cost * (1 - 1e-12)


def test_as_many_clusters_as_words_leaves_one_choice():
    assert optimal_cutoffs([5, 3, 0], 3, 4, [4, 2, 1]).cutoffs == (1, 2)


@pytest.mark.parametrize(
    "counts, clusters, dims, values",
    [
        ([3, 2, 1], 1, [8], "1 clusters"),
        ([3, 2, 1], 4, [8, 4, 2, 1], "2 to 3"),
        ([], 2, [8, 4], "count"),
        ([[3, 2], [1, 1]], 2, [8, 4], "count"),
        ([0, 0, 0], 2, [8, 4], "count"),
        ([3, 1, 2], 2, [8, 4], "Word 2 .* word 1"),
        ([3, 1, -2], 2, [8, 4], "count"),
        ([float("nan"), 1], 2, [8, 4], "count"),
        ([float("inf"), 1], 2, [8, 4], "count"),
        ([3, 2, 1], 2, [8, 4, 2], r"\[8, 4, 2\]"),
        ([3, 2, 1], 2, [9, 4], r"\[9, 4\]"),
    ],
)
def test_refuses_counts_and_widths_without_a_solution(counts, clusters, dims, values):
    with pytest.raises(ParnasError, match=values):
        optimal_cutoffs(counts, clusters, 8, dims)
