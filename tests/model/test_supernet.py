"""The SuperNet: its mixture, its probabilities, and the networks taken out of it."""

import itertools

import pytest
import torch
from helpers.model_helpers import make_network, make_supernet, near, random_ids, reach, read_in_segments
from helpers.supernet_helpers import SPACE, VARIANTS, draw_gates, generator, one_hot
from torch._dynamo.utils import counters
from torch.nn import functional as F

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.model.estimators import ESTIMATORS, drop_candidates, make_path
from parnas.model.gates import ABSENT, PathGate

STRINGS = ["".join(letters) for letters in itertools.product(SPACE, repeat=2)]


# The mixture


def test_output_is_the_sum_of_the_candidates_by_gate():
    network, ids, gates = make_supernet(1), random_ids(2, 5), torch.tensor([[0.2, 1.7, -0.4]])
    outputs = [network(ids, gates=one_hot(letter)).hidden for letter in SPACE]
    expected = sum(gate * output for gate, output in zip(gates[0], outputs, strict=True))
    near(network(ids, gates=gates).hidden, expected)


@pytest.mark.parametrize("training", [True, False])
def test_without_gates_the_network_is_free_of_noise_and_uses_pi(training):
    network, ids = make_supernet().train(training), random_ids(2, 5)
    hidden = network(ids).hidden
    assert torch.equal(network(ids).hidden, hidden)
    assert torch.equal(network(ids, gates=network.pi()).hidden, hidden)
    drawn = draw_gates("soft", network.alpha(), 1.0)
    assert not torch.allclose(network(ids, gates=drawn).hidden, hidden, atol=1e-3)


def test_pi_is_the_softmax_of_alpha():
    network = make_supernet()
    near(network.pi(), torch.stack([alpha.exp() / alpha.exp().sum() for alpha in network.alphas()]).detach())
    for block, row in zip(network.blocks, network.pi(), strict=True):
        near(block.pi(), row)
    assert not network.pi().requires_grad
    assert (network.pi() > 0).all()


@pytest.mark.parametrize("gates", ["none", "soft", "straight_through"])
def test_every_alpha_gets_a_gradient_where_each_candidate_runs(gates):
    network, ids = make_supernet(), random_ids(2, 6)
    drawn = None if gates == "none" else draw_gates(gates, network.alpha(), 1.0, generator())
    network.nll(ids, ids, gates=drawn)[0].mean().backward()
    assert all((alpha.grad.abs() > 0).all() for alpha in network.alphas())
    if gates != "straight_through":
        assert all(weight.grad.abs().sum() > 0 for weight in network.weights().values() if weight.numel())


@pytest.mark.parametrize("gates", ["none", "soft", "straight_through", "single_path"])
@pytest.mark.parametrize("letter", SPACE)
def test_a_candidate_near_zero_comes_back(letter, gates):
    """Probabilities that were clamped at zero would get no gradient and stay there."""
    network, ids = make_supernet(1).requires_grad_(False), random_ids(1, 4)
    wanted = network(ids, gates=one_hot(letter)).hidden
    alpha = network.alphas()[0].requires_grad_()
    with torch.no_grad():
        alpha.copy_(torch.tensor([-3.0 if other == letter else 3.0 for other in SPACE]))
    optimizer, noise = torch.optim.Adam([alpha], 0.5), generator()
    assert network.pi()[0, SPACE.index(letter)] < 0.002
    for _ in range(30):
        drawn = None if gates == "none" else draw_gates(gates, network.alpha(), 1.0, noise)
        optimizer.zero_grad()
        (network(ids, gates=drawn).hidden - wanted).square().mean().backward()
        optimizer.step()
    assert str(network.argmax_architecture()) == letter


def test_parameters_are_alphas_and_weights():
    network = make_supernet()
    alphas, weights = ({id(p) for p in group} for group in (network.alphas(), network.weights().values()))
    assert len(alphas) == 3
    assert not alphas & weights
    assert alphas | weights == {id(p) for p in network.parameters()}


@pytest.mark.parametrize("space", [("s", "f", "i"), ("i", "s"), ("f",)])
def test_architecture_is_the_likeliest_candidate_and_the_first_of_equals(space):
    network = make_supernet(2, space)
    with torch.no_grad():
        for number, alpha in enumerate(network.alphas()):
            alpha.zero_()
            alpha[-1] = number
    assert str(network.argmax_architecture()) == space[0] + space[-1]


def test_blocks_store_memory_whichever_path_ran():
    network, ids = make_supernet(), random_ids(2, 5)
    memory = network(ids, gates=one_hot("ffi")).memory
    assert [tuple(kept.shape) for kept, _, _ in memory] == [(2, 5, 8)] * 3
    assert [rest for _, *rest in memory] == [[None, None]] * 3
    without = make_supernet(2, ("f", "i"))
    assert without(ids).memory == (None, None)
    assert without.u is None


