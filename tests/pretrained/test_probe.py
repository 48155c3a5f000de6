"""The probe: layers that are left out or replaced, against whole networks that are run from the start."""

import math

import numpy as np
import pytest
import torch
from helpers.model_helpers import make_network, near, random_ids, read_in_segments

from parnas.architecture import Architecture
from parnas.model.transformer_xl import ModelOutput
from parnas.pretrained.parent import ParnasParent, cheaper_layers
from parnas.pretrained.probe import compare, measure_networks, probe, rows_of

TGT_LEN = 4


def make_parent(arch="sfks", **changes):
    network = make_network(arch, **{"n_heads": 4, "d_model": 16, "cutoffs": (7,), **changes})
    return ParnasParent(network, Architecture.parse(arch), TGT_LEN), random_ids(2, 3 * TGT_LEN + 1, seed=5)


def slow_change(network, other, ids):
    """Return the rise of the loss and the KL divergence of `other` from `network`, token by token.

    The divergence is that of the head, and of the tail of the target if that is rare.
    """
    states = [read_in_segments(each, ids[:, :-1], TGT_LEN)[0].flatten(0, 1) for each in (network, other)]
    distributions = [
        each.head.log_probs(hidden).tolist() for each, hidden in zip((network, other), states, strict=True)
    ]
    loss = kl = 0.0
    targets, bounds = ids[:, 1:].flatten().tolist(), network.head.bounds
    for row, (before, after, target) in enumerate(zip(*distributions, targets, strict=True)):
        loss += before[target] - after[target]
        for cluster in [0, *(c for c in range(1, len(bounds) - 1) if bounds[c] <= target < bounds[c + 1])]:
            logits = [network.head.cluster_logits(each[row : row + 1], cluster)[0].tolist() for each in states]
            totals = [math.log(sum(map(math.exp, each))) for each in logits]
            for p, q in zip(*logits, strict=True):
                kl += math.exp(p - totals[0]) * (p - totals[0] - q + totals[1])
    return loss / len(targets), kl / len(targets)


@pytest.mark.parametrize("changes", [{}, {"norm": "pre"}, {"mem_len": 0}])
def test_layers_run_one_by_one_are_the_network(changes):
    parent, ids = make_parent("s k r f s:window=3", **changes)
    near(parent.hidden(parent.embed(ids)), read_in_segments(parent.network, ids, TGT_LEN)[0])


def test_a_layer_that_is_left_out_costs_what_the_network_without_it_loses():
    parent, ids = make_parent()
    result = probe(parent, ids, lambda _: None)
    for number in range(4):
        left = ["i" if place == number else name for place, name in enumerate(parent.layers)]
        other = parent.network.extract(Architecture(left))
        expected = slow_change(parent.network, other, ids)
        assert tuple(result.changes[number]["i"]) == pytest.approx(expected, abs=1e-5)
        assert tuple(measure_networks(parent, ids, [left])[0]) == pytest.approx(expected, abs=1e-5)
    assert result.tokens == 24
    hidden, _ = read_in_segments(parent.network, ids[:, :-1], TGT_LEN)
    loss = parent.network.score(ModelOutput(hidden, (), None), ids[:, 1:]).detach().mean()
    assert result.loss == pytest.approx(float(loss), abs=1e-5)


def test_a_replaced_layer_changes_the_memory_of_the_layers_after_it_alone():
    parent, ids = make_parent("sfsf")
    result = probe(parent, ids, lambda _: None)
    for number, names in enumerate(parent.alternatives):
        for name in names:
            replaced = [name if place == number else own for place, own in enumerate(parent.layers)]
            (whole,) = measure_networks(parent, ids, [replaced])
            assert tuple(result.changes[number][name]) == pytest.approx(tuple(whole), abs=1e-6)
    assert set(result.changes[0]) == {"s:heads=2", "s:heads=1", "s:window=2", "i"}
    assert set(result.changes[1]) == {"i"}, "a half of the inner features would be fewer than 8"


def test_pairs_are_left_out_together_and_compared_with_the_sum_of_both():
    parent, ids = make_parent()
    result = probe(parent, ids, lambda _: None, pairs=3)
    assert len({(pair.first, pair.second) for pair in result.pairs}) == 3
    for pair in result.pairs:
        left = ["i" if place in (pair.first, pair.second) else name for place, name in enumerate(parent.layers)]
        (whole,) = measure_networks(parent, ids, [left])
        assert tuple(pair.both) == pytest.approx(tuple(whole), abs=1e-6)
        for key in ("loss", "kl"):
            added = sum(getattr(result.changes[number]["i"], key) for number in (pair.first, pair.second))
            assert getattr(pair.predicted, key) == pytest.approx(added)


def test_a_model_without_changes_loses_nothing():
    parent, ids = make_parent()
    assert tuple(measure_networks(parent, ids, [parent.layers])[0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("s", ("s:heads=2", "s:heads=1", "s:window=3", "i")),
        ("s:heads=2", ("s:heads=1", "s:heads=2,window=3", "i")),
        ("s:window=3", ("s:heads=2,window=3", "s:heads=1,window=3", "i")),
        ("f", ("f:d_inner=24", "f:d_inner=12", "i")),
        ("k", ("i",)),
        ("r", ("i",)),
    ],
)
def test_cheaper_layers_are_parts_of_the_layer(name, expected):
    network = make_network("s", n_heads=4, d_model=16, d_inner=48, mem_len=8)
    assert cheaper_layers(name, network.config, 4) == expected


@pytest.mark.parametrize(
    ("length", "rows", "shape"), [(41, 4, (4, 9)), (41, 3, (3, 13)), (9, 4, (2, 5)), (6, 4, (1, 5)), (4, 4, (1, 4))]
)
def test_rows_of_a_text_follow_one_another(length, rows, shape):
    found = rows_of(np.arange(length), rows, TGT_LEN)
    assert found.shape == shape
    near(found[:, 0], torch.arange(shape[0]) * (shape[1] - 1))
    assert all(torch.equal(row, torch.arange(row[0], row[0] + shape[1])) for row in found)


@pytest.mark.parametrize(
    ("mem_len", "shape"), [(0, (4, 9)), (4, (4, 9)), (5, (2, 21)), (8, (2, 21)), (9, (1, 41)), (99, (1, 41))]
)
def test_rows_are_long_enough_for_a_full_memory(mem_len, shape):
    assert rows_of(np.arange(41), 4, TGT_LEN, mem_len).shape == shape


def test_small_changes_are_not_lost_to_the_rounding_of_bf16():
    parent, ids = make_parent()
    targets, reference = ids[:, 1:], parent.hidden(parent.embed(ids[:, :-1])).detach()
    changed = reference + 0.003 * torch.randn(reference.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        (exact,) = compare(parent, [changed], reference, targets)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (rounded,) = compare(parent, [changed], reference, targets)
    assert rounded.kl == pytest.approx(exact.kl, rel=0.05)
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
