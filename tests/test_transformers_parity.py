"""The same weights give the same network as in `transformers` 4.35.2.

It comes with `pip install -e '.[parity]'`; in CI (CI=true) its absence is a failure, elsewhere a skip.
"""

import os
import warnings

import pytest
import torch
from model_helpers import VOCABULARY, make_network, random_ids, randomise

LAYERS, SEGMENT, CUTOFFS = 3, 5, (4, 9, 15)
HEADS = {
    "one cluster": {},
    "adaptive, tied": {"cutoffs": CUTOFFS},
    "adaptive, untied": {"cutoffs": CUTOFFS, "tie_weights": False},
    "div_val 4": {"cutoffs": CUTOFFS, "div_val": 4},
    "div_val 4, untied": {"cutoffs": CUTOFFS, "div_val": 4, "tie_weights": False},
}


@pytest.fixture(scope="module")
def transformers():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what torch has deprecated since
            import transformers
            from transformers import TransfoXLLMHeadModel  # noqa: F401
    except ImportError as error:
        cure = f"pip install -e '.[parity]' brings transformers 4.35.2 ({error})"
        if os.environ.get("CI"):
            pytest.fail(f"CI has to run this test: {cure}")
        pytest.skip(cure)
    assert transformers.__version__ == "4.35.2"
    return transformers


def make_theirs(transformers, config):
    """Their model of the same shape with random weights, in evaluation mode."""
    theirs = transformers.TransfoXLConfig(
        vocab_size=VOCABULARY,
        cutoffs=list(config.cutoffs),
        d_model=config.d_model,
        d_embed=config.d_model,
        n_head=config.n_heads,
        d_head=config.head_width,
        d_inner=config.d_inner,
        div_val=config.div_val,
        n_layer=LAYERS,
        mem_len=config.mem_len,
        untie_r=not config.share_biases,
        same_length=False,
        tie_word_embeddings=config.tie_weights,
        # The original leaves the projection of the first cluster untied.
        tie_projs=[False] + [config.tie_weights] * len(config.cutoffs),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its successor
        model = transformers.TransfoXLLMHeadModel(theirs)
    return randomise(model, std=0.15).eval()  # wide enough to matter, so narrow that 1e-5 is above rounding


def copy_attention(ours, theirs):
    inner = ours.query.out_features
    ours.query.weight.copy_(theirs.qkv_net.weight[:inner])
    ours.key_value.weight.copy_(theirs.qkv_net.weight[inner:])
    ours.position.weight.copy_(theirs.r_net.weight)
    ours.output.weight.copy_(theirs.o_net.weight)
    ours.layer_norm.load_state_dict(theirs.layer_norm.state_dict())
    if ours.u is not None:
        ours.u.copy_(theirs.r_w_bias)
        ours.v.copy_(theirs.r_r_bias)


def copy_feed_forward(ours, theirs):
    ours.inner.load_state_dict(theirs.CoreNet[0].state_dict())
    ours.outer.load_state_dict(theirs.CoreNet[3].state_dict())
    ours.layer_norm.load_state_dict(theirs.layer_norm.state_dict())


def copy_head(ours, theirs):
    """With div_val 1 theirs keeps one matrix and one bias for all clusters, ours a bias for each."""
    for cluster, bias in enumerate(ours.biases):
        start, stop = ours.bounds[cluster : cluster + 2]
        whole = len(theirs.out_layers) == 1
        bias.copy_(theirs.out_layers[0].bias[start:stop] if whole else theirs.out_layers[cluster].bias)
        if len(ours.tables) > 1:
            weight = theirs.out_layers[0].weight[start:stop] if whole else theirs.out_layers[cluster].weight
            ours.tables[cluster].copy_(weight)
        elif cluster == 0:
            ours.tables[0].copy_(theirs.out_layers[0].weight)
    if len(ours.biases) > 1:
        ours.cluster_weight.copy_(theirs.cluster_weight)
        ours.cluster_bias.copy_(theirs.cluster_bias)
    for cluster, projection in ours.projections.items():
        projection.copy_(theirs.out_projs[int(cluster)])


@torch.no_grad()
def copy_weights(ours, theirs):
    """Every weight of theirs into ours: their decoder layer is our attention block and our feed-forward block."""
    body = theirs.transformer
    for target, source in zip(ours.embedding.tables, body.word_emb.emb_layers, strict=True):
        target.copy_(source.weight)
    for target, source in zip(ours.embedding.projections, body.word_emb.emb_projs, strict=True):
        target.copy_(source)
    for number, layer in enumerate(body.layers):
        copy_attention(ours.blocks[2 * number], layer.dec_attn)
        copy_feed_forward(ours.blocks[2 * number + 1], layer.pos_ff)
    if ours.u is not None:
        ours.u.copy_(body.r_w_bias)
        ours.v.copy_(body.r_r_bias)
    copy_head(ours.head, theirs.crit)


@pytest.fixture(params=[True, False], ids=["shared u, v", "own u, v"])
def shared(request):
    return request.param


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def pair(request, transformers, shared):
    """Our network and theirs, with the same weights."""
    settings = {"d_model": 64, "n_heads": 4, "d_head": 10, "d_inner": 48, "mem_len": 8, "share_biases": shared}
    ours = make_network("sf" * LAYERS, seed=1, **settings, **request.param)
    theirs = make_theirs(transformers, ours.config)
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
        hidden, memory = ours(ids, memory)
        log_probs = ours.head.log_probs(hidden.flatten(0, 1)).view(2, SEGMENT, VOCABULARY)
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
