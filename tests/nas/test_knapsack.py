"""The most probable networks within a budget, and random networks of a cost, against every string there is."""

import itertools
import math
import pickle
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parnas.errors import OverBudget, ParnasError
from parnas.nas.knapsack import LayerString, most_probable, probabilities
from parnas.nas.random_sampling import draw_networks

SFI = {"s": 3.0, "f": 1.0, "i": 0.0}


def network(layers):
    return tuple(name for name in layers if name != "i")


def fits(layers, costs, budget):
    slack = budget if budget == math.inf else Fraction(budget) * (1 + Fraction(1, 10**9))
    return sum(Fraction(costs[name]) for name in layers) <= slack


def by_brute_force(pi, costs, budget=math.inf, limits=None, k=1, further=(), least=None):
    """Look at every string: the best of each network, the best k of those."""
    best = {}
    logs = [[None if p == 0 else Fraction(math.log(p)) for p in block.values()] for block in pi]
    for order in itertools.product(*(range(len(block)) for block in pi)):
        chances = [log[number] for log, number in zip(logs, order, strict=True)]
        layers = tuple(list(block)[number] for block, number in zip(pi, order, strict=True))
        if None in chances or not network(layers):
            continue
        cost = sum(Fraction(costs[name]) for name in layers)
        counts = {
            key: sum(name == key or (len(key) == 1 and name.startswith(key + ":")) for name in layers)
            for key in {**(limits or {}), **(least or {})}
        }
        budgets = [(costs, budget), *further]
        within = all(counts[key] <= most for key, most in (limits or {}).items())
        enough = all(counts[key] >= fewest for key, fewest in (least or {}).items())
        if all(fits(layers, *each) for each in budgets) and within and enough:
            rank = (-sum(chances), cost, order, layers)
            name = network(layers)
            best[name] = min(best.get(name, rank), rank)
    return [LayerString(layers, float(-loss), float(cost)) for loss, cost, _, layers in sorted(best.values())[:k]]


NAMES = ["s", "f", "i", "s:heads=2"]
WEIGHTS = st.sampled_from([0, 0, 1, 1, 1, 2, 3]) | st.floats(0.01, 10)
COSTS = st.sampled_from([0, 0.1, 0.2, 0.3, 1, 1, 2]) | st.floats(0, 10)


def test_pi_is_proportional_to_exp_of_minus_the_loss_and_excludes_nothing():
    pi = probabilities({"s": 4.0, "f": 4.1, "i": 4.3}, 0.1)
    assert sum(pi.values()) == pytest.approx(1)
    assert [math.log(pi["s"] / pi[name]) for name in "fi"] == pytest.approx([1, 3])
    high = probabilities({"s": 4.0, "f": 1e9, "k": math.nan, "r": math.inf, "i": -math.inf})
    assert high["s"] == pytest.approx(1)
    assert 1e-38 < high["f"] == high["k"] == high["r"] == high["i"], "float32 represents it"
    assert probabilities({"s": math.nan, "f": math.nan}) == {"s": 0.5, "f": 0.5}


@st.composite
def problems(draw):
    """Up to 8 blocks, the longer the fewer candidates, so that every string can be evaluated."""
    blocks = draw(st.integers(1, 7))
    most = {1: 4, 2: 4, 3: 4, 4: 4, 5: 3, 6: 3, 7: 2}[blocks]
    common = draw(st.permutations(NAMES))[: draw(st.integers(2, most))]
    same_names, same_pi = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    pi = []
    for _ in range(blocks):
        names = common if same_names else draw(st.permutations(common))[: draw(st.integers(1, len(common)))]
        weights = draw(st.lists(WEIGHTS, min_size=len(names), max_size=len(names)))
        if not any(weights):
            weights[0] = 1
        pi.append({name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)})
    if same_pi:
        pi = pi[:1] * blocks
    costs = dict(zip(NAMES, draw(st.lists(COSTS, min_size=4, max_size=4)), strict=True))
    most = sum(max(costs[name] for name in block) for block in pi)
    budget = draw(st.just(math.inf) | st.floats(0, 1.1).map(lambda part: part * most))
    known = {name for block in pi for name in block}
    keys = [key for key in NAMES if key in known or (key == "s" and "s:heads=2" in known)]
    limits = draw(st.none() | st.dictionaries(st.sampled_from(keys), st.integers(0, blocks), max_size=3))
    least = draw(st.none() | st.dictionaries(st.sampled_from(keys), st.integers(0, 2), max_size=2))
    further = []
    for _ in range(draw(st.integers(0, 2))):
        others = dict(zip(NAMES, draw(st.lists(COSTS, min_size=4, max_size=4)), strict=True))
        highest = sum(max(others[name] for name in block) for block in pi)
        further.append((others, draw(st.floats(0, 1.1)) * highest))
    return {
        "pi": pi,
        "costs": costs,
        "budget": budget,
        "limits": limits,
        "further": further,
        "least": least,
        "k": draw(st.integers(1, 20)),
    }


