"""Estimators: gates, single paths and probes."""

import pytest
import torch
from helpers.model_helpers import make_supernet, near, random_ids
from helpers.supernet_helpers import SPACE, VARIANTS, draw_gates, generator, one_hot
from torch.nn import functional as F

from parnas.model.estimators import ESTIMATORS, Probe, ProbedSinglePath, gumbel_softmax, harden
from parnas.model.gates import PathGate

GUMBEL = ["soft", "straight_through", "gdas", "single_path"]


def random_alpha(blocks=4, seed=0):
    return 2 * torch.randn(blocks, 3, generator=torch.Generator().manual_seed(seed))


# Gates


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tau", [0.1, 1.0, 5.0])
def test_gumbel_softmax_equals_loops_over_its_noise(seed, tau):
    alpha = random_alpha(seed=seed)
    uniform = (-torch.empty(4, 3).exponential_(generator=generator(seed))).exp().double()
    noisy = [
        [(a - (-u.log()).log()) / tau for a, u in zip(*rows, strict=True)] for rows in zip(alpha, uniform, strict=True)
    ]
    expected = [[x.exp() / sum(y.exp() for y in row) for x in row] for row in noisy]
    near(gumbel_softmax(alpha, tau, generator(seed)), torch.tensor(expected).float())


def test_likeliest_gate_is_drawn_with_probability_pi():
    """The Gumbel-max trick, whatever the temperature."""
    alpha = random_alpha(1)
    drawn = gumbel_softmax(alpha.expand(40_000, 3), 0.7, generator()).argmax(-1)
    near(drawn.bincount(minlength=3) / 40_000, alpha[0].softmax(-1), atol=0.01)


def test_straight_through_is_one_hot_with_the_soft_gradient():
    alpha, weights = random_alpha().requires_grad_(), random_alpha(seed=1)
    soft, hard = (draw_gates(estimator, alpha, 0.5, generator()) for estimator in GUMBEL[:2])
    assert torch.equal(hard, F.one_hot(soft.argmax(-1), 3).float())
    slopes = [torch.autograd.grad((gates * weights).sum(), alpha)[0] for gates in (soft, hard)]
    near(slopes[1], slopes[0])
    assert slopes[0].abs().min() > 0
    assert torch.equal(harden(soft), hard)


def test_low_temperature_is_nearly_discrete_and_high_nearly_even():
    alpha = random_alpha(100)
    assert gumbel_softmax(alpha, 0.01, generator()).max(-1).values.median() > 0.999
    assert (gumbel_softmax(alpha, 1e4, generator()) - 1 / 3).abs().max() < 0.01


def test_temperature_can_be_learnt():
    tau = torch.tensor(0.7, requires_grad=True)
    gumbel_softmax(random_alpha(), tau, generator())[0, 0].backward()
    assert tau.grad.abs() > 0


def test_estimators_that_train_single_paths_say_so():
    single = {name for name, estimator in ESTIMATORS.items() if estimator.one_hot}
    assert single == {"straight_through", "gdas", "single_path", "uniform"}


# Single paths


def path(arch, alpha=None, probe=None):
    """The gates of a path, with a gradient where alpha is given."""
    weights = one_hot(arch) if alpha is None else one_hot(arch) + alpha - alpha.detach()
    probed = {} if probe is None else {probe[0]: probe[1]}
    rows = zip(weights.unbind(), arch, strict=True)
    return [PathGate(row, SPACE.index(letter), probed.get(block)) for block, (row, letter) in enumerate(rows)]


def loss_and_gradients(network, ids, gates):
    network.zero_grad()
    nll, memory = network.nll(ids, ids.flip(1), gates=gates)
    nll.mean().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return [nll.detach(), *memory], gradients


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("arch", ["sfi", "iss", "fff"])
def test_a_single_path_is_the_mixture_with_one_hot_gates(arch, variant):
    """Loss, memories and the gradients of all that ran; what did not run has none, where the mixture's are zero."""
    network, ids = make_supernet(**variant), random_ids(2, 6)
    found, gradients = loss_and_gradients(network, ids, path(arch, torch.zeros(3, 3, requires_grad=True), (0, 0)))
    expected, of_mixture = loss_and_gradients(network, ids, one_hot(arch))
    near(found, expected)
    for name, gradient in of_mixture.items():
        near(gradients.get(name, torch.zeros_like(gradient)), gradient)


