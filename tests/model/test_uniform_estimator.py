"""The estimator that trains weights on uniform paths, and alpha by a fit of losses."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import make_supernet, random_ids
from helpers.supernet_helpers import SPACE, generator
from safetensors.torch import load_file

from parnas.architecture import Architecture
from parnas.data.batching import TrainingBatches
from parnas.data.streams import prepare
from parnas.model.estimators import MEAN_RIDGE, RIDGE, UniformPath
from parnas.nas.cost import count_costs
from parnas.nas.derive import derive
from parnas.nas.rerank import held_out, held_out_losses, losses_of_run
from parnas.nas.search import SearchTask, make_arch_batches, search
from parnas.runs.files import read_json
from parnas.runs.run import RERANK
from parnas.training.checkpoints import WEIGHTS
from parnas.training.loaded_run import load
from parnas.training.progress import Silent


def test_weights_get_every_layer_alike_and_identity_half_as_often() -> None:
    alpha = torch.tensor([[9.0, 0.0, -9.0], [0.0, 0.0, 30.0]], requires_grad=True)
    estimator, noise, counts = UniformPath(2, SPACE), generator(), torch.zeros(2, 3)
    for _ in range(3000):
        for block, gate in enumerate(estimator.sample_gates(alpha, 0.1, noise)):
            assert not gate.weights.requires_grad
            assert gate.probed is None
            counts[block, gate.chosen] += 1
    torch.testing.assert_close(counts / 3000, torch.tensor([[0.4, 0.4, 0.2]] * 2), atol=0.03, rtol=0)


def test_paths_of_a_step_differ_and_each_layer_keeps_its_share() -> None:
    estimator, noise, counts = UniformPath(2, SPACE), generator(), torch.zeros(4, 2, 3)
    alpha = torch.tensor([[9.0, 0.0, -9.0], [0.0, 0.0, 30.0]])
    for _ in range(3000):
        paths = estimator.sample_several(4, alpha, 0.1, noise)
        for block in range(2):
            chosen = [path[block].chosen for path in paths]
            # Of four samples with probabilities 0.4, 0.4 and 0.2, each index has 4 times its probability, rounded.
            assert [chosen.count(index) for index in range(3)] in ([2, 2, 0], [2, 1, 1], [1, 2, 1])
            for place, index in enumerate(chosen):
                counts[place, block, index] += 1
    torch.testing.assert_close(counts / 3000, torch.tensor([0.4, 0.4, 0.2]).expand(4, 2, 3), atol=0.03, rtol=0)


@pytest.mark.parametrize("target", [0.9, 0.5, 0.31])
def test_paths_within_a_target_cost_it_on_average_and_are_as_uniform_as_can_be(target: float) -> None:
    space, costs = ("s", "k", "f", "i"), torch.tensor([0.12, 0.04, 0.05, 0.025])
    estimator, uniform = UniformPath(12, space), UniformPath(12, space).probabilities
    estimator.limit_cost(costs, target)
    found = estimator.probabilities
    if target == 0.9:
        assert torch.equal(found, uniform), "uniform paths cost less already"
        return
    assert (found * costs).sum() == pytest.approx(target, rel=1e-4)
    assert found.sum(dim=-1).tolist() == pytest.approx([1.0] * 12)
    # With the least KL divergence from uniform sampling, log(found / uniform) is linear in the cost.
    log_ratio = (found / uniform).log()[0]
    slopes = (log_ratio[:3] - log_ratio[3]) / (costs[:3] - costs[3])
    assert slopes.tolist() == pytest.approx([slopes[0].item()] * 3, rel=1e-3)
    assert slopes[0] < 0


def test_paths_within_a_target_have_no_layer_that_a_block_lacks() -> None:
    estimator = UniformPath(2, (("s", "f"), ("f", "i")))
    estimator.limit_cost(torch.tensor([0.5, 0.2, 0.0]), 0.21)  # of s, f, i
    assert estimator.probabilities[0, 2] == estimator.probabilities[1, 0] == 0
    assert estimator.probabilities[0, 1] > 0.9


def test_a_layer_that_a_block_lacks_may_be_the_cheapest_of_all() -> None:
    """At high prices, its difference to the block's cheapest layer would overflow."""
    estimator = UniformPath(2, (("s", "f"), ("s", "f", "i")))
    estimator.limit_cost(torch.tensor([0.5, 0.2, 0.0]), 0.2001)
    found = estimator.probabilities
    assert found.isfinite().all()
    assert found[0, 1] > 0.99
    assert found[1, 2] > 0.99


