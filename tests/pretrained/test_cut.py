"""Cut layers: the most important heads and features of a trained layer, against masks of the whole layer."""

import pytest
import torch
from helpers.model_helpers import make_network, model_config, near, random_ids, randomise

from parnas.architecture import Architecture
from parnas.model.layers import make_layer
from parnas.model.transformer_xl import TransformerXL
from parnas.pretrained.cut import Importance, copy_cut, output_map


def channels_of(importance, wanted, width):
    """Return the channels of the groups of `width` channels with the largest sums of squares, by loops."""
    groups = len(importance) // width
    squares = {g: sum(float(importance[g * width + i]) ** 2 for i in range(width)) for g in range(groups)}
    best = sorted(sorted(squares, key=squares.__getitem__)[-wanted:])
    return [g * width + i for g in best for i in range(width)]


@pytest.mark.parametrize("shared", [True, False], ids=["shared biases", "own biases"])
@pytest.mark.parametrize(
    ("layer", "cut"),
    [("s", "s:heads=2"), ("s", "s:heads=1"), ("f", "f:d_inner=5"), ("g", "g:d_inner=3"), ("s", "s:window=20")],
)
def test_a_cut_layer_computes_what_the_layer_does_without_its_least_important_channels(layer, cut, shared):
    changes = {"n_heads": 4, "d_model": 16, "share_biases": shared}
    network, ids = make_network(layer, **changes), random_ids(2, 6)
    (block,) = network.blocks
    importance = torch.rand(output_map(block).in_features, generator=torch.Generator().manual_seed(3))
    smaller = randomise(TransformerXL.build(model_config(**changes), Architecture.parse(cut), 20), 1).eval()
    smaller.load_state_dict(
        {name: each for name, each in network.state_dict().items() if not name.startswith("blocks.")}
        | {name: each for name, each in smaller.state_dict().items() if name.startswith("blocks.")},
        strict=False,
    )
    assert copy_cut(block, smaller.blocks[0], importance, network.u, network.v)
    left = output_map(smaller.blocks[0]).in_features
    width = network.config.head_width if layer == "s" else 1
    kept = channels_of(importance, left // width, width)
    with torch.no_grad():
        mask = torch.zeros(output_map(block).in_features)
        mask[kept] = 1
        output_map(block).weight.mul_(mask)
        near(smaller(ids).hidden, network(ids).hidden)


def test_heads_of_keys_and_values_become_the_means_of_their_groups():
    config = model_config(n_heads=4, d_model=16)
    whole, grouped = (randomise(make_layer(name, config), seed) for seed, name in enumerate(("s", "s:kv_heads=2")))
    assert copy_cut(whole, grouped, None, None, None)
    keys = whole.key_value.weight.view(2, 4, 4, 16)
    near(grouped.key_value.weight.view(2, 2, 4, 16)[:, 1], (keys[:, 2] + keys[:, 3]) / 2)


def test_layers_of_another_kind_or_shape_stay_as_they_are():
    config = model_config(n_heads=4, d_model=16)
    larger = [("f:d_inner=4", "f"), ("s:heads=2", "s"), ("k", "k:width=2"), ("c", "c:heads=1")]
    for name, other in (("s", "f"), ("f", "k"), ("s", "s:d_head=2"), *larger):
        layer, cut = make_layer(name, config), make_layer(other, config)
        before = {name: each.clone() for name, each in cut.state_dict().items()}
        last = output_map(layer)
        assert not copy_cut(layer, cut, None if last is None else torch.ones(last.in_features), None, None)
        assert all(torch.equal(each, before[name]) for name, each in cut.state_dict().items())


@pytest.mark.parametrize("name", ["s:window=3", "k", "r", "g", "c", "f"])
def test_a_layer_of_the_same_shapes_is_copied_as_a_whole(name):
    config = model_config(n_heads=4, d_model=16, mem_len=8)
    layer, cut = (randomise(make_layer(name, config), seed) for seed in (1, 2))
    assert copy_cut(layer, cut, None, None, None)
    assert all(torch.equal(each, layer.state_dict()[key]) for key, each in cut.state_dict().items())


def test_importance_is_the_root_mean_square_of_an_input_times_the_norm_of_its_weights():
    linear = torch.nn.Linear(3, 2)
    texts = [torch.randn(2, 4, 3), torch.randn(1, 5, 3)]
    measured = Importance(linear)
    for text in texts:
        linear(text)
    measured.close()
    linear(10 * texts[0])  # no longer counts
    found = measured.scores()
    rows = [row for text in texts for row in text.flatten(0, 1).tolist()]
    for channel in range(3):
        square = sum(row[channel] ** 2 for row in rows) / len(rows)
        norm = sum(float(weight[channel]) ** 2 for weight in linear.weight.detach()) ** 0.5
        assert float(found[channel]) == pytest.approx(square**0.5 * norm, rel=1e-5)
