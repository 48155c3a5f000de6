"""Shrinking: the choice of layers to keep, and networks that inherit them."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.training_helpers import Notes, final_weights

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config
from parnas.errors import OverBudget, ParnasError
from parnas.nas.budget import Budget
from parnas.nas.cost import make_costs
from parnas.nas.rerank import NetworkLosses
from parnas.nas.shrink import select_layers, shrink
from parnas.runs.run import Run
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

COSTS = make_costs("latency", {"s": 4.0, "f": 1.0, "k": 1.0, "i": 0.0}, 4)  # the interleaved network costs 10
LAYERS = ("s", "k", "f", "s", "k", "f")
GAINS = (0.9, 0.1, 0.3, 0.2, 0.4, 0.05)  # by which each layer lowers the loss


def loss(architecture: Architecture) -> float:
    return 5 - sum(gain for gain, name in zip(GAINS, architecture, strict=True) if name != IDENTITY)


def select(target: float, least: int = 0) -> tuple[str, ...]:
    budget = Budget(COSTS, target, least={"s": least} if least else {})
    return select_layers(LAYERS, NetworkLosses(loss, loss), budget, Config())


@pytest.mark.parametrize("target", [1.2, 1.1, 0.9, 0.7, 0.6, 0.5, 0.3, 0.1])
def test_of_all_parts_within_the_target_the_best_is_kept(target: float) -> None:
    parts = [
        tuple(name if kept else IDENTITY for name, kept in zip(LAYERS, choice, strict=True))
        for choice in itertools.product((True, False), repeat=len(LAYERS))
        if any(choice)
    ]
    within = [part for part in parts if COSTS.share(part) <= target]
    assert select(target) == min(within, key=lambda part: loss(Architecture(part)))


def test_the_loss_of_whole_networks_decides() -> None:
    """Each of two layers alone can be left out without loss, but not both."""

    def loss_of_pair(architecture: Architecture) -> float:
        first, second, *_ = architecture
        return 3.0 if first == second == IDENTITY else 2.0 - 0.1 * sum(name != IDENTITY for name in architecture)

    losses, costs = NetworkLosses(loss_of_pair, loss_of_pair), make_costs("macs", {"s": 1.0, "f": 1.0, "i": 0.0}, 4)
    for target in (0.75, 0.5):
        found = select_layers(("f",) * 4, losses, Budget(costs, target), Config())
        assert set(found[:2]) != {IDENTITY}


def test_networks_that_differ_in_the_positions_of_identity_are_all_compared() -> None:
    """By the short text, the first layer is the one to leave out; by the whole text it is the last."""

    def measure(least: int) -> Callable[[Architecture], float]:
        return lambda each: 1.2 * each.layers.count(IDENTITY) - 0.1 * (each.layers[least] == IDENTITY)

    losses, costs = NetworkLosses(measure(0), measure(3)), make_costs("macs", {"s": 1.0, "f": 1.0, "i": 0.0}, 4)
    assert select_layers(("f",) * 4, losses, Budget(costs, 0.75), Config()) == ("f", "f", "f", IDENTITY)


def test_attention_is_kept_where_it_must_be() -> None:
    assert "".join(select(0.45, least=1)) == "siiiii"
    assert "".join(select(0.35)) == "ikfiki"
    with pytest.raises(ParnasError, match="at least 1 of s"):
        select(0.35, least=1)


def test_a_target_below_every_layer_is_refused_before_anything_is_measured() -> None:
    def fail(_: Architecture) -> float:
        raise AssertionError

    with pytest.raises(OverBudget, match=r"costs at most 0\.01"):
        select_layers(LAYERS, NetworkLosses(fail, fail), Budget(COSTS, 0.01), Config())


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(corpus, model__arch="skifk", train__steps=12)
    return retrain(config, tmp_path_factory.mktemp("trained") / "run", Silent())


def test_a_trained_network_is_shrunk_to_a_part_of_its_layers(trained: Run) -> None:
    notes = Notes()
    found = shrink(trained, COSTS, 0.5, 2, notes)
    assert len(found) == 4, "identity of the trained network does not count"
    assert all(name in (IDENTITY, layer) for name, layer in zip(found, "skfk", strict=True))
    assert COSTS.share(found) <= 0.5
    assert list(found).count("s") == 1, "all attention layers, where more are asked for"
    assert any("within 0.5" in note for note in notes.notes)


def test_layers_are_left_out_where_identity_is_no_candidate_of_the_search(trained: Run) -> None:
    costs = make_costs("latency", {"s": 4.0, "f": 1.0, "k": 1.0}, 4)
    found = shrink(trained, costs, 0.5, 1, Notes())
    assert IDENTITY in found.layers
    assert costs.share(found) <= 0.5


def test_a_loss_that_is_not_a_number_counts_as_high() -> None:
    def loss_without_first(architecture: Architecture) -> float:
        return float("nan") if architecture.layers[0] == IDENTITY else loss(architecture)

    assert (
        select_layers(LAYERS, NetworkLosses(loss_without_first, loss_without_first), Budget(COSTS, 0.6), Config())[0]
        == "s"
    )


def test_a_part_of_a_trained_network_is_trained_from_its_weights(trained: Run, tmp_path: Path) -> None:
    inherits = {"train__inherit": str(trained.folder), "model__arch": "siik"}
    still = {"train__lr": 1e-30, "train__steps": 1, "train__weight_decay": 0.0}
    first = retrain(trained.config().replace(**inherits, **still), tmp_path / "first", Silent())
    whole = load(trained.folder).model
    expected = whole.extract(Architecture("siik")).state_dict()
    for name, weight in final_weights(first).items():
        assert torch.equal(weight, expected[name])
    assert torch.equal(expected["blocks.1.inner.weight"], whole.state_dict()["blocks.3.inner.weight"])
    inherited = first.summary().inherited
    assert inherited is not None
    assert inherited.steps == 12
    inherits = {"train__inherit": str(first.folder), "model__arch": "si"}
    second = retrain(trained.config().replace(**inherits, **still), tmp_path / "second", Silent()).summary()
    assert second.inherited is not None
    assert second.inherited.steps == 13, "those of both trainings"
    assert second.inherited.seconds == pytest.approx(trained.summary().seconds + first.summary().seconds)


def test_identity_does_not_count_in_a_part_of_the_trained_network(trained: Run, tmp_path: Path) -> None:
    config = trained.config().replace(train__inherit=str(trained.folder), model__arch="sifk", train__steps=1)
    assert retrain(config, tmp_path / "run", Silent()).finished()


@pytest.mark.parametrize("arch", ["skf", "fkfk", "skfkk"])
def test_other_layers_than_those_of_the_trained_network_are_refused(trained: Run, tmp_path: Path, arch: str) -> None:
    config = trained.config().replace(train__inherit=str(trained.folder), model__arch=arch)
    with pytest.raises(ParnasError, match=rf"{arch} is not a part of skfk"):
        retrain(config, tmp_path / "run", Silent())