@settings(max_examples=150)
@given(problems())
def test_agrees_with_looking_at_every_string(problem):
    expected = by_brute_force(**problem)
    if expected:
        assert most_probable(**problem) == expected
    else:
        with pytest.raises(ParnasError):
            most_probable(**problem)


def tight(seed, blocks=6):
    """Blocks with random real costs and pi, the dear layers likely, so that the budget hurts."""
    rng = random.Random(seed)
    costs = {"s": rng.uniform(2, 5), "f": rng.uniform(1, 3), "i": rng.choice([0, rng.uniform(0, 1)])}
    pi = []
    for _ in range(blocks):
        weights = {name: math.exp(costs[name] / 2 + rng.gauss(0, 0.5)) for name in costs}
        pi.append({name: weight / sum(weights.values()) for name, weight in weights.items()})
    return {
        "pi": pi,
        "costs": costs,
        "budget": blocks * rng.uniform(sum(costs.values()) / 4, sum(costs.values()) / 2),
        "limits": rng.choice([None, {"s": 2}, {"s": 3, "f": 2}]),
    }


@pytest.mark.parametrize("rough_width", [1, 20])
@pytest.mark.parametrize("seed", range(6))
def test_agrees_under_tight_budgets_however_rough_the_search_for_the_bound(seed, rough_width, monkeypatch):
    monkeypatch.setattr("parnas.nas.knapsack._HEURISTIC_WIDTH", rough_width)
    problem = tight(seed)
    expected = by_brute_force(**problem, k=20)
    for k in (1, 2, 5, 20):
        assert most_probable(**problem, k=k) == expected[:k]


def test_agrees_where_a_limit_binds_besides_the_budget():
    problem = {**tight(0, blocks=8), "limits": {"s": 3}}
    expected = by_brute_force(**problem, k=20)
    for k in (1, 20):
        assert most_probable(**problem, k=k) == expected[:k]
    free = [by_brute_force(**{**problem, change: value})[0] for change, value in (("budget", math.inf), ("limits", {}))]
    assert expected[0] not in free


def test_agrees_where_a_further_budget_binds_besides_the_first():
    problem = tight(2, blocks=7) | {"limits": None, "further": [({"s": 1.0, "f": 2.0, "i": 0.5}, 9.0)]}
    expected = by_brute_force(**problem, k=20)
    for k in (1, 20):
        assert most_probable(**problem, k=k) == expected[:k]
    free = [by_brute_force(**problem | change)[0] for change in ({"budget": math.inf}, {"further": []})]
    assert expected[0] not in free


def test_strings_of_one_network_count_once_and_the_likeliest_speaks_for_it():
    pi = [{"s": 0.6, "i": 0.4}, {"s": 0.3, "i": 0.7}]
    assert [choice.layers for choice in most_probable(pi, SFI, k=5)] == [("s", "i"), ("s", "s")]
    assert most_probable(pi, SFI, k=5)[0].log_probability == pytest.approx(math.log(0.6 * 0.7))


def test_identity_alone_is_no_network_and_crowds_none_out():
    pi = [{"s": 0.1, "i": 0.9}] * 3
    assert [network(choice.layers) for choice in most_probable(pi, SFI, budget=3)] == [("s",)]
    # `i` beats `s` in probability and cost, yet with identity to follow it names no network.
    assert most_probable([{"s": 0.1, "i": 0.9}, {"i": 1.0}], SFI, k=1)[0].layers == ("s", "i")