@pytest.mark.parametrize("arch, probe", [("sfi", (1, 0)), ("iss", (0, 1)), ("fff", None)])
def test_gates_that_ran_have_the_gradient_of_the_mixture_less_that_of_identity(arch, probe):
    network, ids = make_supernet(), random_ids(2, 6)
    leaf, whole = torch.zeros(3, 3, requires_grad=True), one_hot(arch).requires_grad_()
    loss_and_gradients(network, ids, path(arch, leaf, probe))
    loss_and_gradients(network, ids, whole)
    expected = whole.grad - whole.grad[:, SPACE.index("i"), None]
    ran = one_hot(arch).bool()
    if probe is not None:
        ran[probe] = True
    near(leaf.grad, torch.where(ran, expected, 0.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("means", [0.0, 0.3])
def test_mean_over_all_probes_is_the_gradient_of_straight_through(seed, means, monkeypatch):
    """Without bias, whatever the running means are; gdas has one."""
    network, ids = make_supernet(), random_ids(2, 6)
    for alpha, row in zip(network.alphas(), random_alpha(3, seed), strict=True):
        alpha.data.copy_(row)

    def alpha_gradient(estimator):
        torch.manual_seed(0)
        drawn = estimator.sample_gates(network.alpha(), 0.7, generator(seed))
        loss_and_gradients(network, ids, drawn)
        return torch.stack([alpha.grad for alpha in network.alphas()]), drawn

    expected, _ = alpha_gradient(ESTIMATORS["straight_through"](3, SPACE))
    biased, drawn = alpha_gradient(ESTIMATORS["gdas"](3, SPACE))
    unknown = [ProbedSinglePath(3, SPACE).unobserved(block, gate.chosen) for block, gate in enumerate(drawn)]
    places = [(block, candidate) for block, candidates in enumerate(unknown) for candidate in candidates]
    mean, total = torch.zeros(3, 3), 0.0
    for block, candidate in places:
        probe = Probe(block, candidate, 1 / (3 * len(unknown[block])))
        estimator = ProbedSinglePath(3, SPACE)
        estimator.means.fill_(means)
        monkeypatch.setattr(estimator, "_sample_probe", lambda chosen, generator, probe=probe: probe)
        mean += probe.probability * alpha_gradient(estimator)[0]
        total += probe.probability
    assert total == pytest.approx(1)
    near(mean, expected)
    assert not torch.allclose(biased, expected, atol=1e-4)


def test_probes_are_drawn_from_all_that_is_unknown_with_their_probability():
    estimator, noise = ProbedSinglePath(3, SPACE), generator()
    chosen = [SPACE.index(letter) for letter in "sif"]
    drawn = [estimator._sample_probe(chosen, noise) for _ in range(6000)]
    for place, expected in {(0, 1): 1 / 3, (1, 0): 1 / 6, (1, 1): 1 / 6, (2, 0): 1 / 3}.items():
        probes = [probe for probe in drawn if (probe.block, probe.candidate) == place]
        assert probes[0].probability == pytest.approx(expected)
        assert len(probes) / len(drawn) == pytest.approx(expected, abs=0.02)
    assert ProbedSinglePath(1, ("s", "i"))._sample_probe([0], noise) is None


def test_running_means_follow_what_is_probed():
    estimator = ProbedSinglePath(1, SPACE)
    for _ in range(200):
        estimator._complete(torch.tensor([[0.0, 2.0, 0.0]]), [2], Probe(0, 1, 0.5))
    near(estimator.means, torch.tensor([[0.0, 2.0, 0.0]]))
    completed = estimator._complete(torch.tensor([[0.0, torch.inf, 0.0]]), [2], Probe(0, 1, 0.5))
    assert not completed.isfinite().all()
    near(estimator.means, torch.tensor([[0.0, 2.0, 0.0]]))


def test_nothing_is_probed_where_alpha_is_not_trained():
    gates = draw_gates("single_path", random_alpha(3), 1.0, generator())
    assert [gate.probed for gate in gates] == [None] * 3
    assert not any(gate.weights.requires_grad for gate in gates)
