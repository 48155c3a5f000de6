"""The layers against loops that are written from their definitions."""

import math

import pytest
import torch
from helpers.model_helpers import model_config, randomise, reach, sinusoids

from parnas.errors import ParnasError
from parnas.model.attention import encode_distances, relative_biases
from parnas.model.layers import Context, make_layer

CPU = torch.device("cpu")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_context(tgt_len, mem_len, d_model, u=None, v=None):
    keys = tgt_len + mem_len
    return Context(encode_distances(keys, d_model, CPU), u, v)


def slow_attention(layer, x, memory, u, v):
    """Scores of every pair of positions, one by one; q reads k and the distance between them (Dai et al., §3.3)."""
    width, users = layer.head_width, layer.n_heads // layer.kv_heads
    key_weight, value_weight = layer.key_value.weight.chunk(2)
    result = torch.zeros_like(x)
    for b, segment in enumerate(x):
        sequence = segment if memory is None else torch.cat([memory[b], segment])
        first = len(sequence) - len(segment)
        for t in range(len(segment)):
            parts = []
            for h in range(layer.n_heads):
                rows, own = (slice(head * width, (head + 1) * width) for head in (h, h // users))
                q = layer.query.weight[rows] @ segment[t]
                scores, values = [], []
                for k in range(first + t + 1):
                    r = layer.position.weight[rows] @ sinusoids(first + t - k, x.shape[-1]).to(x.dtype)
                    key = key_weight[own] @ sequence[k]
                    scores.append(((q + u[h]) @ key + (q + v[h]) @ r) / math.sqrt(width))
                    values.append(value_weight[own] @ sequence[k])
                weights = torch.stack(scores).softmax(0)
                parts.append(sum(w * value for w, value in zip(weights, values, strict=True)))
            result[b, t] = layer.output.weight @ torch.cat(parts)
    return result


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_distances_fall_and_features_go_from_fast_to_slow(width):
    count = 30
    expected = torch.stack([sinusoids(distance, width) for distance in range(count - 1, -1, -1)])
    torch.testing.assert_close(encode_distances(count, width, CPU), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("tgt_len, mem_len", [(3, 0), (1, 4), (4, 3)])
@pytest.mark.parametrize("d_head", [None, 3])
def test_attention_equals_loops(norm, shared, tgt_len, mem_len, d_head):
    config = model_config(norm=norm, share_biases=shared, d_head=d_head)
    layer = randomise(make_layer("s", config).double(), seed=tgt_len)
    u, v = layer.u, layer.v
    if shared:
        assert u is None
        u, v = (random(config.n_heads, config.head_width, seed=seed) for seed in (1, 2))
    context = make_context(tgt_len, mem_len, config.d_model, *((u, v) if shared else ()))
    x = random(2, tgt_len, config.d_model, seed=3)
    memory = random(2, mem_len, config.d_model, seed=4) if mem_len else None
    if norm == "post":
        expected = layer.layer_norm(x + slow_attention(layer, x, memory, u, v))
    else:
        normed_memory = None if memory is None else layer.layer_norm(memory)
        expected = x + slow_attention(layer, layer.layer_norm(x), normed_memory, u, v)
    torch.testing.assert_close(layer(x, memory, context).hidden, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_feed_forward_equals_loops(norm):
    layer = randomise(make_layer("f", model_config(norm=norm)).double())
    x = random(2, 3, 8)

    def slow(vector):
        inner = layer.inner.weight @ vector + layer.inner.bias
        inner[inner < 0] = 0
        return layer.outer.weight @ inner + layer.outer.bias

    def through(rows):
        return torch.stack([torch.stack([slow(vector) for vector in row]) for row in rows])

    expected = layer.layer_norm(x + through(x)) if norm == "post" else x + through(layer.layer_norm(x))
    torch.testing.assert_close(layer(x, None, make_context(3, 0, 8)).hidden, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_identity_is_x_without_parameters(norm):
    layer, x = make_layer("i", model_config(norm=norm)), random(2, 3, 8)
    assert layer(x, None, make_context(3, 0, 8)).hidden is x
    assert list(layer.parameters()) == []


def test_only_attention_uses_memory():
    assert {letter: make_layer(letter, model_config()).uses_memory for letter in "scfi"} == {
        "s": True,
        "c": True,
        "f": False,
        "i": False,
    }


@pytest.mark.parametrize("letter, setting", [("s", "dropout"), ("s", "attention_dropout"), ("f", "dropout")])
def test_dropout_acts_in_training_only(letter, setting):
    layer = randomise(make_layer(letter, model_config(**{setting: 0.5})))
    exact = make_layer(letter, model_config())
    exact.load_state_dict(layer.state_dict())
    u, v = relative_biases(model_config())
    x, context = random(2, 3, 8).float(), make_context(3, 0, 8, u, v)
    torch.manual_seed(0)
    assert not torch.allclose(layer.train()(x, None, context).hidden, layer(x, None, context).hidden)
    assert torch.equal(layer.eval()(x, None, context).hidden, exact(x, None, context).hidden)


@pytest.mark.parametrize("letter", ["s", "f"])
def test_gradients_are_right(letter):
    layer = randomise(make_layer(letter, model_config(d_inner=4, share_biases=False)).double())
    context = make_context(2, 2, 8)
    inputs = random(1, 2, 8).requires_grad_(), random(1, 2, 8, seed=1).requires_grad_(letter == "s")
    assert torch.autograd.gradcheck(lambda x, memory: layer(x, memory, context).hidden, inputs)
    layer(*inputs, context).hidden.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


# Options


@pytest.mark.parametrize(
    "name, heads, width",
    [
        ("s:heads=1", 1, 4),
        ("s:heads=3,d_head=2", 3, 2),
        ("s:d_head=5", 2, 5),
        ("s:heads=4,kv_heads=2", 4, 4),
        ("s:heads=3,kv_heads=1", 3, 4),
    ],
)
@pytest.mark.parametrize("mem_len", [0, 3])
def test_attention_with_options_equals_loops(name, heads, width, mem_len):
    """It has biases of its own shape, whatever the model shares."""
    layer = randomise(make_layer(name, model_config()).double())
    assert (layer.n_heads, layer.head_width, tuple(layer.u.shape)) == (heads, width, (heads, width))
    assert not layer.shares_biases
    x = random(2, 3, 8, seed=3)
    memory = random(2, mem_len, 8, seed=4) if mem_len else None
    u, v = random(2, 4, seed=1), random(2, 4, seed=2)
    expected = layer.layer_norm(x + slow_attention(layer, x, memory, layer.u, layer.v))
    found = layer(x, memory, make_context(3, mem_len, 8, u, v)).hidden
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_heads_of_keys_must_divide_the_heads():
    with pytest.raises(ParnasError, match=r"kv_heads=2 .* 3 heads"):
        make_layer("s:heads=3,kv_heads=2", model_config())


def test_options_that_change_no_shape_share_the_biases_of_the_model():
    for name in ("s", "s:heads=2", "s:heads=2,d_head=4", "s:kv_heads=1"):
        assert make_layer(name, model_config()).u is None
    assert make_layer("s:heads=2", model_config(share_biases=False)).u is not None


def test_half_the_heads_cost_half_as_much():
    whole, half = (make_layer(name, model_config(n_heads=4)) for name in ("s", "s:heads=2"))
    assert half.multiply_adds(4, reach(4)) * 2 == whole.multiply_adds(4, reach(4))
    assert make_layer("f:d_inner=6", model_config()).multiply_adds(4, reach(4)) * 2 == 2 * 8 * 12