def test_a_rough_search_that_finds_too_few_networks_bounds_nothing(monkeypatch):
    """Of two labels it keeps identity's and one network's; the second network is still to be found."""
    monkeypatch.setattr("parnas.nas.knapsack._HEURISTIC_WIDTH", 1)
    choices = most_probable([{"s": 0.1, "f": 0.05, "i": 0.85}], SFI, k=2)
    assert [choice.layers for choice in choices] == [("s",), ("f",)]


def test_ties_go_to_the_lower_cost_then_to_the_order_of_candidates():
    even = [{"f": 0.5, "s": 0.5}] * 2
    assert most_probable(even, SFI)[0].layers == ("f", "f")
    assert most_probable([{"s": 0.5, "f": 0.5}] * 2, SFI)[0].layers == ("f", "f")
    assert [c.layers for c in most_probable(even, SFI, k=4)][1:3] == [("f", "s"), ("s", "f")]
    mirrored = [{"s": 0.5, "f": 0.5}, {"f": 0.5, "s": 0.5}]
    assert [c.layers for c in most_probable(mirrored, SFI, k=4)][1:3] == [("s", "f"), ("f", "s")]


def test_sums_are_exact_whatever_their_order():
    """Ten times 0.1 is more than 1 as floats are, but within the tolerance; 1e-8 more is not."""
    pi = [{"f": 1.0}] * 10
    assert len(most_probable(pi, {"f": 0.1}, budget=1.0)) == 1
    assert most_probable(pi, {"f": 0.1}, budget=sum([0.1] * 10))[0].cost == math.fsum([0.1] * 10)
    with pytest.raises(ParnasError):
        most_probable(pi, {"f": 0.1 * (1 + 1e-8)}, budget=1.0)
    # The two strings have the same factors, yet summed from left to right `fff` would be ahead by its last digit.
    a, b, c = 0.1, 0.3, 0.5
    assert sum(map(math.log, (a, b, c))) < sum(map(math.log, (c, b, a)))
    pi = [{"s": a, "f": c}, {"s": b, "f": b}, {"s": c, "f": a}]
    ranking = [choice.layers for choice in most_probable(pi, {"s": 1, "f": 1}, k=8)]
    assert ranking.index(("s", "s", "s")) < ranking.index(("f", "f", "f"))


def test_costs_are_not_rounded():
    costs = {"s": 1 + 1e-6, "f": 1.0}
    pi = [{"s": 0.9, "f": 0.1}] * 3
    assert most_probable(pi, costs, budget=3 + 2e-6)[0].layers == ("s", "s", "f")
    assert most_probable(pi, costs, budget=3 + 3e-6)[0].layers == ("s", "s", "s")


def test_a_limit_counts_a_letter_with_its_variants_and_a_name_alone():
    pi = [{"s": 0.4, "s:heads=2": 0.5, "f": 0.1}] * 4
    costs = {"s": 1, "s:heads=2": 1, "f": 1}
    assert Counter(most_probable(pi, costs, limits={"s": 2})[0].layers) == {"s:heads=2": 2, "f": 2}
    assert Counter(most_probable(pi, costs, limits={"s:heads=2": 1})[0].layers) == {"s:heads=2": 1, "s": 3}
    assert Counter(most_probable(pi, costs, limits={"s:heads=2": 1, "s": 2})[0].layers) == {
        "s:heads=2": 1,
        "s": 1,
        "f": 2,
    }


def test_fewer_networks_than_asked_for_are_all_of_them():
    choices = most_probable([{"s": 0.5, "f": 0.5, "i": 0.0}] * 3, SFI, k=100)
    assert len(choices) == 8
    assert all("i" not in choice.layers for choice in choices)


