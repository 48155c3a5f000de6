"""Embedding and softmax against loops over single ids."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.model_helpers import VOCABULARY, make_network, model_config, random_ids, randomise

from parnas.errors import ParnasError
from parnas.model.heads import Embedding, SoftmaxHead
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped

CUTOFFS = (5, 9, 16)
KINDS = {
    "full, tied": {},
    "full, untied": {"tie_weights": False},
    "adaptive, tied": {"cutoffs": CUTOFFS},
    "adaptive, untied": {"cutoffs": CUTOFFS, "tie_weights": False},
    "proj_factor": {"cutoffs": CUTOFFS, "tie_weights": False, "proj_factor": 2},
    "proj_dims": {"cutoffs": CUTOFFS, "tie_weights": False, "proj_dims": (8, 3, 5)},
    "div_val, tied": {"cutoffs": CUTOFFS, "div_val": 2},
    "div_val, untied": {"cutoffs": CUTOFFS, "tie_weights": False, "div_val": 2},
    "div_val, proj_dims": {"cutoffs": CUTOFFS, "tie_weights": False, "div_val": 2, "proj_dims": (7, 6, 2)},
    "single ids in the tails": {"cutoffs": (17, 18, 19), "div_val": 2},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def config(request):
    return model_config(**request.param)


def make_pair(config, seed=0):
    """Embedding and head with random weights, in float64."""
    embedding = randomise(Embedding(config, VOCABULARY).double(), seed)
    return embedding, randomise(SoftmaxHead(config, VOCABULARY, embedding).double(), seed + 1)


def random_hidden(count, seed=0):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def place(config, token):
    """Cluster of an id, and its number within the cluster."""
    ends = [*config.cutoffs, VOCABULARY]
    cluster = next(number for number, end in enumerate(ends) if token < end)
    return cluster, token - (0, *config.cutoffs)[cluster]


def slow_log_prob(head, config, hidden, token):
    """log P(token) = log P(its cluster) + log P(token in the cluster); the head's own ids need the first part only."""

    def scores(cluster):
        table = head.tables[0] if len(head.tables) == 1 else head.tables[cluster]
        members = [other for other in range(VOCABULARY) if place(config, other)[0] == cluster]
        projection = dict(head.projections).get(str(cluster), torch.eye(8, dtype=hidden.dtype))
        narrow = sum(hidden[d] * projection[d] for d in range(8))
        rows = members if len(head.tables) == 1 else range(len(members))
        found = [table[row] @ narrow + bias for row, bias in zip(rows, head.biases[cluster], strict=True)]
        if cluster == 0:
            pairs = zip(head.cluster_weight, head.cluster_bias, strict=True)
            found += [weight @ narrow + bias for weight, bias in pairs]
        return torch.stack(found)

    cluster, number = place(config, token)
    if cluster == 0:
        return scores(0).log_softmax(0)[number]
    of_cluster = scores(0).log_softmax(0)[(*config.cutoffs, VOCABULARY)[0] + cluster - 1]
    return of_cluster + scores(cluster).log_softmax(0)[number]


