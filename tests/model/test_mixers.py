"""Windowed attention, gated convolution, gated recurrence and SwiGLU against loops over tokens, in float64."""

import pytest
import torch
from helpers.model_helpers import (
    VOCABULARY,
    make_network,
    make_supernet,
    model_config,
    near,
    random_ids,
    randomise,
    reach,
    read_in_segments,
)
from torch.nn.functional import sigmoid, silu

from parnas.architecture import Architecture
from parnas.config.schema import Shape
from parnas.model import recurrence
from parnas.model.blocks import Block
from parnas.model.gates import PathGate
from parnas.model.layers import Context, make_layer
from parnas.model.recurrence import CHUNK
from parnas.training.device import Device
from parnas.training.optimizers import suits_muon
from parnas.training.perplexity import score_tokens

MIXERS = ("k", "k:width=2", "k:width=1", "r", "s:window=3", "s:window=8", "s:kv_heads=1,window=3")
CONTEXT = Context(torch.zeros(1, 8), torch.zeros(2, 4).double(), torch.zeros(2, 4).double(), reach())


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_convolution(layer, x, memory=None):
    """The sum over the last `width` tokens, one by one; returns the change and the gated values of all tokens."""
    b, c, v = (x @ layer.inner.weight.T).chunk(3, dim=-1)
    past = [] if memory is None else list(memory.unbind(1))
    gated = past + [b[:, t] * v[:, t] for t in range(x.shape[1])]
    outputs = []
    for t in range(x.shape[1]):
        position = len(past) + t
        total = torch.zeros_like(x[:, 0])
        for back in range(layer.width):
            if position - back >= 0:
                total = total + layer.kernel[layer.width - 1 - back] * gated[position - back]
        outputs.append((c[:, t] * total) @ layer.outer.weight.T)
    return torch.stack(outputs, dim=1)


def slow_recurrence(layer, x, state=None):
    """h <- (1 - s) h + s c for one token after the other; returns the change and the last state."""
    state = torch.zeros_like(x[:, 0]) if state is None else state
    outputs = []
    for token in x.unbind(1):
        z, c, o = (token @ layer.inner.weight.T + layer.inner.bias).chunk(3, dim=-1)
        state = (1 - sigmoid(z)) * state + sigmoid(z) * c
        outputs.append((state * silu(o)) @ layer.outer.weight.T)
    return torch.stack(outputs, dim=1), state


def make(name, **changes):
    return randomise(make_layer(name, model_config(**changes)).double())


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", ["k", "k:width=2", "k:width=1"])
def test_convolution_equals_loops(name, norm):
    layer, x, memory = make(name, norm=norm), random(2, 7, 8), None
    for segment in (x[:, :2], x[:, 2:]):  # shorter than the kernel, then longer
        expected = layer.joined(segment, slow_convolution(layer, layer.normed(segment), memory))
        output = layer(segment, memory, CONTEXT)
        near(output.hidden, expected, 1e-9)
        memory = output.memory


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 3])
def test_recurrence_equals_loops(length, norm):
    layer, x, memory = make("r", norm=norm), random(2, length + 4, 8), None
    for segment in (x[:, :4], x[:, 4:]):
        change, state = slow_recurrence(layer, layer.normed(segment), memory)
        output = layer(segment, memory, CONTEXT)
        near(output.hidden, layer.joined(segment, change), 1e-9)
        near(output.memory, state, 1e-9)
        memory = output.memory


def loop_kernel(x, g, initial_state=None):
    """The interface of the CUDA kernel as a loop: h <- exp(g) h + x."""
    state, states = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state, []
    for inputs, log_gate in zip(x.unbind(1), g.unbind(1), strict=True):
        state = log_gate.exp() * state + inputs
        states.append(state)
    return torch.stack(states, dim=1), state