def test_multiply_adds_are_those_of_all_candidates():
    settings, counts = (5, reach(6)), [1] * 20
    alone = {arch: make_network(arch).multiply_adds(*settings, counts) for arch in ("s", "f", "sf")}
    head = alone["s"] + alone["f"] - alone["sf"]
    assert make_supernet(3).multiply_adds(*settings, counts) == pytest.approx(3 * (alone["sf"] - head) + head)


# Extraction


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_extracted_network_equals_the_supernet_with_one_hot_gates(variant):
    network, ids = make_supernet(2, **variant), random_ids(2, 6)
    for arch in STRINGS[:-1]:  # all but identity alone
        extracted = network.extract(Architecture(arch))
        expected, _ = read_in_segments(network, ids, 3, gates=one_hot(arch))
        near(read_in_segments(extracted, ids, 3)[0], expected)
        near(extracted.nll(ids, ids)[0], network.nll(ids, ids, gates=one_hot(arch))[0])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_extracted_network_is_independent_and_of_plain_shape(variant):
    network, ids = make_supernet(**variant), random_ids(2, 6)
    extracted = network.extract(Architecture("sif"))
    expected, plain = extracted(ids).hidden, make_network("sf", **variant)
    of_network, of_extracted = (
        {p.untyped_storage().data_ptr() for p in owner.parameters() if p.numel()} for owner in (network, extracted)
    )
    assert not of_network & of_extracted
    assert [(n, p.shape) for n, p in extracted.named_parameters()] == [
        (n, p.shape) for n, p in plain.named_parameters()
    ]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    assert torch.equal(extracted(ids).hidden, expected)


@pytest.mark.parametrize("training", [True, False])
def test_extracted_network_keeps_the_mode(training):
    assert make_supernet().train(training).extract(Architecture("sfs")).training is training


@pytest.mark.parametrize("arch, message", [("sf", "has 2 blocks"), ("sfi", "block 3 .* s, f")])
def test_extracting_what_is_not_there_is_refused(arch, message):
    with pytest.raises(ParnasError, match=message):
        make_supernet(3, ("s", "f")).extract(Architecture(arch))


def test_identity_alone_gives_a_network_without_blocks():
    """A search may pass through it, so it must be possible to score it."""
    network = make_supernet().extract(Architecture("iii"))
    tokens = torch.randint(network.vocab_size, (2, 5))
    nll, memory = network.nll(tokens, tokens)
    assert nll.isfinite().all()
    assert memory == ()


# Names with options, and blocks with candidates of their own

SIZES = ("s", "f:d_inner=5", "s:heads=1", "i", "s:heads=3,d_head=2")
MIXED = (("s:heads=1", "f", "s"), ("f",), ("i", "s:heads=1", "f:d_inner=5"))
UNION = ("s:heads=1", "f", "s", "i", "f:d_inner=5")


def choose(names, space):
    return F.one_hot(torch.tensor([space.index(name) for name in names]), len(space)).float()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("space", [SIZES, MIXED], ids=["sizes", "mixed"])
@torch.no_grad()
def test_inference_equals_training_with_several_attention_candidates(space, variant):
    """Their keys and values lie behind each other in one memory; none may read another's."""
    network, ids = make_supernet(3, space, **variant), random_ids(2, 9)
    path = ["s", "f", "s:heads=1"] if space is MIXED else ["s:heads=3,d_head=2", "s", "s:heads=1"]
    hard = choose(path, network.space)
    single = [PathGate(row, int(row.argmax())) for row in hard]
    for gates in (None, hard, single):
        expected, _ = read_in_segments(network, ids, 3, gates=gates)
        near(read_in_segments(network, ids, 3, gates=gates, inference=True)[0], expected)
    near(read_in_segments(network.extract(Architecture(path)), ids, 3, inference=True)[0], expected)


@torch.no_grad()
def test_networks_taken_out_of_every_space_equal_it():
    network, ids = make_supernet(3, MIXED), random_ids(2, 6)
    for path in itertools.product(*MIXED):
        extracted = network.extract(Architecture(path))
        near(extracted(ids).hidden, network(ids, gates=choose(path, UNION)).hidden)
        plain = make_network(str(Architecture(path)))
        assert [(n, p.shape) for n, p in extracted.named_parameters()] == [
            (n, p.shape) for n, p in plain.named_parameters()
        ]


def test_shared_biases_are_there_only_where_a_layer_uses_them():
    assert make_network("s:heads=1 f").u is None
    assert make_network("s:heads=1 s").u is not None
    assert make_supernet(2, ("s:heads=1", "f")).u is None