def test_log_probs_equal_loops_and_sum_to_one(config):
    _, head = make_pair(config)
    hidden = random_hidden(3)
    with torch.no_grad():
        log_probs = head.log_probs(hidden)
        expected = [[slow_log_prob(head, config, row, token) for token in range(VOCABULARY)] for row in hidden]
    torch.testing.assert_close(log_probs, torch.tensor(expected).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", [range(VOCABULARY), [0] * 4, [19, 0, 6, 0, 5, 4]], ids=str)
def test_nll_is_minus_log_prob_of_the_target(config, targets):
    """Token 0 is a token like any other, and clusters without targets do no harm."""
    _, head = make_pair(config)
    hidden, targets = random_hidden(len(targets)).requires_grad_(), torch.tensor(list(targets))
    nll = head.nll(hidden, targets)
    expected = -head.log_probs(hidden).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(nll, expected, atol=1e-5, rtol=0)
    assert nll.min() > 0
    weights = [weight for weight in head.parameters() if weight.numel()]  # without tails, theirs are empty and unused
    slopes = [torch.autograd.grad(loss.sum(), [hidden, *weights]) for loss in (nll, expected)]
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (slopes[0][0].abs().sum(-1) > 0).all()


def test_loss_works_under_bfloat16_autocast(config):
    """torch.nn.AdaptiveLogSoftmaxWithLoss fails there."""
    embedding, head = (part.float() for part in make_pair(config))
    ids = random_ids(1, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll = head.nll(embedding(ids)[0], ids[0])
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, head.nll(embedding(ids)[0], ids[0]), atol=0.3, rtol=0.05)
    nll.sum().backward()
    weights = [weight for weight in (*embedding.parameters(), *head.parameters()) if weight.numel()]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in weights)


def test_embedding_equals_loops(config):
    embedding, _ = make_pair(config)
    ids = torch.cat([torch.arange(VOCABULARY), torch.tensor([0, 19, 5, 5])]).view(4, -1)
    vectors = embedding(ids)
    assert vectors.shape == (4, 6, 8)
    for token, vector in zip(ids.flatten().tolist(), vectors.flatten(0, 1), strict=True):
        if config.div_val == 1:
            expected = embedding.tables[0][token]
        else:
            cluster, number = place(config, token)
            expected = embedding.projections[cluster] @ embedding.tables[cluster][number]
        torch.testing.assert_close(vector, expected * math.sqrt(8))


@pytest.mark.parametrize("setting", ["proj_factor", "div_val"])
def test_clusters_narrow_by_the_factor(setting):
    config = model_config(cutoffs=CUTOFFS, tie_weights=False, **{setting: 2})
    embedding, head = make_pair(config)
    assert [tuple(table.shape) for table in head.tables] == [(5, 8), (4, 4), (7, 2), (4, 1)]
    narrow = [(5, 8), (4, 4), (7, 2), (4, 1)] if setting == "div_val" else [(VOCABULARY, 8)]
    assert [tuple(table.shape) for table in embedding.tables] == narrow


def test_tied_weights_are_one_storage(config):
    embedding, head = make_pair(config)
    shared = {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}
    if not config.tie_weights:
        assert not shared
        return
    first = {id(embedding.projections[0])} if config.div_val > 1 else set()
    assert shared == {id(p) for p in embedding.parameters()} - first
    before = head.nll(random_hidden(1), torch.tensor([0]))
    with torch.no_grad():
        embedding.tables[0][0] += 1
    assert not torch.equal(head.nll(random_hidden(1), torch.tensor([0])), before)


def test_projection_of_the_first_cluster_stays_untied():
    embedding, head = make_pair(model_config(cutoffs=CUTOFFS, div_val=2))
    assert [head.projections[str(c)] is embedding.projections[c] for c in range(4)] == [False, True, True, True]


def test_the_most_frequent_ids_are_the_cheap_ones():
    """Ids come sorted by frequency: the low ones stand in the head and need no second softmax."""
    config = model_config(cutoffs=CUTOFFS)
    _, head = make_pair(config)
    hidden, targets = random_hidden(VOCABULARY), torch.arange(VOCABULARY)
    before = head.nll(hidden, targets)
    with torch.no_grad():
        for bias in list(head.biases)[1:]:
            bias.copy_(torch.arange(len(bias)))
    assert (head.nll(hidden, targets) == before).tolist() == [True] * 5 + [False] * 15


