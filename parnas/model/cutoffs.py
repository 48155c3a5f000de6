"""Compute optimal cutoffs of the adaptive softmax from token counts alone, exactly.

Grave et al. 2017 (arXiv 1609.04309), section 4: words sorted by frequency are cut into a head, which every token
pays for, and tail clusters, each paid for only by the tokens that fall into it. The head has one more logit for each
tail cluster. Per token and in multiply-adds, with n_k words, probability p_k and width e_k of cluster k,

    cost = d_model (n_0 + clusters - 1)  +  sum over tails k of  p_k (d_model e_k + e_k n_k).

The best cost of the first i words in k + 1 clusters is a minimum over the place j of the last cut,

    best[k][i] = min over j < i of  best[k-1][j] + e_k (P[i] - P[j]) (d_model + i - j),

where P[i] is the probability of the first i words. The last term is mass times size of an interval (plus a part that
is linear in the mass). Cut an interval into three pieces of masses x, y, z >= 0 and sizes X, Y, Z: the whole and its
middle cost x Z + z X >= 0 more than the two overlapping parts, which is the Monge property. It makes the best j rise
with i, so that divide and conquer finds a whole row of `best` in O(V log V).

The cutoffs of least cost have a small head, so that many words are in the narrow tails, where the network predicts them
worse. `head_share` therefore sets a lower bound on each cut: the entries of `best` before the bound are infinite. A
minimum over fewer j keeps the Monge property.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parnas.errors import ParnasError

__all__ = ["HEAD_SHARE", "optimal_cutoffs"]

HEAD_SHARE = 0.75
"""Least share of the tokens in the head; least share of the remaining tokens in each further cluster but the last."""

_Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]


class Cutoffs(NamedTuple):
    """Cutoffs between the clusters, and the cost of the softmax with them."""

    cutoffs: tuple[int, ...]
    """For every cluster but the last, the number of words in it and all clusters before."""
    cost: float
    """Expected multiply-adds per token."""
    relative: float
    """The cost divided by the cost of the full softmax, d_model · V."""


def optimal_cutoffs(
    counts: ArrayLike, clusters: int, d_model: int, dims: Sequence[int], head_share: float = HEAD_SHARE
) -> Cutoffs:
    """Return the cutoffs of fewest multiply-adds among those whose head holds at least `head_share` of the tokens.

    Args:
        counts: Number of occurrences of each word, [V], in descending order.
        clusters: Number of clusters, the head included. No cluster of the result is empty.
        d_model: Width of the network.
        dims: Width of every cluster, the head's (`d_model`) first, as `ModelConfig.softmax_dims()` gives them.
        head_share: Least share of the tokens in the head, and of the remaining tokens in each further cluster but the
            last: the first k clusters together hold at least a share of 1 - (1 - head_share)^k. If the vocabulary is
            too small for this share, each later cluster holds one word. 0 sets no lower bound.

    Raises:
        ParnasError: The counts are not valid or not sorted, or `clusters` or `dims` does not fit the counts.
    """
    mass = _cumulative_mass(counts)
    words = len(mass) - 1
    _check_clusters(clusters, words, d_model, dims)

    best: _Floats = d_model * np.arange(clusters - 1, words + clusters, dtype=np.float64)
    best[0] = np.inf  # a head without words
    cuts = []
    for k in range(1, clusters):
        # 1. forbid cuts before which the first k clusters hold less than their share of the text
        least = np.searchsorted(mass, 1 - (1 - head_share) ** k)
        best[: min(int(least), words - (clusters - k))] = np.inf
        # 2. add cluster k after the first k clusters
        if k < clusters - 1:
            best, cut = _add_cluster(best, mass, d_model, dims[k])
            cuts.append(cut)
    # Of the last cluster only the cut for all words is needed.
    end, low, high = np.array([[words], [0], [words - 1]])
    cost, last = _cheapest_cut(best, mass, d_model, dims[-1], end, low, high)

    cutoffs = [int(last[0])]
    for cut in reversed(cuts):
        cutoffs.append(int(cut[cutoffs[-1]]))
    return Cutoffs(tuple(reversed(cutoffs)), float(cost[0]), float(cost[0]) / (d_model * words))


def _add_cluster(best: _Floats, mass: _Floats, d_model: int, width: int) -> tuple[_Floats, _Indices]:
    """Add one cluster: return the least cost of the first i words, and the last cut j with this cost, for each i.

    Item i of each array, [V + 1], is for the first i words: `best` is their least cost without the added cluster,
    `mass` their probability. `width` is the width of the added cluster, which holds the words from j to i.

    The algorithm is divide and conquer, one level at a time: a level solves the i midway between those already solved.
    The best j for such an i lies between the best j of the two i next to it, so that a level examines O(V) cuts.
    """
    words = len(best) - 1
    row = np.full(words + 1, np.inf)
    cut = np.zeros(words + 2, dtype=np.int64)
    cut[-1] = words  # a neighbour behind the last end, which bounds nothing
    stride = 1 << (words.bit_length() - 1)
    while stride:
        ends = np.arange(stride, words + 1, 2 * stride)
        low = cut[ends - stride]
        high = np.minimum(cut[np.minimum(ends + stride, words + 1)], ends - 1)
        row[ends], cut[ends] = _cheapest_cut(best, mass, d_model, width, ends, low, high)
        stride //= 2
    return row, cut[:-1]


def _cheapest_cut(
    best: _Floats, mass: _Floats, d_model: int, width: int, ends: _Indices, low: _Indices, high: _Indices
) -> tuple[_Floats, _Indices]:
    """Return for each i in `ends` the least cost of the first i words, and the start j of the last cluster.

    For each i the starts j from `low` to `high` are tried; of equally cheap ones the first is returned. `best` [V + 1]
    is the least cost of the first j words without the last cluster, `mass` [V + 1] the probability of the first j
    words, and `width` the width of the last cluster.
    """
    sizes = high - low + 1
    starts = np.cumsum(sizes) - sizes
    cuts = np.arange(sizes.sum()) + np.repeat(low - starts, sizes)  # low..high of every end, one after the other
    lengths = np.repeat(ends, sizes) - cuts
    costs = best[cuts] + width * (np.repeat(mass[ends], sizes) - mass[cuts]) * (d_model + lengths)
    least = np.minimum.reduceat(costs, starts)
    hits = np.flatnonzero(costs == np.repeat(least, sizes))  # of equally cheap cuts the first, as Monge's order needs
    return least, cuts[hits[np.searchsorted(hits, starts)]]


def _cumulative_mass(counts: ArrayLike) -> _Floats:
    """Return the probability of the first i words together for each i from 0 to V, [V + 1].

    Raises:
        ParnasError: the counts are not valid or not in descending order.
    """
    values = np.asarray(counts, dtype=np.float64)
    if values.ndim != 1 or not np.all(values >= 0) or not 0 < values.sum() < np.inf:
        raise ParnasError(
            "Cutoffs need a finite count of 0 or more for each word, at least one of them above 0; correct the counts."
        )
    if np.any(np.diff(values) > 0):
        word = int(np.argmax(np.diff(values) > 0)) + 1
        raise ParnasError(
            f"Word {word} occurs more often than word {word - 1}; sort the counts in descending order, and number the "
            "words in this order."
        )
    mass: _Floats = np.concatenate([[0.0], np.cumsum(values)]) / values.sum()
    return mass


def _check_clusters(clusters: int, words: int, d_model: int, dims: Sequence[int]) -> None:
    """Raise `ParnasError` if there are fewer words than clusters, or `dims` does not fit the clusters."""
    if not 2 <= clusters <= words:
        raise ParnasError(
            f"{words} word(s) cannot fill {clusters} clusters; give 2 to {words} clusters, the head included."
        )
    if len(dims) != clusters or dims[0] != d_model or min(dims) < 1:
        raise ParnasError(
            f"The widths {list(dims)} do not fit {clusters} clusters of a network of width {d_model}; give one "
            f"positive width for each cluster, first {d_model} for the head."
        )
