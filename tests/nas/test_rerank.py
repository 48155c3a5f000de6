"""Ranking of whole networks within constraints, by given losses."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config
from torch import Tensor

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import OverBudget, ParnasError
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.budget import Budget
from parnas.nas.cost import count_costs, make_costs
from parnas.nas.rerank import NetworkLosses, rank, shared_weight_losses
from parnas.training.device import Device
from parnas.training.perplexity import measure_loss

CPU = Device(torch.device("cpu"), "fp32")
PI = [{"s": 0.05, "f": 0.85, "i": 0.1}] * 6
COSTS = make_costs("macs", {"s": 3.0, "f": 1.0, "i": 0.0}, 6)


def loss(architecture: Architecture) -> float:
    """Return a loss whose lowest value within a target of 0.65 (7.8) is that of a network with two attention layers."""
    attention = architecture.layers.count("s")
    return 4.0 - 0.3 * min(attention, 2) + 0.1 * (architecture.layers[:2] != ("f", "f"))


def losses() -> NetworkLosses:
    return NetworkLosses(loss, loss)


def test_evolution_finds_what_pi_does_not_propose(corpus: Path) -> None:
    budget, changes = Budget(COSTS, 0.65), {"search__blocks": 6, "search__rerank_top_k": 8, "search__entropy_end": 0.0}
    config = small_config(corpus, **changes)
    strings = itertools.product("sfi", repeat=6)
    best = min(loss(Architecture(layers)) for layers in strings if budget.allows(layers))
    plain = rank(PI, budget, config.replace(search__evolution_steps=0), losses())
    assert plain[0].score > best, "two attention layers are improbable"
    found = rank(PI, budget, config.replace(search__evolution_steps=100), losses())
    assert found[0].score == pytest.approx(best)
    assert len(found) == 8
    assert all(budget.allows(each.choice.layers) for each in found)


def test_the_best_on_the_short_text_are_compared_on_the_whole_text(corpus: Path) -> None:
    config = small_config(
        corpus, search__blocks=6, search__rerank_top_k=3, search__evolution_steps=5, search__entropy_end=0.02
    )
    full: dict[str, float] = {}

    def on_all(architecture: Architecture) -> float:
        full[str(architecture)] = loss(architecture) + 0.01 * len(full)
        return full[str(architecture)]

    found = rank(PI, Budget(), config, NetworkLosses(loss, on_all))
    assert {str(Architecture(each.choice.layers)) for each in found} == set(full)
    for each in found:
        chance = math.prod(block[name] for block, name in zip(PI, each.choice.layers, strict=True))
        assert each.score == pytest.approx(each.shared_weight_loss - 0.01 * math.log(chance))
    assert [each.score for each in found] == sorted(each.score for each in found)


def test_a_recurrent_network_is_compared_on_parallel_rows_of_a_short_text(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(corpus, search__space=["r", "f"])
    streams, rows, nll = prepare(config.data), list[int](), TransformerXL.nll

    def recorded(model: TransformerXL, inputs: Tensor, *args: Any, **settings: Any) -> Any:
        rows.append(len(inputs))
        return nll(model, inputs, *args, **settings)

    supernet = SuperNet.from_config(config.model, config.search, streams.tokenizer.vocab_size)
    text, arch = streams.tokens("valid")[: 40 * config.data.tgt_len], Architecture(("r",) * config.search.blocks)
    shape = config.validation_shape
    exact = measure_loss(supernet.extract(arch), text, streams.tokenizer.eos_id, CPU, shape)
    monkeypatch.setattr(TransformerXL, "nll", recorded)
    found = shared_weight_losses(supernet, config, streams, text)(arch)
    assert found.tokens == len(text)
    assert min(rows) > 1, "one row would take a call for each segment"
    assert found.per_token == pytest.approx(exact.per_token, rel=0.01)


def test_in_a_trained_network_the_loss_alone_is_the_score(corpus: Path) -> None:
    config = small_config(corpus, search__blocks=6, search__parent="parent", search__evolution_steps=5)
    found = rank(PI, Budget(), config, losses())
    assert len(found) > 1
    assert all(each.score == each.shared_weight_loss for each in found)


def test_in_a_trained_network_positions_of_identity_make_other_networks(corpus: Path) -> None:
    pi, settings = [{"s": 0.5, "i": 0.5}] * 3, {"search__blocks": 3, "search__rerank_top_k": 8}
    losses = NetworkLosses(*[lambda architecture: 4.0 + architecture.layers.index("s")] * 2)
    config = small_config(corpus, **settings, search__evolution_steps=60)
    for own_weights, count in ((False, 3), (True, 7)):
        assert len(rank(pi, Budget(), config, losses, own_weights=own_weights)) == count


def test_a_network_whose_loss_is_not_a_number_comes_last(corpus: Path) -> None:
    def loss_without_attention(architecture: Architecture) -> float:
        return math.nan if "s" in architecture.layers else 2.0

    config = small_config(corpus, search__blocks=3, search__rerank_top_k=8, search__evolution_steps=8)
    found = rank(PI[:3], Budget(), config, NetworkLosses(lambda _: 1.0, loss_without_attention))
    scores = [each.score for each in found]
    assert math.isfinite(scores[0])
    assert math.isnan(scores[-1])
    assert [math.isnan(score) for score in scores] == sorted(map(math.isnan, scores))


def test_positions_of_identity_make_no_other_network(corpus: Path) -> None:
    config = small_config(corpus, search__blocks=3, search__rerank_top_k=16, search__evolution_steps=60)
    found = rank([{"s": 0.3, "f": 0.3, "i": 0.4}] * 3, Budget(), config, losses())
    networks = [tuple(name for name in each.choice.layers if name != "i") for each in found]
    assert len(networks) == len(set(networks)) == 14  # 2 of one layer, 4 of two and 8 of three


def test_losses_of_several_searches_are_averaged() -> None:
    mean = NetworkLosses.mean([losses(), NetworkLosses(lambda _: 1.0, lambda _: 2.0)])
    network = Architecture(("f", "s"))
    assert mean.short(network) == pytest.approx((loss(network) + 1.0) / 2)
    assert mean.full(network) == pytest.approx((loss(network) + 2.0) / 2)


def test_a_budget_allows_what_the_exact_selection_finds(corpus: Path) -> None:
    config = small_config(corpus, search__blocks=4)
    costs, pi = count_costs(config, "macs"), [{"s": 0.4, "f": 0.35, "i": 0.25}] * 4
    cache = count_costs(config, "cache")
    limited = ({}, {"s": 1}, {"f": 2, "s": 1}), ([], [(cache, 0.5)])
    cases = itertools.product((0.3, 0.65, None), *limited, [{}])
    with_attention = itertools.product((0.4, 0.65, None), *limited, [{"s": 1}])  # none costs at most 0.3
    budgets = [Budget(costs, *constraints) for constraints in itertools.chain(cases, with_attention)]
    budgets += [Budget(costs, target, least=least, floor=0.47) for target in (0.65, None) for least in ({}, {"s": 1})]
    for budget in budgets:
        found = {each.layers for each in budget.most_probable(pi, 100)}
        allowed = {layers for layers in itertools.product("sfi", repeat=4) if budget.allows(layers)}
        assert found <= allowed
        networks = {tuple(name for name in layers if name != "i") for layers in allowed} - {()}
        assert {tuple(name for name in layers if name != "i") for layers in found} == networks


def test_known_networks_take_part_in_re_ranking() -> None:
    config = Config().replace(
        search__blocks=3, search__rerank_top_k=1, search__evolution_steps=0, search__entropy_end=0.0
    )
    pi = [{"s": 0.1, "f": 0.9}] * 3
    one_best = NetworkLosses(*(lambda architecture: 1.0 if str(architecture) == "ssf" else 2.0 for _ in range(2)))
    assert rank(pi, Budget(), config, one_best)[0].choice.layers == ("f", "f", "f")
    assert rank(pi, Budget(), config, one_best, known_good=[("s", "s", "f")])[0].choice.layers == ("s", "s", "f")


def test_a_budget_is_spent_where_some_network_costs_as_much() -> None:
    costs, pi = make_costs("latency", {"s": 4.0, "f": 1.0, "i": 0.0}, 4), [{"f": 0.9, "s": 0.1}, {"f": 0.9, "i": 0.1}]
    budget = Budget(costs, 0.5)  # of 10
    assert budget.most_probable(pi)[0].layers == ("f", "f")
    assert budget.spend(0.7, pi).most_probable(pi)[0].layers == ("s", "f"), "of those that cost 3.5 to 5"
    assert Budget(costs, 0.9).spend(0.9, pi) == Budget(costs, 0.9), "no network costs 8.1"
    for unchanged in (Budget(), Budget(costs), Budget(costs, math.inf)):
        assert unchanged.spend(0.9, pi) == unchanged
    assert budget.spend(0.0, pi) == budget


def test_a_limit_of_a_letter_counts_its_variants() -> None:
    budget = Budget(limits={"s": 1})
    assert budget.allows(("s:heads=2", "f"))
    assert not budget.allows(("s:heads=2", "s"))


def test_a_network_has_the_least_number_of_attention_layers() -> None:
    pi = [{"f": 0.9, "s:heads=2": 0.1}, {"f": 0.8, "s:heads=2": 0.2}]
    budget = Budget(least={"s": 1})
    assert [choice.layers for choice in budget.most_probable(pi, 2)] == [("f", "s:heads=2"), ("s:heads=2", "f")]
    assert not budget.allows(("f", "f"))
    with pytest.raises(OverBudget, match=r"with at least 1 of s costs at most 0.1 "):
        Budget(COSTS, 0.1, least={"s": 1}).most_probable([{"s": 0.5, "f": 0.5}] * 2)
    with pytest.raises(ParnasError, match="keeps to at least 3 of 's'"):
        Budget(least={"s": 3}).most_probable(pi)


def test_a_target_on_the_edge_is_allowed() -> None:
    third = make_costs("latency", {"s": 0.1, "f": 0.2, "i": 0.0}, 4)
    budget = Budget(third, 0.5)  # of 0.6; 0.1 + 0.2 is above 0.3 in floating point
    assert budget.allows(("s", "f", "i", "i"))
    assert budget.most_probable([{"s": 0.5, "f": 0.5}] * 2)[0].cost == pytest.approx(0.2)


def test_an_impossible_target_says_the_least_possible_one() -> None:
    with pytest.raises(ParnasError, match=r"to 0\.167 or more"):
        Budget(COSTS, 0.01).most_probable([{"s": 0.5, "f": 0.5}] * 2)


def test_the_description_of_a_network_has_its_probability_and_cost() -> None:
    choice = Budget(COSTS, 0.65).describe(("s", "f"), PI[:2])
    assert choice.log_probability == pytest.approx(math.log(0.05 * 0.85))
    assert choice.cost == 4.0
    assert Budget().describe(("s", "f"), PI[:2]).cost == 0.0