def test_long_stacks_of_many_candidates_end():
    """The result must be ranked, and no change of two blocks may improve it: 6^32 cannot be enumerated."""
    rng = random.Random(1)
    costs = {name: rng.uniform(0, 10) for name in "abcdei"}
    pi = []
    for _ in range(32):
        weights = [rng.expovariate(1) for _ in costs]
        pi.append({name: weight / sum(weights) for name, weight in zip(costs, weights, strict=True)})
    choices = most_probable(pi, costs, budget=100, k=4)
    networks = {network(choice.layers) for choice in choices}
    assert len(networks) == 4
    assert choices == sorted(choices, key=lambda choice: -choice.log_probability)
    for choice in choices:
        assert choice.cost == math.fsum(costs[name] for name in choice.layers) <= 100
        logs = [math.log(block[name]) for block, name in zip(pi, choice.layers, strict=True)]
        assert choice.log_probability == math.fsum(logs)
        for one, two in itertools.combinations(range(32), 2):
            for new in itertools.product(costs, repeat=2):
                gain = math.log(pi[one][new[0]]) + math.log(pi[two][new[1]]) - logs[one] - logs[two]
                if choice.log_probability + gain > choices[-1].log_probability + 1e-9:
                    changed = list(choice.layers)
                    changed[one], changed[two] = new
                    assert network(changed) in networks or math.fsum(costs[name] for name in changed) > 100


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pi": [{"s": 1.0}, {}]}, "Block 2 has no candidate"),
        ({"pi": [{"s": 0.0}]}, "Block 1 has no candidate"),
        ({"pi": [{"s": math.nan, "f": -0.1}]}, "Block 1 has no candidate"),
        ({"pi": [{"i": 1.0, "s": 0.0}]}, "identity"),
        ({"costs": {"s": 1, "i": 0}}, "No cost is given for 'f'"),
        ({"costs": SFI | {"f": -1}}, "cost of 'f' is -1"),
        ({"costs": SFI | {"f": math.nan}}, "cost of 'f' is nan"),
        ({"costs": SFI | {"f": math.inf}}, "cost of 'f' is inf"),
        ({"limits": {"s": -1}}, "limit of 's' is -1"),
        ({"limits": {"x": 1}}, "limit of 'x' applies to none"),
        ({"limits": {"s": 0, "f": 0}}, "keeps to at most 0 of 's', at most 0 of 'f'"),
        ({"budget": -math.inf}, "cheapest costs 1.0"),
    ],
)
def test_mistakes_are_told(change, message):
    arguments = {"pi": [{"s": 0.5, "f": 0.25, "i": 0.25}] * 2, "costs": SFI} | change
    with pytest.raises(ParnasError, match=re.escape(message)):
        most_probable(**arguments)


def test_where_nothing_fits_the_cheapest_cost_is_told_and_would_do():
    pi = [{"s": 0.9, "f": 0.1}, {"s": 0.9, "i": 0.1}, {"s": 0.5, "f": 0.5}]
    costs = {"s": 20.123456789, "f": 10.123456789, "i": 0.0}
    for limits, cheapest in ((None, 20.246913578), ({"f": 1}, 30.246913578)):
        with pytest.raises(ParnasError, match=r"budget of 12\.5.* costs (\d+\.\d+)") as error:
            most_probable(pi, costs, budget=12.5, limits=limits)
        told = float(re.search(r"costs ([\d.]+)\. ", str(error.value))[1])
        assert told == pytest.approx(cheapest, rel=1e-15)
        assert most_probable(pi, costs, budget=told, limits=limits)[0].cost == pytest.approx(told)


def strings_in(blocks, costs, low, high):
    """Every string in the band that names a network."""
    inside = [
        layers
        for layers in itertools.product(*blocks)
        if low * (1 - 1e-9) <= math.fsum(costs[name] for name in layers) <= high * (1 + 1e-9) and network(layers)
    ]
    return inside, {network(layers) for layers in inside}


@settings(max_examples=75)
@given(
    st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True), min_size=1, max_size=5),
    st.lists(COSTS, min_size=4, max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 99),
)
@example([["s", "i"]] * 5, [0, 0, 0, 0], 0, 0, 0)
def test_draws_every_network_of_the_band_once_and_no_more(blocks, costs, one, two, seed):
    costs = dict(zip(NAMES, costs, strict=True))
    dearest = sum(max(costs[name] for name in block) for block in blocks)
    low, high = sorted((one * dearest, two * dearest))
    strings, networks = strings_in(blocks, costs, low, high)
    drawn = list(draw_networks(blocks, costs, low, high, seed))
    assert set(drawn) <= set(strings)
    assert sorted(map(network, drawn)) == sorted(networks)


def chi_square(found, expected):
    return sum((found[key] - number) ** 2 / number for key, number in expected.items())


