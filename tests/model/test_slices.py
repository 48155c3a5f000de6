"""Candidates that are slices of larger ones: the same weights, the networks taken out, and the state of a SuperNet."""

import copy

import pytest
import torch
from helpers.model_helpers import VOCABULARY, model_config, near, random_ids, randomise
from helpers.supernet_helpers import one_hot
from torch import nn

from parnas.architecture import Architecture
from parnas.model.layers import make_layer
from parnas.model.slices import SlicedLinear
from parnas.model.supernet import SuperNet

SPACE = ("s", "s:heads=1", "s:window=3", "s:kv_heads=1", "f", "f:d_inner=5", "g", "g:d_inner=3", "k", "k:width=2", "i")
WITH_MEMORY = ("c", "c:heads=1", "i")
PARTS = ("s:heads=1", "s:kv_heads=1", "f:d_inner=5", "g:d_inner=3", "k:width=2")


def make(blocks=2, **changes):
    return randomise(SuperNet(model_config(**changes), SPACE, blocks, VOCABULARY, sharing="slices")).eval()


def test_a_sliced_map_has_rows_and_columns_of_the_other():
    whole = nn.Linear(5, 6)
    part, x = SlicedLinear(whole, [(0, 2), (3, 4)], [(1, 4)]), torch.randn(3, 3)
    expected = x @ whole.weight[[0, 1, 3]][:, 1:4].T + whole.bias[[0, 1, 3]]
    near(part(x), expected)
    assert (part.in_features, part.out_features) == (3, 3)
    assert not list(part.parameters())
    part(x).sum().backward()
    assert whole.bias.grad.tolist() == [3, 3, 0, 3, 0, 0]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", PARTS)
def test_a_network_taken_out_equals_the_path_and_has_plain_weights(name, norm):
    supernet, ids = make(norm=norm), random_ids(2, 7)
    arch = Architecture([name, "f"])
    network = supernet.extract(arch)
    gates = one_hot(arch, SPACE)
    near(network(ids).hidden, supernet(ids, gates=gates).hidden)
    assert all(
        isinstance(module, nn.Linear)
        for module in network.blocks[0].children()
        if hasattr(module, "weight") and module.weight.dim() == 2
    )
    fresh = make_layer(name, supernet.config)
    assert network.blocks[0].state_dict().keys() == fresh.state_dict().keys()


def test_the_first_heads_and_inner_features_are_those_of_the_larger_layer():
    candidates = make().blocks[0].candidates
    one, whole = candidates["s:heads=1"], candidates["s"]
    keys, values = whole.key_value.weight.chunk(2)
    near(one.key_value.weight, torch.cat([keys[:4], values[:4]]))
    near(one.output.weight, whole.output.weight[:, :4])
    near(candidates["f:d_inner=5"].inner.bias, candidates["f"].inner.bias[:5])
    grouped = candidates["s:kv_heads=1"]
    assert grouped.query is whole.query
    assert grouped.key_value.weight.shape == (8, 8)
    assert grouped.key_value is not whole.key_value
    gates, values = candidates["g"].inner.weight.chunk(2)
    near(candidates["g:d_inner=3"].inner.weight, torch.cat([gates[:3], values[:3]]))
    assert candidates["k:width=2"].inner is candidates["k"].inner
    assert candidates["k:width=2"].kernel is not candidates["k"].kernel
    assert candidates["s:window=3"].query is whole.query


def test_heads_share_keys_and_values_only_with_heads_grouped_alike():
    whole, alike, other = (
        make_layer(name, model_config(n_heads=4, d_head=4))
        for name in ("s:kv_heads=2", "s:heads=2,kv_heads=1", "s:heads=2")
    )
    alike.share_weights(whole)
    other.share_weights(whole)
    keys, values = whole.key_value.weight.chunk(2)
    near(alike.key_value.weight, torch.cat([keys[:4], values[:4]]))
    assert isinstance(other.key_value, nn.Linear)
    near(other.query.weight, whole.query.weight[:8])


@pytest.mark.parametrize("name", PARTS)
def test_a_step_of_the_part_trains_the_larger_layer(name):
    supernet, ids = make(1).train(), random_ids(2, 7)
    supernet.nll(ids, ids, gates=one_hot([name], SPACE))[0].mean().backward()
    larger = supernet.blocks[0].candidates[name[0]]
    outer = larger.output if name[0] == "s" else larger.outer
    touched = (outer.weight.grad.abs() > 0).any(dim=0)
    assert touched.any()
    assert touched.all() == (name in ("k:width=2", "s:kv_heads=1"))


def test_the_state_of_a_supernet_can_be_restored_and_copied():
    supernet, ids = make(), random_ids(2, 7)
    other = SuperNet(supernet.config, SPACE, 2, VOCABULARY, sharing="slices").eval()
    other.load_state_dict(supernet.state_dict())
    near(other(ids).hidden, supernet(ids).hidden)
    copied = copy.deepcopy(supernet)
    with torch.no_grad():
        supernet.blocks[0].candidates["f"].inner.weight.zero_()
    near(copied(ids).hidden, other(ids).hidden)
    plain = SuperNet(supernet.config, SPACE, 2, VOCABULARY)
    assert sum(p.numel() for p in plain.parameters()) > sum(p.numel() for p in supernet.parameters())


def test_compressive_attention_shares_heads_and_keeps_its_compression():
    config = model_config(memory={"cmem_len": 2, "ratio": 3})
    supernet = randomise(SuperNet(config, WITH_MEMORY, 2, VOCABULARY, sharing="slices")).eval()
    arch, ids = Architecture(["c:heads=1", "c"]), random_ids(2, 24)
    network, gates, memory, own = supernet.extract(arch), one_hot(arch, WITH_MEMORY), None, None
    for part in ids.split(6, dim=1):
        output, expected = supernet(part, memory, gates), network(part, own)
        memory, own = output.memory, expected.memory
        near(output.hidden, expected.hidden)
    near(supernet.blocks[0].candidates["c:heads=1"].query.weight, supernet.blocks[0].candidates["c"].query.weight[:4])
