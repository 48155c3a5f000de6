"""The evolutionary search over architectures."""

import itertools
import math
import random

import pytest

from parnas.nas.evolution import evolve, mutate, repair

SPACES = [("s", "f", "i")] * 4


def loss(layers: tuple[str, ...]) -> float:
    """Return a loss that no sum over blocks describes: the first attention layer is worth much, others little."""
    attention = layers.count("s")
    return 1.0 - 0.5 * (attention > 0) - 0.01 * attention - 0.02 * (layers[-1] == "f") + 0.1 * layers.count("i")


def anything(_: tuple[str, ...]) -> bool:
    """Allow every architecture."""
    return True


def test_finds_the_best_network_of_a_small_space() -> None:
    best = min((layers for layers in itertools.product(*SPACES)), key=loss)
    assert evolve([("i", "i", "i", "f")], loss, SPACES, anything, 80, 1)[0] == best


def test_stays_within_what_is_allowed_and_evaluates_each_network_once() -> None:
    evaluated = []

    def scored(layers: tuple[str, ...]) -> float:
        evaluated.append(layers)
        return loss(layers)

    def one_attention(layers: tuple[str, ...]) -> bool:
        return layers.count("s") <= 1

    start = [("f", "f", "f", "f"), ("s", "f", "f", "i")]
    found = evolve(start, scored, SPACES, one_attention, 20, 1)
    assert evaluated[:2] == start
    assert len(evaluated) == len(set(evaluated)) == 22
    assert all(map(one_attention, evaluated))
    assert found == sorted(found, key=loss)
    assert set(found) == set(evaluated)


def test_an_expensive_layer_enters_a_network_that_fills_a_tight_target() -> None:
    """Three cheap layers have to leave for it, more than a change of two blocks can do."""
    costs, spaces = {"s": 4, "f": 1, "i": 0}, [("s", "f", "i")] * 6

    def cheap(layers: tuple[str, ...]) -> bool:
        return sum(costs[name] for name in layers) <= 6

    found = evolve([("f",) * 6], loss, spaces, cheap, 30, 1)
    assert found[0].count("s") == 1
    assert all(map(cheap, found))


def test_a_repair_makes_as_few_blocks_identity_as_the_constraints_demand() -> None:
    generator, spaces = random.Random(1), [("s", "f", "i"), ("s", "f", "i"), ("s", "f"), ("s", "f", "i")]
    parent, child = ("f", "f", "f", "f"), ("s", "f", "f", "f")
    repaired = {repair(child, parent, spaces, lambda layers: layers.count("f") <= 2, generator) for _ in range(50)}
    assert repaired == {("s", "i", "f", "f"), ("s", "f", "f", "i")}, (
        "not the changed block, and not one without identity"
    )
    assert repair(child, parent, spaces, anything, generator) == child
    assert repair(child, parent, spaces, lambda layers: "s" not in layers, generator) == ("s", "i", "f", "i")


def test_repeats_with_the_seed() -> None:
    start = [("f", "f", "f", "f")]
    one, same, other = (evolve(start, loss, SPACES, anything, 12, seed) for seed in (1, 1, 2))
    assert one == same != other


def test_ends_when_all_networks_are_known() -> None:
    found = evolve([("s", "f")], loss, [("s",), ("s", "f")], anything, 100, 1)
    assert set(found) == {("s", "f"), ("s", "s")}
    found = evolve([("s", "i")], loss, [("s", "i"), ("i",)], anything, 100, 1)
    assert found == [("s", "i")], "identity alone is no network"


def test_a_loss_that_is_not_a_number_is_the_worst() -> None:
    found = evolve([("s",), ("f",)], lambda layers: math.nan if layers == ("s",) else 1.0, [("s", "f")], anything, 3, 1)
    assert found == [("f",), ("s",)]


@pytest.mark.parametrize("spaces", [SPACES, [("s",), ("s", "f"), ("f",), ("f", "i")]])
def test_a_mutation_changes_at_most_two_blocks_and_keeps_to_their_candidates(spaces: list[tuple[str, ...]]) -> None:
    generator, layers = random.Random(1), ("s", "f", "f", "i")
    changes = set()
    for _ in range(300):
        child = mutate(layers, spaces, generator)
        assert all(name in names for name, names in zip(child, spaces, strict=True))
        changes.add(sum(a != b for a, b in zip(child, layers, strict=True)))
    assert changes == {0, 1, 2}


def test_the_only_block_can_change() -> None:
    generator = random.Random(1)
    assert {mutate(("s",), [("s", "f")], generator) for _ in range(20)} == {("s",), ("f",)}
