"""Compressive memory against the paper's algorithms, and what training may and may not change."""

import pytest
import torch
from helpers.model_helpers import make_network, make_supernet, random_ids, reach, read_in_segments
from helpers.slow_compressive import KINDS, TRAINED, SlowCompressive, settings

from parnas.model.compressive import COMPRESSORS
from parnas.model.transformer_xl import ModelOutput

SHAPES = {
    "even": (4, 4, 2, 3),
    "some wait": (3, 4, 2, 2),
    "segments longer than memory": (5, 2, 3, 2),
    "no plain memory": (3, 0, 3, 2),
    "more at once than there is room for": (6, 1, 2, 2),
}  # tgt_len, mem_len, ratio, cmem_len


def train_fast(network, segments, targets, **options):
    """Losses, auxiliary losses and memories, segment by segment, with gradients in the network."""
    memory, results = None, []
    for ids, wanted in zip(segments, targets, strict=True):
        output = network(ids, memory, **options)
        nll = network.score(output, wanted)
        (nll.mean() + (0 if output.loss is None else output.loss)).backward()
        memory = output.memory
        results.append((nll.detach(), output.loss, memory))
    return results


def gradients(network):
    found = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return found


VARIANTS = [{}, {"distance": "tokens", "norm": "pre"}, {"distance": "tokens", "same_length": True, "clamp_len": 7}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function, loss", KINDS)
def test_equals_the_algorithms_of_the_paper(function, loss, shape):
    """Each kind in each shape, with the variants in turn, so that every two of the three meet."""
    variant = VARIANTS[(KINDS.index((function, loss)) + list(SHAPES).index(shape)) % len(VARIANTS)]
    shape = SHAPES[shape]
    tgt_len, mem_len, ratio, cmem_len = shape
    mem_len = mem_len or int(variant.get("same_length", False))  # else nothing would be seen
    changes = settings(function, loss, mem_len, ratio, cmem_len, **variant)
    network = make_network("cfc", **changes).double().train()
    segments = random_ids(2, 4 * tgt_len).split(tgt_len, dim=1)
    targets = random_ids(2, 4 * tgt_len, seed=1).split(tgt_len, dim=1)
    fast = train_fast(network, segments, targets)
    found = gradients(network)

    rows = [SlowCompressive(network, network.config.reach) for _ in range(2)]
    for ids, wanted, (nll, auxiliary, memory) in zip(segments, targets, fast, strict=True):
        read = [row.read(ids[number]) for number, row in enumerate(rows)]
        hidden = torch.stack([of for of, _ in read])
        expected = network.score(ModelOutput(hidden, (), None), wanted)
        # The mean over both rows of a block's loss, and the sum over blocks.
        losses = [torch.stack(of).mean() for of in zip(*(losses for _, losses in read), strict=True)]
        (expected.mean() + sum(losses)).backward()
        torch.testing.assert_close(nll, expected.detach())
        assert (auxiliary is None) == (not losses)
        if losses:
            torch.testing.assert_close(auxiliary.detach(), sum(losses).detach())
        for number in (0, 2):
            inputs, _, compressed = memory[number]
            if not any(row.waiting[number] for row in rows):
                close(inputs, [row.memory[number] for row in rows])
            close(compressed, [row.compressed[number] for row in rows])
    expected = gradients(network)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def close(found, rows):
    if found is None or found.shape[1] == 0:
        assert rows == [[], []]
    else:
        assert not found.requires_grad
        torch.testing.assert_close(found, torch.stack([torch.stack(row) for row in rows]).detach())


# What it must not change


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("function, loss", [each for each in KINDS if each[0] in TRAINED])
def test_the_auxiliary_loss_trains_the_compression_alone(function, loss, norm):
    """And with `bptt`, where there is none, the loss of the network reaches it, through the step that attends."""
    network = make_network("cfc", **settings(function, loss, norm=norm)).train()
    segments = random_ids(2, 16).split(4, dim=1)
    memory = network(segments[1], network(segments[0]).memory).memory
    output = network(segments[2], memory)
    compressing = network.compression_names()
    assert {name.split(".")[2] for name in compressing} == {"compression"}
    if loss == "bptt":
        assert output.loss is None
        network.score(output, segments[3]).mean().backward()
        reached = {name for name, of in gradients(network).items() if of.abs().sum() > 0}
        assert compressing <= reached
        return
    assert output.loss > 0
    output.loss.backward(retain_graph=True)
    assert gradients(network).keys() == compressing
    network.score(output, segments[3]).mean().backward()
    assert not gradients(network).keys() & compressing


@pytest.mark.parametrize("function", COMPRESSORS)
def test_what_has_nothing_to_train_has_no_loss(function):
    network = make_network("c", **settings(function)).train()
    trained = function in TRAINED
    assert (network(random_ids(2, 12)).loss is not None) == trained
    assert bool(network.compression_names()) == trained


def test_evaluation_has_no_auxiliary_loss_and_no_gradients():
    network, ids = make_network("c", **settings()), random_ids(2, 12)
    assert network(ids).loss is None
    with torch.no_grad():
        assert network.train()(ids).loss is None


@pytest.mark.parametrize("function, loss", KINDS)
def test_memory_passes_no_gradient(function, loss):
    network, vectors = make_network("cc", **settings(function, loss)).train(), []
    network.embedding.register_forward_hook(lambda *call: vectors.append(call[-1]))
    memory = None
    for ids in random_ids(2, 16).split(4, dim=1):
        output = network(ids, memory)
        memory = output.memory
    for block in memory:
        assert not any(part.requires_grad for part in block if part is not None)
    output.hidden.square().sum().backward(inputs=vectors)
    assert [of.grad is None for of in vectors] == [True, True, True, False]


@pytest.mark.parametrize("function", COMPRESSORS)
@pytest.mark.parametrize("distance", ["slots", "tokens"])
@torch.no_grad()
def test_rows_do_not_see_each_other(function, distance):
    network, ids = make_network("cfc", **settings(function, distance=distance)), random_ids(2, 24)
    changed = ids.clone()
    changed[1, 1] = (ids[1, 1] + 1) % 20
    before, after = (read_in_segments(network, text, 4)[0] for text in (ids, changed))
    differs = (before != after).any(-1)
    assert not differs[0].any()
    assert not differs[1, 0]
    assert differs[1, 1:14].all()  # memory alone would end before


@pytest.mark.parametrize("segments", [[24], [5, 1, 9, 2, 7], [1] * 24])
@pytest.mark.parametrize("arch", ["cfc", "scf"])
@torch.no_grad()
def test_segments_of_any_length_give_the_same_where_memory_spans_the_text(arch, segments):
    network, ids = make_network(arch, **settings(mem_len=24)), random_ids(2, 24)
    hidden, memory = [], None
    for part in ids.split(segments, dim=1):
        output = network(part, memory)
        memory = output.memory
        hidden.append(output.hidden)
    torch.testing.assert_close(torch.cat(hidden, 1), network(ids).hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", [[6] * 5, [4, 7, 1, 1, 9, 8]])
@pytest.mark.parametrize("function", COMPRESSORS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_keys_and_values_as_memory_give_the_same_result(segments, function, variant):
    network, memory, cached = make_network("cfsc", **settings(function, ratio=3, **variant)), None, None
    for ids in random_ids(2, 30).split(segments, dim=1):
        expected, found = network(ids, memory), network(ids, cached, inference=True)
        memory, cached = expected.memory, found.memory
        torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-5, rtol=1e-5)
    assert [of and of[1] for of in cached if isinstance(of, tuple)] != [None, None]


@torch.no_grad()
def test_lengths_of_a_call_go_before_the_configured():
    network, ids = make_network("cc", **settings()), random_ids(2, 40)
    longer = make_network("cc", **settings(mem_len=6, cmem_len=5))
    found = read_in_segments(network, ids, 4, reach=reach(6, 5))[0]
    assert torch.equal(found, read_in_segments(longer, ids, 4)[0])
    plain = make_network("ss", mem_len=4)
    plain.load_state_dict({name: of for name, of in network.state_dict().items() if "compression" not in name})
    found = read_in_segments(network, ids, 4, reach=reach(4, 0))[0]
    torch.testing.assert_close(found, read_in_segments(plain, ids, 4)[0])


def test_convolutions_begin_as_the_mean_and_decoders_as_copies():
    torch.manual_seed(0)
    from parnas.architecture import Architecture
    from parnas.model.transformer_xl import TransformerXL

    old = torch.randn(2, 8, 8)
    made = TransformerXL.build(make_network("c", **settings("conv", "autoencode")).config, Architecture("c"), 20)
    compression = made.blocks[0].compression
    new = compression.compressor(old)
    torch.testing.assert_close(new, old.unflatten(1, (4, 2)).mean(2))
    torch.testing.assert_close(compression.decoder(new), torch.cat([new, new], -1))


# In a SuperNet


@pytest.mark.parametrize("function, loss", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_all_candidates_remember_whichever_ran(function, loss, training):
    """A path through other layers leaves the memory that the candidate itself would have."""
    from parnas.model.estimators import make_path

    space = ("s", "c", "f", "i")
    network = make_supernet(1, space, **settings(function, loss)).train(training)
    paths = {name: make_path(torch.eye(4)[[number]]) for number, name in enumerate(space)}
    left = {}
    for name, path in paths.items():
        memory = None
        for ids in random_ids(2, 20).split(4, dim=1):
            output = network(ids, memory, path)
            memory = output.memory
            compressed = memory[0][1][2] is not None
            learns = training and name == "c" and loss != "bptt" and function in TRAINED
            assert (output.loss is not None) == (compressed and learns)
        left[name] = memory[0]
    for name in "sfi":
        torch.testing.assert_close(left[name][0], left["c"][0])
        for part, expected in zip(left[name][1], left["c"][1], strict=True):
            assert (part is None) == (expected is None)
            if part is not None:
                torch.testing.assert_close(part, expected)


@torch.no_grad()
def test_extracted_network_equals_the_path_and_keeps_compression_where_it_is_used():
    from parnas.architecture import Architecture
    from parnas.model.estimators import make_path

    space = ("s", "c", "f")
    network, ids = make_supernet(3, space, **settings(distance="tokens")), random_ids(2, 24)
    for arch in ("scf", "ccs", "fsc"):
        extracted = network.extract(Architecture(arch))
        path = make_path(torch.eye(3)[[space.index(letter) for letter in arch]])
        expected = read_in_segments(network, ids, 4, gates=path)[0]
        torch.testing.assert_close(read_in_segments(extracted, ids, 4)[0], expected, atol=1e-5, rtol=1e-5)
        names = extracted.compression_names()
        assert {int(name.split(".")[1]) for name in names} == {place for place, of in enumerate(arch) if of == "c"}
