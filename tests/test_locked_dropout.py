"""Dropout that zeroes the same features at all positions of a row."""

import pytest
import torch
from model_helpers import assert_off_in_evaluation, assert_seed_fixes_training, make_network, random_ids
from plain import plain_operations

from parnas.model import fused


def test_evaluation_knows_nothing_of_it():
    assert_off_in_evaluation(dropout=0.4, locked_dropout=True)


def test_each_segment_has_masks_of_its_own_and_the_seed_fixes_them():
    assert_seed_fixes_training(dropout=0.4, locked_dropout=True)


@pytest.mark.parametrize("p", [0.2, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_features_are_zeroed_at_all_positions_of_a_row(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(151, 7, 201, dtype=dtype, requires_grad=True)
    dropped = fused.dropout(x, p, locked=True)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    first = dropped[:, 0]
    assert float((first != 0).float().mean()) == pytest.approx(1 - p, abs=0.02)
    assert first.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=0.005)
    for neighbours in (first[1:] * first[:-1], first[:, 1:] * first[:, :-1]):
        assert float((neighbours != 0).float().mean()) == pytest.approx((1 - p) ** 2, abs=0.02)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


def test_all_dropout_of_a_network_is_locked(monkeypatch):
    """Embeddings, distances, inner activations, outputs of layers and the last hidden states."""
    seen = []

    def record(x, p, locked=False):
        seen.append((x.shape, locked))
        return x

    monkeypatch.setattr(fused, "dropout", record)
    make_network("sf", dropout=0.1, locked_dropout=True).train()(random_ids(2, 5))
    assert seen == [((2, 5, 8), True), ((5, 8), True), ((2, 5, 8), True), ((2, 5, 12), True), *[((2, 5, 8), True)] * 2]


def test_the_textbook_form_has_the_same_law():
    torch.manual_seed(0)
    with plain_operations():
        dropped = fused.dropout(torch.ones(151, 7, 201), 0.3, locked=True)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert float(dropped.mean()) == pytest.approx(1, abs=0.02)