def test_the_search_samples_paths_within_its_target(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, used = UniformPath.sample_several, list[torch.Tensor]()

    def sample_several(self: UniformPath, *given: Any) -> Any:
        used.append(self.probabilities)
        return original(self, *given)

    monkeypatch.setattr(UniformPath, "sample_several", sample_several)
    means = []
    for within in (False, True):
        settings = {"search__estimator": "uniform", "search__cost__metric": "macs", "search__cost__target": 0.4}
        config = small_config(corpus, **settings, search__paths_within_target=within)
        run = search(config, tmp_path / str(within), Silent())
        costs = count_costs(run.config(), "macs").relative(run.config().search.candidates)
        means.append((used[-1] * costs).sum().item())
    assert means[0] > 0.4
    assert means[1] == pytest.approx(0.4, rel=1e-3)


def test_a_layer_that_a_block_lacks_is_in_no_path() -> None:
    estimator, noise = UniformPath(2, (("s", "f"), ("f", "i"))), generator()
    for _ in range(200):
        for path in estimator.sample_several(2, torch.zeros(2, 3), 0.1, noise):
            assert path[0].chosen in (0, 1)
            assert path[1].chosen in (1, 2)


def test_fine_tuning_samples_the_selected_path_and_with_probability_tau_a_layer_by_pi() -> None:
    alpha = torch.tensor([[0.4, 0.1, 0.0], [0.0, -0.2, 0.3]], requires_grad=True)
    estimator, noise, counts = UniformPath(2, SPACE), generator(), torch.zeros(2, 3)
    selected = torch.tensor([[0, 1, 0], [1, 0, 0]])
    estimator.select(selected)
    for _ in range(4000):
        for block, gate in enumerate(estimator.sample_gates(alpha, 0.25, noise)):
            assert not gate.weights.requires_grad
            counts[block, gate.chosen] += 1
    expected = 0.75 * selected + 0.25 * alpha.detach().softmax(dim=-1)
    torch.testing.assert_close(counts / 4000, expected, atol=0.03, rtol=0)


def test_paths_are_sampled_without_a_value_from_the_device() -> None:
    """Tensors on the device `meta` have no values, so that an estimator that reads one fails."""
    on_cpu, on_device = torch.zeros(3, 3), torch.zeros(3, 3, device="meta")
    for selected in (None, torch.eye(3, dtype=torch.long)):
        estimator = UniformPath(3, SPACE)
        if selected is not None:
            estimator.select(selected)
        found = [estimator.sample_several(2, alpha, 0.0, generator()) for alpha in (on_cpu, on_device)]
        assert [[gate.chosen for gate in path] for path in found[0]] == [
            [gate.chosen for gate in path] for path in found[1]
        ]
        assert all(gate.weights.device.type == "meta" for path in found[1] for gate in path)


def test_weights_are_fine_tuned_on_the_selected_path(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected: list[torch.Tensor | None] = []
    original = UniformPath.sample_several

    def spy(self: UniformPath, *arguments: object) -> object:
        selected.append(self.selected)
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(UniformPath, "sample_several", spy)
    changes = {
        "search__steps": 20,
        "search__uniform_fraction": 0.5,
        "search__alpha_start_step": 2,
        "search__alpha_lr": 0.3,
    }
    config = small_config(corpus, search__cost__target=0.65, search__estimator="uniform", **changes)
    run = search(config, tmp_path / "run", Silent())
    found = derive(run)
    assert found.costs is not None
    assert found.costs.share(found.architecture) <= 0.65
    chosen = ["sfi".index(name) for name in found.architecture]
    assert all(each is None for each in selected[:10])
    assert all(each.argmax(dim=-1).tolist() == chosen for each in selected[10:])
    assert run.summary().arch == str(found.architecture) == str(load(run.folder).architecture)


def test_alpha_is_frozen_after_the_uniform_fraction(corpus: Path, tmp_path: Path) -> None:
    changes = {
        "search__steps": 40,
        "search__uniform_fraction": 0.5,
        "search__alpha_start_step": 10,
        "train__log_every": 1,
        "train__eval_every": 40,
    }
    run = search(small_config(corpus, search__estimator="uniform", **changes), tmp_path / "run", Silent())
    pi = {record.step: torch.tensor(record.pi) for record in run.pi_records()}
    uniform = torch.full((3, 3), 1 / 3)
    torch.testing.assert_close(pi[10], uniform)
    moved = [float((pi[step + 1] - pi[step]).abs().max()) for step in range(10, 40)]
    assert all(moved[step - 10] > 0 for step in range(10, 20, 4)), "alpha learns in every fourth step"
    assert not any(moved[10:])
    assert moved[8] < 0.5 * moved[0], "ever more slowly"


def test_arch_steps_read_held_out_text_without_gaps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a row's memory would not be what stands before its segment."""
    read: list[torch.Tensor] = []
    original = SearchTask._backward_held_out

    def spy(self: SearchTask, step: int, batches: TrainingBatches) -> None:
        read.append(torch.from_numpy(batches.batch(self.arch_optimizer.updates_before(step)).inputs))
        original(self, step, batches)

    monkeypatch.setattr(SearchTask, "_backward_held_out", spy)
    config = small_config(corpus, search__alpha_start_step=3, search__alpha_split=0.3, search__uniform_fraction=0.9)
    search(config, tmp_path / "run", Silent())
    tokens = held_out(config, prepare(config.data))
    rows = make_arch_batches(config, tokens)
    assert len(read) == 5
    for number, inputs in enumerate(read):
        assert inputs.tolist() == rows.batch(number).inputs.tolist()


def test_pairs_are_read_without_dropout_and_steps_with_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all paths are one network, the two of a pair have one loss."""
    differences: list[float] = []
    monkeypatch.setattr(UniformPath, "observe", lambda self, paths, losses: differences.append(float(losses)))
    config = small_config(corpus, search__space=("f",), model__dropout=0.5)
    run = search(config, tmp_path / "run", Silent())
    assert differences
    assert set(differences) == {0.0}
    plain = search(config.replace(model__dropout=0.0), tmp_path / "plain", Silent())
    assert run.metrics()[-1].loss != plain.metrics()[-1].loss


def test_weights_from_before_fine_tuning_are_kept(corpus: Path, tmp_path: Path) -> None:
    changes = {
        "search__uniform_fraction": 0.5,
        "search__alpha_start_step": 2,
        "search__steps": 12,
        "train__save_every": 6,
    }
    run = search(small_config(corpus, **changes), tmp_path / "run", Silent())
    shared, tuned = load(run.folder, supernet_weights=True), load(run.folder)
    assert (shared.step, tuned.step) == (6, 12)
    at_rest = load_file(run.checkpoints / "step-00000006" / "model.safetensors")
    assert all(torch.equal(value, at_rest[name]) for name, value in load_file(shared.checkpoint / WEIGHTS).items())
    looked = read_json(run.folder / RERANK)["networks"]
    loss_of = losses_of_run(run, Silent()).full
    assert [loss_of(Architecture(each["arch"])) for each in looked] == pytest.approx([each["loss"] for each in looked])
    without = search(small_config(corpus, search__rerank_top_k=0, **changes), tmp_path / "without", Silent())
    assert load(without.folder, supernet_weights=True).step == 6, "for a later re-ranking"
    fair = search(small_config(corpus, search__uniform_fraction=1.0, search__steps=8), tmp_path / "fair", Silent())
    assert not fair.supernet.exists(), "the last checkpoint is the same"


def test_the_time_of_reranking_counts_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tokens per second would be those of a training that took less time than it did, or less than none."""

    now, later = time.perf_counter, [0.0]

    def slowly(*arguments: Any) -> Any:
        later[0] += 10_000
        return held_out_losses(*arguments)

    monkeypatch.setattr(time, "perf_counter", lambda: now() + later[0])

    monkeypatch.setattr("parnas.nas.supernet_task.held_out_losses", slowly)
    changes = {"search__steps": 20, "search__uniform_fraction": 0.5, "train__log_every": 12, "train__eval_every": 10}
    run = search(small_config(corpus, **changes), tmp_path / "run", Silent())
    speeds = [line.tokens_per_s for line in run.metrics() if line.split == "train"]
    assert len(speeds) == 2
    assert min(speeds) > 12 * 4 * 8 / 5000, "in less than the time that the look takes"


def test_fit_equals_weighted_least_squares_with_a_ridge() -> None:
    estimator, noise = UniformPath(2, SPACE), generator()
    paths = torch.randint(-1, 2, (30, 2, 3), generator=noise).float()
    losses = torch.randn(30, generator=noise)
    for path, loss in zip(paths, losses, strict=True):
        estimator.observe(path, loss)
    assert estimator.forgetting == 1 - 1 / 40  # two blocks of two free numbers, ten pairs for each
    weights = torch.tensor([estimator.forgetting**age for age in range(29, -1, -1)]).sqrt()
    rows = torch.cat([weights[:, None] * paths.flatten(1), RIDGE**0.5 * torch.eye(6)])
    expected = torch.linalg.lstsq(rows, torch.cat([weights * losses, torch.zeros(6)])).solution
    torch.testing.assert_close(estimator.contributions(), expected.view(2, 3), atol=1e-4, rtol=1e-3)


def test_fit_with_a_block_ridge_equals_least_squares_for_means_and_deviations() -> None:
    """The slow twin has a column for the mean of each candidate, and one for each deviation from it."""
    estimator, noise = UniformPath(4, SPACE), generator()
    estimator.share_between_blocks(20.0)
    chosen = torch.randint(3, (2, 30, 4), generator=noise)
    one, other = torch.nn.functional.one_hot(chosen, 3).float()
    paths, losses = one - other, torch.randn(30, generator=noise)
    for path, loss in zip(paths, losses, strict=True):
        estimator.observe(path, loss)
    weights = torch.tensor([estimator.forgetting**age for age in range(29, -1, -1)]).sqrt()
    columns = torch.cat([paths.sum(dim=1), paths.flatten(1)], dim=1)
    ridge = torch.diag(torch.tensor([MEAN_RIDGE] * 3 + [20.0] * 12).sqrt())
    rows = torch.cat([weights[:, None] * columns, ridge])
    solution = torch.linalg.lstsq(rows, torch.cat([weights * losses, torch.zeros(15)])).solution
    found = estimator.contributions()
    torch.testing.assert_close(found, solution[:3] + solution[3:].view(4, 3), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.sum(dim=1), torch.zeros(4), atol=1e-4, rtol=0)
    assert found.std(dim=0).max() < 0.5 * found.mean(dim=0).abs().max(), "blocks are shrunk towards their mean"


def test_few_pairs_find_the_better_layer_of_all_blocks_with_a_block_ridge_alone() -> None:
    """Losses are noisy; the pairs suffice for the mean over blocks, not for each block by itself."""
    truth, noise = torch.tensor([0.0, 0.03, 0.1]), generator(1)
    plain, shared = UniformPath(8, SPACE), UniformPath(8, SPACE)
    shared.share_between_blocks(100.0)
    for _ in range(40):
        one, other = torch.nn.functional.one_hot(torch.randint(3, (2, 8), generator=noise), 3).float()
        loss = ((one - other) @ truth).sum() + 0.06 * torch.randn((), generator=noise)
        for estimator in (plain, shared):
            estimator.observe(one - other, loss)
    expected = truth - truth.mean()
    plain_error, shared_error = ((each.contributions() - expected).square().mean() for each in (plain, shared))
    assert shared_error < 0.5 * plain_error
    assert shared.contributions().argmin(dim=1).tolist() == [0] * 8


def test_a_loss_that_is_not_finite_is_in_the_gradient_and_not_in_the_fit() -> None:
    alpha, estimator = torch.zeros(2, 3, requires_grad=True), UniformPath(2, SPACE)
    losses = iter([1.0, 2.0, torch.inf, 1.0, 2.0, 1.0])
    finite = []
    for _ in range(3):
        loss = estimator.arch_loss(alpha, 1.0, lambda _: torch.tensor(next(losses)), generator())
        finite.append(bool(torch.autograd.grad(loss, alpha)[0].isfinite().all()))
    assert finite == [True, False, True]
    assert estimator.contributions().isfinite().all()


def test_alpha_learns_the_best_of_losses_that_add_up() -> None:
    """Pairs are read on the same text, so that what all paths have in common does not count."""
    truth = torch.tensor([[0.0, 0.3, 0.1], [0.5, 0.2, 0.6], [0.2, 0.2, 0.0]])
    alpha, estimator, noise = torch.zeros(3, 3, requires_grad=True), UniformPath(3, SPACE), generator()
    optimizer, text = torch.optim.Adam([alpha], lr=0.05), 5.0
    for step in range(300):
        text = 5.0 + step % 7

        def loss_of(gates: list, text: float = text) -> torch.Tensor:
            return text + sum(truth[block, gate.chosen] for block, gate in enumerate(gates))

        optimizer.zero_grad()
        estimator.arch_loss(alpha, 1.0, loss_of, noise).backward()
        optimizer.step()
    assert alpha.argmax(dim=-1).tolist() == [0, 1, 2]
    assert float(alpha.detach().softmax(dim=-1).max(dim=-1).values.min()) > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_that_of_the_loss_expected_under_pi(seed: int) -> None:
    estimator, alpha = UniformPath(2, SPACE), torch.randn(2, 3, generator=generator(seed), requires_grad=True)
    estimator.observe(torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]), torch.tensor(0.4))
    found = torch.autograd.grad(estimator.arch_loss(alpha, 1.0, lambda _: torch.tensor(1.0), generator(seed)), alpha)[0]
    fit, pi = estimator.contributions(), alpha.softmax(dim=-1)
    expected = sum((pi[0, a] * pi[1, b] * (fit[0, a] + fit[1, b])) for a, b in itertools.product(range(3), repeat=2))
    torch.testing.assert_close(found, torch.autograd.grad(expected, alpha)[0])


def test_arch_steps_leave_the_weights_alone() -> None:
    network, ids = make_supernet(), random_ids(2, 6)
    alpha = network.alpha()
    loss = UniformPath(3, SPACE).arch_loss(alpha, 1.0, lambda gates: network.nll(ids, ids, gates=gates)[0].mean())
    loss.backward()
    assert all(parameter.grad is None for parameter in network.weights().values())
    assert all(row.grad is not None for row in network.alphas())
