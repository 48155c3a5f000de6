"""Transformer-XL: its memory, its causality, what it generates, and the six published networks."""

from pathlib import Path

import pytest
import torch
from helpers.model_helpers import (
    VOCABULARY,
    make_network,
    make_supernet,
    model_config,
    near,
    plain_memories,
    random_ids,
    reach,
    read_in_segments,
)

from parnas.architecture import Architecture
from parnas.config.loader import load_config
from parnas.model.transformer_xl import INITIAL_STD, TransformerXL

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WT103, ENWIK8, TEXT8 = 267_735, 204, 27
PUBLISHED = {
    "wikitext103-base": (WT103, 151_107_538),
    "wikitext103-large": (WT103, 285_170_506),
    "wikitext103-base-nvidia": (WT103, 191_950_298),
    "enwik8": (ENWIK8, 41_055_436),
    "enwik8-large": (ENWIK8, 277_231_820),
    "text8-large": (TEXT8, 277_050_395),
}
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm": "pre"},
    "own biases": {"share_biases": False},
    "div_val": {"cutoffs": (5, 9), "div_val": 2},
    "subword features": {"subword_features": 12},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request):
    return request.param


@pytest.fixture(params=[make_network, make_supernet], ids=["plain", "SuperNet"])
def network(request, variant):
    return request.param(mem_len=16, **variant)


def log_probs(network, ids):
    """Log-probabilities [B, T, V] of a text read as one segment."""
    return network.log_probs(network(ids))


# Memory


@pytest.mark.parametrize("tgt_len", [1, 5])
@torch.no_grad()
def test_many_short_segments_equal_one_long(network, tgt_len):
    ids = random_ids(2, 12)
    near(read_in_segments(network, ids, tgt_len)[0], network(ids).hidden)


@torch.no_grad()
def test_segments_may_differ_in_length(network):
    ids = random_ids(2, 15)
    hidden, memory = [], None
    for segment in ids.split([4, 1, 7, 3], dim=1):
        output = network(segment, memory)
        memory = output.memory
        hidden.append(output.hidden)
    near(torch.cat(hidden, 1), network(ids).hidden)


def test_memory_starts_empty_not_as_zeros():
    network, ids = make_network(), random_ids(2, 4)
    empty = network(ids)
    near(network(ids, (None,) * 4).hidden, empty.hidden)
    zeros = tuple(torch.zeros(2, 6, 8) if block.uses_memory else None for block in network.blocks)
    assert not torch.allclose(network(ids, zeros).hidden, empty.hidden, atol=1e-3)
    assert [None if kept is None else tuple(kept.shape) for kept in empty.memory] == [(2, 4, 8), None] * 2


@pytest.mark.parametrize("mem_len", [1, 3, 5, 6, 9, 50])
@pytest.mark.parametrize("build", [make_network, make_supernet], ids=["plain", "SuperNet"])
def test_memory_holds_the_last_inputs_of_each_block(build, mem_len):
    """Blocks without attention keep nothing."""
    network, ids = build(mem_len=mem_len), random_ids(2, 9)
    inputs = [[] for _ in network.blocks]
    for block, seen in zip(network.blocks, inputs, strict=True):
        block.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0]))
    _, memory = read_in_segments(network, ids, 3)
    for block, seen, kept in zip(network.blocks, inputs, plain_memories(memory), strict=True):
        assert (kept is not None) == block.uses_memory
        if kept is not None:
            assert torch.equal(kept, torch.cat(seen, 1)[:, -mem_len:])


@pytest.mark.parametrize("segments, mem_len", [([12], 0), ([4, 1, 7], 3), ([1] * 12, 3), ([4, 1, 7], 20)])
@torch.no_grad()
def test_keys_and_values_as_memory_give_the_same_result(network, segments, mem_len):
    memory, cached = None, None
    for ids in random_ids(2, 12).split(segments, dim=1):
        expected = network(ids, memory, reach=reach(mem_len))
        found = network(ids, cached, reach=reach(mem_len), inference=True)
        memory, cached = expected.memory, found.memory
        near(found.hidden, expected.hidden)
    for kept, plain in zip(plain_memories(cached), plain_memories(memory), strict=True):
        assert (kept is None) == (plain is None)
        if plain is not None:
            assert kept.shape == (*plain.shape[:2], 2 * plain.shape[2])


