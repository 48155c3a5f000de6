"""Reaching a small budget in steps: the layers are scored again in the network of each step."""

import itertools
import math
from pathlib import Path

import pytest
from conftest import small_config

from parnas.errors import OverBudget
from parnas.nas.budget import Budget
from parnas.nas.cost import make_costs
from parnas.nas.rerank import NetworkLosses, rank
from parnas.nas.stepwise import reach_in_steps, score_in

COSTS = make_costs("macs", {"s": 3.0, "f": 1.0, "i": 0.0}, 6)
PI = [{"s": 0.6, "i": 0.4}, {"f": 0.6, "i": 0.4}] * 3


def loss(layers: tuple[str, ...]) -> float:
    """Return a loss to which the first attention layer that is left out adds little, and the last very much."""
    attention = layers.count("s")
    return 4.0 + (3 - attention) ** 3 + 0.4 * (3 - layers.count("f"))


def test_scores_are_those_of_single_replacements_in_the_given_network() -> None:
    network = ("s", "f", "s", "f", "i", "f")
    scores = score_in(network, PI, loss)
    for block, row in enumerate(scores):
        losses = {name: loss((*network[:block], name, *network[block + 1 :])) for name in PI[block]}
        for one, other in itertools.combinations(row, 2):
            assert math.log(row[one] / row[other]) == pytest.approx(losses[other] - losses[one])
        assert sum(row.values()) == pytest.approx(1)


def test_a_loss_that_is_not_a_number_is_very_improbable_and_excludes_no_budget() -> None:
    network, budget = ("s", "f") * 3, Budget(COSTS, 0.5)
    found = score_in(network, PI, lambda layers: math.nan if "i" in layers else 1.0)
    assert all(0 < row["i"] < 1e-34 for row in found)
    assert budget.allows(budget.most_probable(found)[0].layers)
    assert score_in(network, PI, lambda _: math.inf)[0] == {"s": 0.5, "i": 0.5}


def test_scores_of_the_parent_alone_would_leave_out_too_much_attention(corpus: Path) -> None:
    in_parent, budget = score_in(("s", "f") * 3, PI, loss), Budget(COSTS, 0.5)
    one_step = budget.most_probable(in_parent)[0].layers
    assert one_step.count("s") == 1
    best, *others = reach_in_steps(in_parent, budget, loss, 3)
    assert len(others) == 2
    assert all(map(budget.allows, (best, *others)))
    assert best == ("s", "i", "s", "i", "i", "i")
    assert loss(best) == min(loss(each) for each in itertools.product("si", "fi", repeat=3) if budget.allows(each))
    losses = NetworkLosses(*[lambda architecture: loss(architecture.layers)] * 2)
    settings = {"search__blocks": 6, "search__rerank_top_k": 1, "search__evolution_steps": 0}
    for parent, expected in ((None, loss(one_step)), ("runs/parent", loss(best))):
        config = small_config(corpus, **settings, search__parent=parent)
        assert rank(in_parent, budget, config, losses)[0].shared_weight_loss == expected


def test_all_targets_are_reached_in_steps_whatever_their_order() -> None:
    layers = make_costs("parameters", {"s": 1.0, "f": 1.0, "i": 0.0}, 6)
    targets, budgets, found = ((COSTS, 0.5), (layers, 0.7)), [], []
    for (costs, target), further in (targets, targets[::-1]):
        measured = list[tuple[str, ...]]()
        budgets.append(Budget(costs, target, further=[further]))
        found.append(reach_in_steps(PI, budgets[-1], lambda each, to=measured: to.append(each) or loss(each)))
        assert measured, "steps were taken"
    assert found[0] == found[1]
    assert budgets[0].allows(found[0][0])
    none = Budget(COSTS, 1.0, further=[(layers, 0.5)])
    assert reach_in_steps(PI, none, loss), "the first target alone takes no step"


def test_without_a_target_below_the_parents_cost_no_step_is_taken() -> None:
    def never(_: tuple[str, ...]) -> float:
        raise AssertionError

    for budget in (Budget(), Budget(COSTS), Budget(COSTS, math.inf), Budget(COSTS, 1.0)):
        assert reach_in_steps(PI, budget, never) == []
    cheap = [{"s": 0.2, "i": 0.8}, {"f": 0.6, "i": 0.4}] * 3  # a parent without attention
    assert reach_in_steps(cheap, Budget(COSTS, 0.3), never) == []
    with pytest.raises(OverBudget):
        reach_in_steps([{"s": 1.0}] * 6, Budget(COSTS, 0.5), loss)