def test_what_a_block_lacks_has_no_probability_and_no_layer():
    network = make_supernet(3, MIXED)
    assert network.space == UNION
    for row, block, names in zip(network.pi(), network.blocks, MIXED, strict=True):
        assert [name for name, p in zip(UNION, row.tolist(), strict=True) if p > 0] == [n for n in UNION if n in names]
        assert row.sum() == pytest.approx(1)
        assert set(block.candidates) == set(names)
        near(row, block.pi().detach())
    assert network.pi()[1].tolist() == [0, 1, 0, 0, 0]
    with torch.no_grad():
        for alpha in network.alphas():
            alpha.copy_(torch.tensor([0.0, -50.0, -50.0, 0.1, 50.0]))
    assert network.argmax_architecture().layers == ("s:heads=1", "f", "f:d_inner=5")


@pytest.mark.parametrize("path", [("i", "f", "i"), ("s", "s", "i"), ("s", "f", "s")])
def test_a_layer_that_its_block_lacks_is_not_extracted(path):
    with pytest.raises(ParnasError, match=r"block \d has no candidate"):
        make_supernet(3, MIXED).extract(Architecture(path))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("tau", [1e-3, 0.5, 1e4])
def test_estimators_respect_what_blocks_lack(estimator, tau):
    """Nothing absent is drawn or probed, and no gradient is NaN, that of the temperature included."""
    network, ids, noise = make_supernet(3, MIXED), random_ids(1, 4), generator()
    drawing, temperature = ESTIMATORS[estimator](3, MIXED), torch.tensor(tau, requires_grad=True)
    absent = torch.tensor([[name not in names for name in UNION] for names in MIXED])
    assert drawing.space == UNION
    seen = set()
    for _ in range(20):
        network.zero_grad()
        gates = drawing.sample_gates(network.alpha(), temperature, noise)
        if isinstance(gates, torch.Tensor):
            weights = gates
        else:
            weights = torch.stack([gate.weights for gate in gates])
            for block, gate in enumerate(gates):
                ran = {gate.chosen, gate.probed} - {None}
                assert not any(absent[block, index] for index in ran)
                seen |= {(block, gate.probed)}
        assert (weights[absent] == 0).all()
        loss = network.nll(ids, ids, gates=gates)[0].mean()
        if estimator == "uniform":
            loss = drawing.arch_loss(network.alpha(), temperature, lambda _, loss=loss: loss, noise) + 0 * temperature
        loss.backward()
        for gradient in [alpha.grad for alpha in network.alphas()] + [temperature.grad]:
            assert gradient.isfinite().all()
        assert (torch.stack([alpha.grad for alpha in network.alphas()])[absent] == 0).all()
        assert (network.alphas()[1].grad == 0).all()
    if estimator == "single_path" and tau == 0.5:
        assert {block for block, probed in seen if probed is not None} == {0, 2}


def test_one_list_is_that_list_for_each_block():
    shared, spelt, ids = make_supernet(3), make_supernet(3, [SPACE] * 3), random_ids(2, 5)
    assert shared.state_dict().keys() == spelt.state_dict().keys()
    assert torch.equal(shared(ids).hidden, spelt(ids).hidden)


def test_candidates_are_dropped_with_their_probability_but_never_all():
    alpha, noise = torch.tensor([[1.0, 2.0, 3.0], [0.5, ABSENT, ABSENT]]), generator()
    drawn = torch.stack([drop_candidates(alpha, 0.4, noise) for _ in range(4000)])
    dropped = (drawn <= ABSENT).float()
    assert (dropped.mean(dim=-1) < 1).all()
    near(dropped.mean(dim=0)[1], torch.tensor([0.0, 1.0, 1.0]))
    # Where all three would go, none goes: p - p³ for each.
    near(dropped.mean(dim=0)[0], torch.full((3,), 0.4 - 0.4**3), atol=0.03)
    assert torch.equal(torch.where(drawn <= ABSENT, alpha, drawn), alpha.expand_as(drawn))


def test_a_compiled_supernet_is_compiled_by_layer_and_not_by_path():
    def run(blocks, compiled):
        """Return the outputs of five random paths, and the number of compiled graphs."""
        torch._dynamo.reset()
        counters.clear()
        network, draw, outputs = make_supernet(blocks), generator(), []
        if compiled:
            network.compile(backend="eager")  # traces as any backend, and generates no code
        for _ in range(5):
            chosen = torch.randint(0, len(SPACE), (blocks,), generator=draw)
            path = make_path(F.one_hot(chosen, len(SPACE)).float())
            outputs.append(network(random_ids(2, 5), gates=path).hidden)
        return torch.stack(outputs), counters["stats"]["unique_graphs"]

    eager, none = run(6, compiled=False)
    compiled, graphs = run(6, compiled=True)
    near(compiled, eager)
    assert none == 0
    assert 0 < run(3, compiled=True)[1] == graphs, "as many for 3 blocks as for 6"
