"""The same weights give the same network as in `transformers` 4.35.2.

It comes with `pip install -e '.[parity]'`; in CI (CI=true) its absence is a failure, elsewhere a skip.
"""

import pytest
import torch
from helpers.model_helpers import VOCABULARY, make_network, random_ids, randomise, require_parity
from reference import copy_weights, make_transfo_xl

LAYERS, SEGMENT, CUTOFFS = 3, 5, (4, 9, 15)
HEADS = {
    "one cluster": {},
    "adaptive, tied": {"cutoffs": CUTOFFS},
    "adaptive, untied": {"cutoffs": CUTOFFS, "tie_weights": False},
    "div_val 4": {"cutoffs": CUTOFFS, "div_val": 4},
    "div_val 4, untied": {"cutoffs": CUTOFFS, "div_val": 4, "tie_weights": False},
}


_installed = pytest.fixture(scope="module", autouse=True)(require_parity)


@pytest.fixture(params=[True, False], ids=["shared u, v", "own u, v"])
def shared(request):
    return request.param


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def pair(request, shared):
    """Our network and theirs, with the same weights."""
    settings = {"d_model": 64, "n_heads": 4, "d_head": 10, "d_inner": 48, "mem_len": 8, "share_biases": shared}
    reach = {"same_length": True, "clamp_len": 5} if "div_val" in request.param else {}
    ours = make_network("sf" * LAYERS, seed=1, **settings, **request.param, **reach)
    theirs = make_transfo_xl(ours.config, LAYERS, VOCABULARY)
    # Wide enough to matter, so narrow that 1e-5 is above rounding.
    theirs = randomise(theirs, std=0.15).eval()
    copy_weights(ours, theirs)
    return ours, theirs


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def test_log_probs_and_memories_are_theirs_over_three_segments(pair):
    ours, theirs = pair
    # Without mems theirs would attend to zeros; empty ones make its memory start empty.
    memory, mems = None, [torch.zeros(0, 2, 64) for _ in range(LAYERS)]
    for ids in random_ids(2, 3 * SEGMENT).split(SEGMENT, dim=1):
        found = ours(ids, memory)
        memory = found.memory
        log_probs = ours.head.log_probs(found.hidden.flatten(0, 1)).view(2, SEGMENT, VOCABULARY)
        output = theirs(ids, mems=mems)
        mems = output.mems
        torch.testing.assert_close(log_probs, output.prediction_scores, atol=1e-5, rtol=0)
        assert memory[1::2] == (None,) * LAYERS
        for kept, expected in zip(memory[::2], mems, strict=True):
            torch.testing.assert_close(kept, expected.transpose(0, 1), atol=1e-5, rtol=0)
    assert memory[0].shape == (2, 8, 64)


@torch.no_grad()
def test_loss_is_theirs(pair):
    """Their loss covers all positions but the last, whose target they do not know."""
    ours, theirs = pair
    ids = random_ids(2, 6)
    nll, _ = ours.nll(ids[:, :-1], ids[:, 1:])
    output = theirs(ids, labels=ids.clone(), mems=[torch.zeros(0, 2, 64) for _ in range(LAYERS)])
    # Theirs come cluster by cluster, not place by place.
    torch.testing.assert_close(nll.flatten().sort().values, output.losses.flatten().sort().values, atol=1e-5, rtol=0)


def test_parameters_are_as_many_as_theirs(pair):
    ours, theirs = pair
    assert count(ours) == count(theirs)
