"""Label smoothing: its gradients against loops over classes, and losses that do not show it."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import VOCABULARY, make_network, model_config, random_ids, randomise
from helpers.training_helpers import final_weights
from plain import plain_operations

from parnas.model import fused
from parnas.model.heads import Embedding, SoftmaxHead
from parnas.nas.search import search
from parnas.training.planning.memory_estimate import Step
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

SHARE = 0.3
HEADS = {
    "full": {},
    "adaptive": {"cutoffs": (5, 9)},
    "adaptive, narrow": {"cutoffs": (5, 9), "proj_factor": 2, "tie_weights": False},
    "single ids in the tails": {"cutoffs": (17, 18, 19), "div_val": 2},
}


def smooth_loss(head: SoftmaxHead, hidden: torch.Tensor, target: int) -> torch.Tensor:
    """(1 - e) times -log p of the target, e times the mean of all -log p, in each softmax that leads to the target."""
    bounds = list(pairwise(head.bounds))
    log_probs = head.log_probs(hidden[None])[0]
    of_clusters = [log_probs[start:stop].logsumexp(0) for start, stop in bounds]
    cluster = next(number for number, (_, stop) in enumerate(bounds) if target < stop)
    in_head = torch.stack([*log_probs[: head.bounds[1]], *of_clusters[1:]])
    chosen = target if cluster == 0 else head.bounds[1] + cluster - 1
    loss = -(1 - SHARE) * in_head[chosen] - SHARE * in_head.mean()
    if cluster == 0:
        return loss
    start, stop = bounds[cluster]
    within = log_probs[start:stop] - of_clusters[cluster]
    return loss - (1 - SHARE) * within[target - start] - SHARE * within.mean()


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_gradients_are_those_of_loops_and_the_loss_is_the_plain_one(changes):
    config = model_config(**changes)
    head = randomise(SoftmaxHead(config, VOCABULARY, Embedding(config, VOCABULARY)).double())
    head.label_smoothing = SHARE
    hidden = torch.randn(VOCABULARY, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden.requires_grad_()
    targets = torch.arange(VOCABULARY)
    nll = head.nll(hidden, targets)
    torch.testing.assert_close(nll, head.eval().nll(hidden, targets), rtol=0, atol=0)
    slow = torch.stack([smooth_loss(head, row, target) for target, row in enumerate(hidden)])
    weights = [hidden, *(weight for weight in head.parameters() if weight.numel())]
    found, expected = (torch.autograd.grad(loss.sum(), weights) for loss in (nll, slow))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_the_textbooks(precision):
    network, ids = make_network("sf", cutoffs=(5, 9)).train(), random_ids(4, 6)
    network.head.label_smoothing = SHARE

    def gradients():
        network.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            nll, _ = network.nll(ids, ids.flip(1))
        nll.mean().backward()
        return [nll.detach(), *(weight.grad for weight in network.parameters())]

    found = gradients()
    with plain_operations():
        expected = gradients()
    for one, other in zip(found, expected, strict=True):
        atol = 1e-5 if precision == "fp32" else 0.03 * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=atol)


def test_the_least_loss_is_the_wanted_distribution():
    """There the gradient vanishes: 1 - e and a share of e for the target, a share of e for each other class."""
    wanted = torch.full((10,), SHARE / 10)
    wanted[3] += 1 - SHARE
    bias = wanted.log().requires_grad_()
    fused.linear_cross_entropy(torch.zeros(1, 2), torch.zeros(10, 2), bias, torch.tensor([3]), SHARE).sum().backward()
    torch.testing.assert_close(bias.grad, torch.zeros(10), rtol=0, atol=1e-6)


def test_no_memory_is_taken_for_it():
    sizes = []
    for share in (0.0, SHARE):
        network = make_network("f", cutoffs=(5, 9)).train()
        network.head.label_smoothing = share
        sizes.append(Step(network, 3, 5, "fp32").count())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("phase", [search, retrain])
def test_both_phases_train_with_it_and_log_the_plain_loss(phase, corpus: Path, tmp_path: Path):
    config = small_config(
        corpus,
        model__arch="sf",
        model__dropout=0.0,
        train__log_every=1,
        train__steps=3,
        search__steps=8,
        search__alpha_start_step=2,
    )
    plain = phase(config, tmp_path / "plain", Silent())
    smooth = phase(config.replace(train__label_smoothing=SHARE), tmp_path / "smooth", Silent())
    losses = [[line.loss for line in run.metrics() if line.split == "train"] for run in (plain, smooth)]
    assert losses[0][0] == losses[1][0], "the first step's weights are the same"
    assert losses[0][1] != losses[1][1]
    weights = [final_weights(run)["head.biases.0"] for run in (plain, smooth)]
    assert not torch.equal(*weights)
