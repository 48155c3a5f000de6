"""Spaces, gates and noise for the tests of the SuperNet."""

import torch
from torch.nn import functional as F

from parnas.model.estimators import ESTIMATORS

SPACE = ("s", "f", "i")
VARIANTS = {
    "shared, tied": {},
    "pre-norm": {"norm": "pre"},
    "own biases, untied": {"share_biases": False, "tie_weights": False},
    "div_val": {"cutoffs": (5, 9), "div_val": 2},
}


def one_hot(arch, space=SPACE):
    """Return gates [blocks, candidates] that choose the layers of an architecture."""
    return F.one_hot(torch.tensor([space.index(layer) for layer in arch]), len(space)).float()


def draw_gates(estimator, alpha, tau, noise=None):
    return ESTIMATORS[estimator](len(alpha), SPACE).sample_gates(alpha, tau, noise)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)