@torch.no_grad()
def test_inference_projects_nothing_twice():
    network, projected = make_network("s", mem_len=20), []
    network.blocks[0].key_value.register_forward_hook(lambda *call: projected.append(call[-1].shape[1]))
    memory = None
    for ids in random_ids(2, 12).split([5, 4, 3], dim=1):
        memory = network(ids, memory, inference=True).memory
    assert projected == [5, 4, 3]


def test_memory_passes_no_gradient():
    network, ids = make_network(), random_ids(2, 8)
    vectors = []
    network.embedding.register_forward_hook(lambda *call: vectors.append(call[-1]))
    memory = network(ids[:, :4]).memory
    assert not any(kept.requires_grad for kept in memory if kept is not None)
    network(ids[:, 4:], memory).hidden.square().sum().backward(inputs=vectors)
    assert vectors[0].grad is None
    assert vectors[1].grad.abs().sum() > 0


@pytest.mark.parametrize("configured, argument", [(0, None), (6, 0)])
def test_no_memory_where_its_length_is_zero(configured, argument):
    network, ids = make_network(mem_len=configured), random_ids(2, 8)
    first = network(ids[:, :4], reach=None if argument is None else reach(argument))
    assert first.memory == (None,) * 4
    near(network(ids[:, 4:], first.memory).hidden, network(ids[:, 4:]).hidden)


def test_memory_length_of_a_call_goes_before_the_configured():
    network, ids = make_network(mem_len=2), random_ids(2, 12)
    near(read_in_segments(network, ids, 3, reach=reach(12))[0], network(ids).hidden)
    assert not torch.allclose(read_in_segments(network, ids, 3)[0], network(ids).hidden, atol=1e-3)


def test_forward_leaves_the_given_memory_alone():
    network, ids = make_network(), random_ids(2, 8)
    memory = network(ids[:, :4]).memory
    before = [None if kept is None else kept.clone() for kept in memory]
    first = network(ids[:, 4:], memory).hidden
    assert torch.equal(network(ids[:, 4:], memory).hidden, first)
    assert all(kept is None or torch.equal(kept, was) for kept, was in zip(memory, before, strict=True))


# Causality


@pytest.mark.parametrize("position", [0, 7, 11])
@torch.no_grad()
def test_nobody_peeks_at_the_future_or_at_another_row(network, position):
    ids = random_ids(2, 12)
    changed = ids.clone()
    changed[1, position] = (ids[1, position] + 1) % VOCABULARY
    before, after = (read_in_segments(network, text, 4)[0] for text in (ids, changed))
    differs = (before != after).any(-1)
    assert not differs[0].any()
    assert not differs[1, :position].any()
    assert differs[1, position:].all()


def test_without_attention_a_position_sees_itself_only():
    network, ids = make_network("ff"), random_ids(1, 6)
    changed = ids.clone()
    changed[0, 2] = (ids[0, 2] + 1) % VOCABULARY
    differs = (network(ids).hidden != network(changed).hidden).any(-1)
    assert differs[0].tolist() == [False, False, True, False, False, False]
    assert network.u is None


# Loss


def test_nll_is_minus_the_log_probability_of_each_target(variant):
    network, ids, targets = make_network(**variant), random_ids(2, 10), random_ids(2, 10, seed=1)
    nll, memory = network.nll(ids, targets)
    near(nll, -log_probs(network, ids).gather(2, targets[..., None]).squeeze(-1))
    for kept, expected in zip(memory, network(ids).memory, strict=True):
        assert (kept is None and expected is None) or torch.equal(kept, expected)


def test_token_zero_is_scored_and_learnt_like_any_other(variant):
    network, ids = make_network(**variant), random_ids(2, 6)
    nll, _ = network.nll(ids, torch.zeros_like(ids))
    near(nll, -log_probs(network, ids)[..., 0])
    assert nll.min() > 0
    nll.sum().backward()
    assert network.head.biases[0].grad[0] < 0  # a step of descent raises its probability


# Build


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_have_the_published_sizes(name):
    vocab_size, parameters = PUBLISHED[name]
    config = load_config(CONFIGS / f"{name}.yaml").model
    with torch.device("meta"):
        network = TransformerXL.build(config, Architecture.parse(config.arch), vocab_size)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_embedding_parameters_count_shared_ones_once():
    network = make_network(tie_weights=True)
    in_blocks = sum(p.numel() for p in network.blocks.parameters()) + network.u.numel() + network.v.numel()
    assert network.embedding_parameters() == sum(p.numel() for p in network.parameters()) - in_blocks
    assert network.embedding_parameters() == VOCABULARY * 8 + VOCABULARY
    assert make_network(tie_weights=False).embedding_parameters() == 2 * VOCABULARY * 8 + VOCABULARY


