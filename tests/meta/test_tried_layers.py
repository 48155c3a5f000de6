"""What each changed network of benchmarks/tried_layers.py computes."""

import pytest
import torch
import tried_layers
from helpers.model_helpers import VOCABULARY, make_network, model_config, near, random_ids
from torch import nn
from torch.nn import functional as F

from parnas.architecture import Architecture
from parnas.model import fused
from parnas.model.layers import FeedForward
from parnas.model.transformer_xl import TransformerXL

TRIED = tried_layers.CHANGED_NETWORKS


def zero(network: nn.Module, *names: str) -> None:
    """Set the parameters whose names end so to zero."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(names):
                parameter.zero_()


ADDED = {"smear": ("smear.weight", "smear.bias"), "bigrams": ("bigrams.weight",), "half_skips": ("skip_bias",)}


@pytest.mark.parametrize("name", ADDED)
def test_without_its_weights_it_is_the_plain_network(name: str) -> None:
    ids, plain = random_ids(2, 6), make_network("sfsf")
    with TRIED[name]():
        network = make_network("sfsf")
        changed = network(ids).hidden
        zero(network, *ADDED[name])
        without = network(ids).hidden
    plain.load_state_dict(network.state_dict(), strict=False)
    near(without, plain(ids).hidden)
    assert not torch.allclose(changed, without, atol=1e-3)


def test_squared_relu_is_its_formula() -> None:
    network, x = make_network("f"), torch.randn(2, 3, 8)
    layer = network.blocks[0]
    assert isinstance(layer, FeedForward)
    with TRIED["squared_relu"]():
        near(layer.transform(x, None, None), layer.outer(F.relu(layer.inner(x)) ** 2))


def test_with_qk_norm_the_size_of_keys_does_not_matter() -> None:
    torch.manual_seed(0)
    query, keys, position = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 2, 4), torch.randn(3, 2, 4)
    biases = torch.zeros(2, 4), torch.zeros(2, 4)
    larger = keys * torch.tensor([3.0, 1.0])[:, None, None]  # keys, not values
    plain, changed = (fused.relative_attention(query, each, position, *biases, 0.0).values for each in (keys, larger))
    assert not torch.allclose(plain, changed)
    with TRIED["qk_norm"]():
        one, other = (fused.relative_attention(query, each, position, *biases, 0.0).values for each in (keys, larger))
    near(one, other)


def test_logits_stay_below_the_cap() -> None:
    hidden, weight, bias, targets = torch.randn(5, 4) * 100, torch.randn(7, 4), torch.randn(7), torch.arange(5)
    found = tried_layers.capped_cross_entropy(hidden, weight, bias, targets)
    logits = tried_layers.CAP * torch.tanh((hidden @ weight.T + bias) / tried_layers.CAP)
    near(found, -logits.log_softmax(-1)[torch.arange(5), targets])


def test_layers_with_zero_outputs_change_nothing_at_first() -> None:
    with TRIED["zero_output"]():
        network = TransformerXL.build(model_config(norm="pre"), Architecture.parse("skf"), VOCABULARY).eval()
    ids = random_ids(2, 5)
    near(network(ids).hidden, network.final_norm(network.embedding(ids)))


def test_an_update_of_normuon_is_as_large_as_of_muon_and_even_over_rows() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(6, 10))
    before = matrix.detach().clone()
    matrix.grad = torch.randn(6, 10) * torch.arange(1.0, 7.0)[:, None]
    tried_layers.NorMuon([matrix], lr=0.5, weight_decay=0.0).step()
    update = (before - matrix.detach()) / 0.5
    rows = update.square().mean(dim=1).sqrt()
    near(rows, torch.full((6,), 0.2), 1e-3)