def test_strings_of_a_band_are_equally_likely():
    blocks = [["s", "f", "i"]] * 4
    costs = {"s": math.pi, "f": math.e, "i": 0.5}
    strings, _ = strings_in(blocks, costs, 6, 9)
    draws = 40 * len(strings)
    found = Counter(next(draw_networks(blocks, costs, 6, 9, seed)) for seed in range(draws))
    assert set(found) == set(strings)
    freedom = len(strings) - 1
    # Four standard deviations of chi-square above its mean; the seeds are fixed, so the outcome is as well.
    assert chi_square(found, dict.fromkeys(strings, 40)) < freedom + 4 * math.sqrt(2 * freedom)


def test_the_next_draw_is_as_if_strings_of_known_networks_were_thrown_away():
    blocks = [["s", "i"], ["s", "f", "i"], ["f", "i"]]
    costs = {"s": 1.0, "f": 1.5, "i": 0.0}
    strings, _ = strings_in(blocks, costs, 1, 3)
    draws = 3_000
    expected = Counter()
    for first in strings:
        others = [string for string in strings if network(string) != network(first)]
        for second in others:
            expected[first, second] += draws / len(strings) / len(others)
    found = Counter(tuple(islice(draw_networks(blocks, costs, 1, 3, seed), 2)) for seed in range(draws))
    assert set(found) <= set(expected)
    freedom = len(expected) - 1
    assert chi_square(found, expected) < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_are_the_same_for_the_same_seed():
    blocks, costs = ["sfi"] * 16, {"s": 3.1, "f": 2.3, "i": 0.0}
    one, again, other = (list(islice(draw_networks(blocks, costs, 20, 25, seed), 20)) for seed in (5, 5, 6))
    assert one == again != other


def test_a_narrow_band_of_a_long_stack_is_hit():
    """Of 6^32 strings about one in 10^7 lies in this band."""
    rng = random.Random(0)
    costs = {name: rng.uniform(0, 10) for name in "abcdei"}
    drawn = list(islice(draw_networks(["abcdei"] * 32, costs, 200, 200.00001, 1), 50))
    assert all(200 - 1e-6 <= math.fsum(costs[name] for name in layers) <= 200.0000101 for layers in drawn)
    assert len(set(map(network, drawn))) == 50


@pytest.mark.parametrize(
    "change, message",
    [
        ({"low": 3, "high": 2}, "is empty"),
        ({"low": math.nan}, "is empty"),
        ({"low": math.inf, "high": math.inf}, "is empty"),
        ({"spaces": ["sf", ""]}, "no candidates"),
        ({"spaces": []}, "no candidates"),
        ({"costs": {"s": 1}}, "No cost is given for 'f'"),
        ({"costs": {"s": 1, "f": -1}}, "cost of 'f' is -1"),
    ],
)
def test_mistakes_in_drawing_are_told(change, message):
    arguments = {"spaces": ["sf", "sf"], "costs": SFI, "low": 3, "high": 4, "seed": 0}
    assert len(list(draw_networks(**arguments))) == 2
    with pytest.raises(ParnasError, match=re.escape(message)):
        next(draw_networks(**arguments | change))


def test_a_band_below_every_cost_holds_nothing():
    assert not list(draw_networks(["sf", "sf"], SFI, -5, -4, 0))


def test_an_open_band_takes_every_network():
    assert len(list(draw_networks(["sfi"] * 3, SFI, -math.inf, math.inf, 0))) == 2 + 4 + 8


def test_the_ends_of_a_band_may_be_sums_of_floats():
    """Ten times 0.3 is less than 3 as floats are, ten times 0.1 more than 1."""
    assert list(draw_networks(["f"] * 10, {"f": 0.3}, 3.0, 4.0, 0)) == [("f",) * 10]
    assert list(draw_networks(["f"] * 10, {"f": 0.1}, 0.0, 1.0, 0)) == [("f",) * 10]
    for low, high in ((3 * (1 + 1e-8), 4), (2, 3 * (1 - 1e-8))):
        assert not list(draw_networks(["f"] * 10, {"f": 0.3}, low, high, 0))


def test_a_candidate_named_twice_counts_once():
    assert len(list(draw_networks([["s", "s", "f"]] * 2, SFI, 0, 9, 0))) == 4


def test_an_error_of_a_worker_process_reaches_the_first_process() -> None:
    error = pickle.loads(pickle.dumps(OverBudget("too dear", 3.5)))
    assert (str(error), error.cheapest) == ("too dear", 3.5)
