"""The Transformer-XL of `transformers` 4.35.2 in the shapes of a parnas network, and its weights in one.

The parity tests and the benchmarks share this. `pip install -e '.[parity]'` brings the library.
"""

import warnings
from typing import Any

import torch
from torch import nn

from parnas.config.schema import ModelConfig
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL

VERSION = "4.35.2"  # the last that has the model and takes today's Python; later ones dropped it


def load_transformers() -> Any:
    """Return the library; raises `ParnasError` if it is missing or of another version."""
    cure = f"pip install -e '.[parity]' brings transformers {VERSION}, for Python up to 3.13"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what torch has deprecated since
            import transformers
            from transformers import TransfoXLLMHeadModel  # noqa: F401
    except ImportError as error:
        raise ParnasError(f"{cure} ({error}).") from error
    if transformers.__version__ != VERSION:
        raise ParnasError(f"{cure}; {transformers.__version__} is installed.")
    return transformers


def make_transfo_xl(config: ModelConfig, layers: int, vocab_size: int, **changes: Any) -> nn.Module:
    """Return a TransfoXLLMHeadModel with the shapes of a parnas network `(sf)*layers`, without dropout.

    `changes` replace settings of its configuration.
    """
    transformers = load_transformers()
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "cutoffs": list(config.cutoffs),
        "d_model": config.d_model,
        "d_embed": config.d_model,
        "n_head": config.n_heads,
        "d_head": config.head_width,
        "d_inner": config.d_inner,
        "div_val": config.div_val,
        "n_layer": layers,
        "mem_len": config.mem_len,
        "dropout": 0.0,
        "dropatt": 0.0,
        "untie_r": not config.share_biases,
        "same_length": config.same_length,
        "clamp_len": config.clamp_len or -1,
        "tie_word_embeddings": config.tie_weights,
        # The original leaves the projection of the first cluster untied.
        "tie_projs": [False] + [config.tie_weights] * len(config.cutoffs),
    }
    theirs = transformers.TransfoXLConfig(**settings | changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its successor
        model: nn.Module = transformers.TransfoXLLMHeadModel(theirs)
    return model


@torch.no_grad()
def copy_weights(ours: TransformerXL, theirs: Any) -> None:
    """Every weight of theirs into ours: their decoder layer is our attention block and our feed-forward block."""
    body = theirs.transformer
    for target, source in zip(ours.embedding.tables, body.word_emb.emb_layers, strict=True):
        target.copy_(source.weight)
    for target, source in zip(ours.embedding.projections, body.word_emb.emb_projs, strict=True):
        target.copy_(source)
    for number, layer in enumerate(body.layers):
        _copy_attention(ours.blocks[2 * number], layer.dec_attn)
        _copy_feed_forward(ours.blocks[2 * number + 1], layer.pos_ff)
    if ours.u is not None:
        ours.u.copy_(body.r_w_bias)
        ours.v.copy_(body.r_r_bias)
    _copy_head(ours.head, theirs.crit)


def _copy_attention(ours: Any, theirs: Any) -> None:
    inner = ours.query.out_features
    ours.query.weight.copy_(theirs.qkv_net.weight[:inner])
    ours.key_value.weight.copy_(theirs.qkv_net.weight[inner:])
    ours.position.weight.copy_(theirs.r_net.weight)
    ours.output.weight.copy_(theirs.o_net.weight)
    ours.layer_norm.load_state_dict(theirs.layer_norm.state_dict())
    if ours.u is not None:
        ours.u.copy_(theirs.r_w_bias)
        ours.v.copy_(theirs.r_r_bias)


def _copy_feed_forward(ours: Any, theirs: Any) -> None:
    ours.inner.load_state_dict(theirs.CoreNet[0].state_dict())
    ours.outer.load_state_dict(theirs.CoreNet[3].state_dict())
    ours.layer_norm.load_state_dict(theirs.layer_norm.state_dict())


def _copy_head(ours: Any, theirs: Any) -> None:
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