def test_identity_blocks_leave_nothing_behind():
    ids, network = random_ids(2, 6), make_network("sf")
    padded = make_network("isiifi")
    assert len(padded.blocks) == 2
    near(padded(ids).hidden, network(ids).hidden)


def test_burn_in_adds_up_what_each_block_looks_back():
    assert make_network("sfisf").burn_in(4, reach(6)) == 2 * 2
    assert make_supernet(3).burn_in(6, reach(6)) == 3
    assert make_supernet(3, ("f", "i")).burn_in(4, reach(6)) == 0
    assert make_network("kkkk").burn_in(4, reach(6)) == 3  # 4 times 3 tokens before each position
    assert make_network("skkfs").burn_in(4, reach(6)) == 5  # 6, then 6 more, then 6 before the segment of those 12
    assert make_supernet(2, ("k", "s")).burn_in(4, reach(6)) == 4
    assert make_network("r").burn_in(4, reach(6)) > 10**8


@pytest.mark.parametrize(
    "arch", ["kkkkkk", "ksk", "kkskk", "skks", "k s k k s:window=5 k", "s:window=7 k f", "s s:window=3 s"]
)
@pytest.mark.parametrize("mem_len", [0, 3, 4, 6])
def test_outputs_do_not_depend_on_tokens_before_burn_in(arch, mem_len):
    network, tgt_len = make_network(arch).double(), 4
    burn_in, ids = network.burn_in(tgt_len, reach(mem_len)), random_ids(1, 60)

    def last_segment(tokens):
        memory = None
        for segment in tokens.split(tgt_len, dim=1):
            hidden, memory = network(segment, memory, reach=reach(mem_len))[:2]
        return hidden

    whole = last_segment(ids)
    near(last_segment(ids[:, -(burn_in + 1) * tgt_len :]), whole)
    assert (last_segment(ids[:, -burn_in * tgt_len :]) - whole).abs().max() > 0


def test_initial_weights_are_small_biases_zero_and_norms_one():
    config = model_config(d_model=32, d_inner=64, norm="pre", share_biases=False, cutoffs=(100, 200), div_val=2)
    torch.manual_seed(0)
    for name, parameter in TransformerXL.build(config, Architecture("sf"), 400).named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith(("bias", ".u", ".v")) or "biases" in name:
            assert (parameter == 0).all()
        else:
            expected = INITIAL_STD * torch.ones(())
            torch.testing.assert_close(parameter.std(), expected, rtol=5 / parameter.numel() ** 0.5, atol=0)


@pytest.mark.parametrize(("init_std", "expected"), [(0.3, (0.3, 0.3)), (None, (32**-0.5, 64**-0.5))])
def test_init_std_is_that_of_linear_maps_in_blocks(init_std, expected):
    config = model_config(d_model=32, d_inner=64, cutoffs=(100,), init_std=init_std)
    torch.manual_seed(0)
    network = TransformerXL.build(config, Architecture("sfkr"), 400)
    feed_forward, convolution = network.blocks[1], network.blocks[2]
    measured = [feed_forward.inner.weight, feed_forward.outer.weight, convolution.kernel, network.embedding.tables[0]]
    for matrix, std in zip(measured, (*expected, INITIAL_STD, INITIAL_STD), strict=True):
        assert float(matrix.detach().std()) == pytest.approx(std, rel=5 / matrix.numel() ** 0.5)
    torch.manual_seed(0)  # the same random numbers, whatever the scale
    usual = TransformerXL.build(config.model_copy(update={"init_std": INITIAL_STD}), Architecture("sfkr"), 400)
    near(usual.blocks[3].inner.weight * (init_std or 32**-0.5) / INITIAL_STD, network.blocks[3].inner.weight)


def test_final_norm_belongs_to_pre_norm():
    assert make_network(norm="post").final_norm is None
    network = make_network(norm="pre")
    seen = []
    network.blocks[-1].register_forward_hook(lambda *call: seen.append(call[-1]))
    hidden = network(random_ids(2, 6)).hidden
    near(hidden, network.final_norm(seen[0].hidden))


def test_dropout_acts_in_training_only(variant):
    network, ids = make_network(dropout=0.5, attention_dropout=0.5, **variant), random_ids(2, 6)
    exact = make_network(**variant)
    near(network(ids).hidden, exact(ids).hidden)
    torch.manual_seed(0)
    assert not torch.allclose(network.train()(ids).hidden, network(ids).hidden)


# Multiply-adds