@pytest.mark.parametrize("kernel", [loop_kernel, pytest.param(None, id="cuda")])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_kernel_on_cuda_computes_the_states_and_gradients_of_the_scan(kernel, with_state):
    device = "cpu"
    if kernel is None:
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        kernel, device = recurrence.find_kernel(), "cuda"
        if kernel is None:
            pytest.skip("fla-core is not installed")
    logits, candidates = (random(2, 37, 8).float().to(device).requires_grad_() for _ in range(2))
    state = random(2, 8).float().to(device) if with_state else None
    update, results = logits.sigmoid(), []
    for states in (
        recurrence.scan_by_kernel(kernel, logits, update * candidates, state),
        recurrence.scan_chunks(1 - update, update * candidates, state),
    ):
        gradients = torch.autograd.grad(states.square().sum(), (logits, candidates), retain_graph=True)
        results.append((states, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_gate_that_is_rounded_to_zero_has_a_finite_gradient_by_the_kernel_too():
    logits = torch.full((1, 3, 2), 200.0, requires_grad=True)
    inputs = torch.ones(1, 3, 2)
    states = recurrence.scan_by_kernel(loop_kernel, logits, inputs, None)
    near(states.detach(), inputs, 1e-6)
    assert torch.autograd.grad(states.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("length", [2, 3, 7, 12])
def test_a_window_sees_as_many_keys_as_attention_of_the_same_length(length):
    # With memory as long as the window and `same_length`, plain attention masks the same keys of one long segment.
    window = 3
    banded = make_network(f"s:window={window}", mem_len=window).double()
    plain = make_network("s", mem_len=window, same_length=True).double()
    ids = random_ids(2, length)
    near(banded(ids).hidden, plain(ids).hidden, 1e-9)


def test_swiglu_equals_its_formula():
    layer, x = make("g:d_inner=5"), random(2, 3, 8)
    (gate, value), (b, c) = layer.inner.weight.chunk(2), layer.inner.bias.chunk(2)
    expected = (silu(x @ gate.T + b) * (x @ value.T + c)) @ layer.outer.weight.T + layer.outer.bias
    near(layer(x, None, CONTEXT).hidden, layer.joined(x, expected), 1e-9)


def test_swiglu_has_by_default_about_as_many_weights_as_feed_forward():
    config = model_config(d_model=64, d_inner=256)
    sizes = [sum(p.numel() for p in make_layer(name, config).parameters()) for name in ("g", "f")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("cuts", [[1] * 19, [4, 15], [17, 2], [7, 7, 5]], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_segments_of_any_length_give_the_result_of_one(name, cuts, inference):
    network, ids = make_network(f"{name} f {name}").double(), random_ids(2, 19)
    whole, memory, parts = network(ids).hidden, None, []
    for part in ids.split(cuts, dim=1):
        output = network(part, memory, inference=inference)
        parts.append(output.hidden)
        memory = output.memory
    near(torch.cat(parts, dim=1), whole, 1e-8)


@pytest.mark.parametrize("name", MIXERS)
def test_rows_do_not_mix_and_nothing_sees_the_future(name):
    network, ids = make_network(name).double(), random_ids(3, 9)
    changed = ids.clone()
    changed[1, 5] = (changed[1, 5] + 1) % VOCABULARY
    before, after = (read_in_segments(network, each, 4)[0] for each in (ids, changed))
    differs = (before - after).abs().sum(dim=-1) > 0
    assert not differs[[0, 2]].any()
    assert not differs[1, :5].any()
    assert differs[1, 5]


@pytest.mark.parametrize("name", [*MIXERS, "g"])
def test_gradients_are_those_of_finite_differences(name):
    layer, memory = make(name), None
    x = random(1, 5, 8).requires_grad_()
    with torch.no_grad():
        memory = layer(random(1, 4, 8, seed=1), None, CONTEXT).memory
    weights = list(layer.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, memory, CONTEXT).hidden, (x, *weights))


@pytest.mark.parametrize("name", MIXERS)
def test_memory_has_a_fixed_size_and_no_gradient(name):
    sizes = set()
    for mem_len in (0, 6):
        network = make_network(name, mem_len=mem_len)
        network.train()
        memory = None
        for _ in range(4):
            memory = network(random_ids(2, 5), memory).memory
        (own,) = memory
        assert own is None or not own.requires_grad
        if own is not None and name[0] in "kr":
            assert own.untyped_storage().nbytes() == own.nbytes, "the segment is not kept"
        sizes.add(None if own is None else own.numel())
    assert len(sizes) == 1, "mem_len does not matter"


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("inference", [False, True])
def test_a_skipped_layer_has_the_memory_that_it_would_have_had(name, length, inference):
    layer, x, context = make(name), random(2, 4, 8), CONTEXT._replace(inference=inference)
    before = layer(x, None, context).memory
    segment = random(2, length, 8, seed=1)
    expected, skipped = layer(segment, before, context).memory, layer.skip(segment, before, context)
    assert (expected is None) == (skipped is None)
    if expected is not None:
        near(skipped, expected, 1e-9)


@pytest.mark.parametrize("name", [*MIXERS, "g", "s:kv_heads=1"])
@pytest.mark.parametrize("tgt_len", [1, 2, 5, 16])
def test_multiply_adds_are_those_that_torch_counts(name, tgt_len):
    layer = make_layer(name, model_config())
    assert layer.multiply_adds(tgt_len, reach()) == pytest.approx(Block.multiply_adds(layer, tgt_len, reach()))


@pytest.mark.parametrize("name", [*MIXERS, "g"])
def test_bf16_stays_near_float32(name):
    network, ids = make_network(f"{name} f", d_model=16), random_ids(2, 12)
    exact = network(ids).hidden
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(ids).hidden
    assert (rounded - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("path", [("k", "s", "r"), ("s:window=3", "g", "f"), ("r", "r", "k")], ids=str)
def test_a_path_through_the_supernet_equals_its_network(path):
    space = ("s", "s:window=3", "k", "r", "g", "f", "i")
    supernet = make_supernet(3, space).double()
    network = supernet.extract(Architecture(path)).double()
    gates = [PathGate(torch.eye(len(space))[space.index(name)], space.index(name)) for name in path]
    ids, memory, own = random_ids(2, 12), None, None
    for part in ids.split(4, dim=1):
        output, expected = supernet(part, memory, gates), network(part, own)
        memory, own = output.memory, expected.memory
        near(output.hidden, expected.hidden, 1e-8)


@pytest.mark.parametrize("name", ["s:kv_heads=1", "s:kv_heads=1,window=3"])
def test_with_half_the_heads_of_keys_memory_in_generation_is_half_as_large(name):
    for inference, factor in ((True, 2), (False, 1)):
        whole, half = (
            make_network(each)(random_ids(2, 5), inference=inference).memory[0].numel()
            for each in (name.replace("kv_heads=1", "kv_heads=2"), name)
        )
        assert whole == factor * half


def test_windows_share_the_weights_of_attention_in_a_supernet():
    supernet = make_supernet(1, ("s:window=3", "s", "s:heads=1", "f", "s:heads=1,window=4"))
    block = supernet.blocks[0]
    for one, other in (("s:window=3", "s"), ("s:heads=1", "s:heads=1,window=4")):
        pairs = zip(block.candidates[one].parameters(), block.candidates[other].parameters(), strict=True)
        assert all(a is b for a, b in pairs)
    assert block.candidates["s"].query.weight is not block.candidates["s:heads=1"].query.weight
    network = supernet.extract(Architecture(["s:window=3"]))
    assert network.blocks[0].window == 3
    assert network.blocks[0].query.weight is not block.candidates["s"].query.weight
    near(network.blocks[0].query.weight, block.candidates["s"].query.weight)


@pytest.mark.parametrize("name", MIXERS)
def test_perplexity_does_not_depend_on_the_batch_size(name):
    # Rows that begin in the middle of the text must read what their memory holds; a recurrence reads it all in one row.
    network, tokens = make_network(f"{name} f {name}"), random_ids(1, 150)[0].numpy()
    device = Device(torch.device("cpu"), "fp32")
    one, four = (score_tokens(network, tokens, 0, device, Shape(size, 5, network.config.reach)) for size in (1, 4))
    near(four, one, 1e-4)


def test_a_kernel_is_no_matrix_for_muon():
    network = make_network("k")
    by_muon = {name for name, weight in network.named_parameters() if suits_muon(name, weight)}
    assert by_muon == {"blocks.0.inner.weight", "blocks.0.outer.weight"}
