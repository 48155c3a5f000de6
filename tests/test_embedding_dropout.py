"""Dropout of whole words of the vocabulary, where they are input."""

import pytest
import torch
from model_helpers import (
    VOCABULARY,
    assert_off_in_evaluation,
    assert_seed_fixes_training,
    make_network,
    model_config,
    random_ids,
    randomise,
)

from parnas.model.heads import Embedding

TABLES = {"one table": {}, "a table for each cluster": {"cutoffs": (5, 9), "div_val": 2}}


def test_evaluation_knows_nothing_of_it():
    assert_off_in_evaluation(embedding_dropout=0.4)


def test_each_segment_has_words_of_its_own_and_the_seed_fixes_them():
    assert_seed_fixes_training(embedding_dropout=0.4)


@pytest.mark.parametrize("changes", TABLES.values(), ids=TABLES)
def test_a_word_is_left_out_everywhere_or_nowhere(changes):
    p, ids, left_out = 0.3, random_ids(6, 30), 0
    configs = (model_config(**changes, embedding_dropout=each) for each in (p, 0.0))
    embedding, plain = (randomise(Embedding(config, VOCABULARY)) for config in configs)
    torch.manual_seed(0)
    for _ in range(200):
        shares = (embedding(ids) / plain(ids)).detach()
        torch.testing.assert_close(shares, shares[..., :1].expand_as(shares))
        of_words = [shares[ids == word, 0].unique().tolist() for word in range(VOCABULARY)]
        assert all(len(found) == 1 for found in of_words)
        assert {round(found[0], 4) for found in of_words} <= {0, round(1 / (1 - p), 4)}
        left_out += sum(not found[0] for found in of_words)
    assert left_out / 200 / VOCABULARY == pytest.approx(p, abs=0.03)


@pytest.mark.parametrize("changes", TABLES.values(), ids=TABLES)
def test_words_that_are_left_out_learn_nothing_as_input(changes):
    embedding, ids = Embedding(model_config(**changes, embedding_dropout=0.5), VOCABULARY), random_ids(1, VOCABULARY)
    randomise(embedding)
    torch.manual_seed(1)
    vectors = embedding(ids)
    vectors.sum().backward()
    kept = {int(word) for word, vector in zip(ids[0], vectors[0], strict=True) if vector.any()}
    assert 0 < len(kept) < len(set(ids[0].tolist()))
    learnt = {
        start + row
        for start, table in zip(embedding.bounds, embedding.tables, strict=False)
        for row in table.grad.any(dim=1).nonzero().flatten().tolist()
    }
    assert learnt == kept


def test_the_softmax_sees_all_words_even_where_weights_are_shared():
    network = make_network("f", embedding_dropout=0.9).train()
    hidden, targets = torch.randn(1, VOCABULARY, 8), torch.arange(VOCABULARY)[None]
    found = network.score(hidden, targets)
    assert torch.equal(found, network.eval().score(hidden, targets))