@pytest.mark.parametrize("arch", ["s", "f", "sfisf"])
@pytest.mark.parametrize("settings", [{}, {"d_head": 3}, {"cutoffs": (5, 9), "div_val": 2}], ids=str)
def test_multiply_adds_are_what_torch_counts(arch, settings):
    from torch.utils.flop_counter import FlopCounterMode

    network, tgt_len, mem_len = make_network(arch, **settings), 5, 6
    ids, memory = random_ids(1, tgt_len), network(random_ids(1, mem_len), inference=True).memory
    frequent = [1] * 5 + [0] * (VOCABULARY - 5)  # so that no tail of the softmax is needed
    with FlopCounterMode(display=False) as counter:
        network.nll(ids % 5, ids % 5, memory, inference=True)
    counted = counter.get_total_flops() / 2 / tgt_len
    assert network.multiply_adds(tgt_len, reach(mem_len), frequent) == pytest.approx(counted)


# Generation


@torch.no_grad()
def greedy(network, prompt, length):
    """Return the likeliest continuation, reading the whole text again for every token."""
    ids = prompt
    for _ in range(length):
        ids = torch.cat([ids, log_probs(network, ids)[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def test_cold_generation_takes_the_likeliest_ids(network):
    """With memory for the whole text, reading token by token equals reading the whole text each time."""
    prompt = random_ids(3, 5)
    found = network.generate(prompt, 6, temperature=0)
    assert torch.equal(found, greedy(network, prompt, 6))
    assert torch.equal(found, network.generate(prompt, 6, temperature=1.7, top_k=1))
    assert torch.equal(found[:, :5], prompt)


def test_generation_reads_each_token_once_and_remembers_as_in_training():
    network, prompt = make_network(mem_len=3), random_ids(2, 5)
    read = []
    network.embedding.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    found = network.generate(prompt, 6, temperature=0)
    assert torch.equal(torch.cat(read, 1), found[:, :-1])
    output = network(prompt)
    for token in found[:, 5:].split(1, dim=1):
        assert torch.equal(network.head.log_probs(output.hidden[:, -1]).argmax(-1), token.squeeze(1))
        output = network(token, output.memory)


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (2.0, None), (0.5, None), (1.0, 4), (2.0, 100)])
def test_samples_follow_the_distribution(temperature, top_k):
    network, rows = make_network(), 20_000
    prompt = random_ids(1, 4)
    scores = log_probs(network, prompt)[0, -1]
    likeliest = scores.argsort(descending=True)[:top_k]
    expected = torch.zeros(VOCABULARY)
    expected[likeliest] = (scores[likeliest] / temperature).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = network.generate(prompt.expand(rows, -1), 1, temperature, top_k, generator)[:, -1]
    torch.testing.assert_close(drawn.bincount(minlength=VOCABULARY) / rows, expected, atol=0.02, rtol=0)
    assert (drawn[:, None] == likeliest).any(1).all()


def test_a_generator_fixes_the_samples():
    network, prompt = make_network(), random_ids(2, 4)
    texts = [network.generate(prompt, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_generation_is_free_of_dropout_and_keeps_the_mode():
    network, prompt = make_network(dropout=0.5), random_ids(2, 4)
    expected = network.generate(prompt, 8, temperature=0)
    assert torch.equal(network.train().generate(prompt, 8, temperature=0), expected)
    assert network.training
    assert not network.eval().training


# Compilation


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_network_is_one_graph_and_has_the_same_gradients(dropout):
    """A graph for the first segment, one for the second; a break in a graph would leave most operations uncompiled."""

    def train(compiled):
        torch.manual_seed(1)
        arch = "s s:window=4 s:kv_heads=1 f k r g c"
        network = make_network(arch, mem_len=6, dropout=dropout, attention_dropout=dropout).train()
        if compiled:
            torch._dynamo.reset()
            # Fails at a break. No code is generated: `aot_eager` traces the backward pass too, `eager` does not.
            network.compile(backend="eager" if dropout else "aot_eager", fullgraph=True)
        memory, losses = None, []
        for seed in range(2):
            ids = random_ids(2, 5, seed=seed)
            nll, memory = network.nll(ids, ids, memory)
            nll.mean().backward()
            losses.append(nll.detach())
        gradients = (torch.zeros_like(each) if each.grad is None else each.grad for each in network.parameters())
        return torch.stack(losses), *gradients

    eager, compiled = train(False), train(True)
    if not dropout:  # a compiled network draws other random numbers
        for one, other in zip(eager, compiled, strict=True):
            near(other, one)