def test_multiply_adds_of_the_head_are_those_of_its_matrix_products(config):
    """Every token pays for the head; a tail costs by its share of the text."""
    _, head = make_pair(config)
    counts = list(range(VOCABULARY, 0, -1))
    ends = [0, *config.cutoffs, VOCABULARY]
    expected = 0.0
    for cluster, (start, end) in enumerate(pairwise(ends)):
        share = sum(counts[start:end]) / sum(counts) if cluster else 1
        width = config.softmax_dims()[cluster]
        logits = end - start + (len(config.cutoffs) if cluster == 0 else 0)
        project = 8 * width if width != 8 or config.div_val > 1 else 0
        expected += share * (project + width * logits)
    assert head.multiply_adds(head.cluster_shares(counts)) == pytest.approx(expected)


@pytest.mark.parametrize("cutoffs", [(VOCABULARY,), (5, VOCABULARY + 4)])
def test_cutoffs_beyond_the_vocabulary_are_refused(cutoffs):
    config = model_config(cutoffs=cutoffs)
    with pytest.raises(ParnasError, match=rf"model\.cutoffs .* {cutoffs[-1]}, .* {VOCABULARY} "):
        make_pair(config)


def test_tokens_with_features_equal_a_table_of_sums():
    """In value and gradient; without gradients the sums are computed again only if the weights change."""
    network = make_network("sf", cutoffs=CUTOFFS, subword_features=12)
    plain = make_network("sf", cutoffs=CUTOFFS)
    own, shared = network.embedding.tables[0], network.embedding.shared
    features = network.embedding.features.long()
    sums = torch.stack([vector + sum(shared[n] for n in row) for vector, row in zip(own, features, strict=True)])
    weights = network.state_dict() | {"embedding.tables.0": sums.detach(), "head.tables.0": sums.detach()}
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    ids, targets = random_ids(2, 7), random_ids(2, 7, seed=1)
    losses = [each.nll(ids, targets)[0] for each in (network, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.sum().backward()
    of_sums = plain.embedding.tables[0].grad
    torch.testing.assert_close(own.grad, of_sums)
    expected = [of_sums[(features == n).nonzero()[:, 0]].sum(0) for n in range(12)]
    torch.testing.assert_close(shared.grad, torch.stack(expected), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert network.embedding.compose() is network.embedding.compose()
        torch.testing.assert_close(network.log_probs(network(ids)), plain.log_probs(plain(ids)))
        for part in (own, shared):
            before = network.embedding.compose()
            part.add_(1)
            assert not torch.equal(network.embedding.compose(), before)


def test_without_features_that_are_set_each_kind_has_one_vector():
    embedding = randomise(Embedding(model_config(subword_features=9), VOCABULARY))
    expected = embedding.tables[0] + embedding.shared[:7].sum(0)
    torch.testing.assert_close(embedding.compose(), expected)
    embedding.compose().sum().backward()
    assert embedding.shared.grad.tolist() == [[VOCABULARY] * 8] * 7 + [[0] * 8] * 2


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"subword_features": 7}, "give more than 7, or 0"),
        ({"subword_features": 8, "tie_weights": False}, "set tie_weights: true"),
        ({"subword_features": 8, "cutoffs": CUTOFFS, "div_val": 2}, "and div_val: 1"),
    ],
)
def test_features_need_one_tied_table(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        model_config(**settings)


def test_sums_are_computed_again_after_a_step_of_an_optimizer_that_raises_no_version():
    """The fused AdamW changes weights without a new `_version`; training and evaluation take turns."""
    network = make_network("f", subword_features=12).train()
    ids, optimizer = random_ids(2, 7), make_adamw(dict(network.named_parameters()), 0.1, 0.0)
    for _ in range(2):
        network.nll(ids, ids)[0].sum().backward()
        step_clipped(optimizer, gradient_norm(list(network.parameters())), 1.0)
        own, shared, features = network.embedding.tables[0], network.embedding.shared, network.embedding.features
        for training in (True, False):
            network.train(training)
            with torch.no_grad():
                torch.testing.assert_close(network.embedding.compose(), own + shared[features.long()].sum(1))
        network.train()
