"""The benchmark of searches of few steps: its configuration, and what its table says of known scores."""

import pytest
from ground_truth import read_settings
from search_quality import Score, Truth
from short_search import (
    CONFIG,
    VARIANTS,
    choose,
    find_choice,
    find_contributions,
    short_search,
    summarise,
    summarise_contributions,
    summarise_local_search,
)

from parnas.nas.cost import make_costs
from parnas.runs.resolve import read_config

COSTS = make_costs("latency", {"s": 2.0, "f": 1.0, "k": 1.0, "i": 0.0}, 4)
LOSSES = {"sk": [3.9, 3.9], "kk": [4.0, 4.0], "k": [4.2, 4.2], "sssk": [3.5, 3.5]}


def test_the_searches_are_the_first_part_of_a_training_in_one_run() -> None:
    settings, _ = read_settings(CONFIG)
    config = read_config(settings, [])
    shared, single = (short_search(config, variant).search for variant in VARIANTS)
    assert (shared.steps, shared.cost.target, shared.lr_decay) == (600, 0.5, False)
    assert shared.block_ridge == 100
    assert single == shared.model_copy(update={"block_ridge": single.block_ridge})


def test_a_choice_is_compared_with_the_best_network_within_the_target() -> None:
    truth = Truth(LOSSES, COSTS)
    likes_convolutions = {"sk": 1.0, "kk": 3.0, "k": 2.0, "sssk": 9.0}
    assert find_choice(truth, likes_convolutions, attention=False) == pytest.approx(10.0)
    assert find_choice(truth, likes_convolutions, attention=True) == pytest.approx(0.0)


def test_a_local_search_evaluates_networks_that_resemble_the_best_so_far() -> None:
    settings, _ = read_settings(CONFIG)
    config = read_config(settings, [])
    # By pi: ss, ff, fk, ki, sk; the estimate of the improbable sk, which resembles ss, is the best.
    estimates = {"ss": 2.0, "ff": 1.0, "fk": 0.0, "ki": 0.5, "sk": 3.0}
    scores = {
        network: Score("variant", "0.5", 1, 600, network, -1e-6 * place, of)
        for place, (network, of) in enumerate(estimates.items())
    }
    assert choose(scores, 4, local=False, config=config) == "ss"
    assert choose(scores, 4, local=True, config=config) == "sk"
    assert choose(scores, 9, local=False, config=config) == "sk"


def test_the_table_of_local_search_has_only_networks_with_attention() -> None:
    settings, _ = read_settings(CONFIG)
    config, truth = read_config(settings, []), Truth(LOSSES, COSTS)
    scores = [Score("variant", "0.5", 1, 600, network, -of[0], -of[0]) for network, of in LOSSES.items()]
    records = summarise_local_search(truth, scores, config)
    assert {record["target"] for record in records} == {0.5, 0.65, 0.8}
    # `sk` is the only network with attention within any of the targets.
    assert all(record["most probable"] == record["local search"] == 0.0 for record in records)


def test_the_contribution_of_a_layer_is_the_slope_of_the_loss() -> None:
    losses = {network: 5.0 - 0.3 * network.count("s") + 0.1 * network.count("k") for network in ("sk", "kk", "k", "ss")}
    assert find_contributions(losses) == pytest.approx({"k": -0.1, "s": 0.3})
    scores = [
        Score(str(sign), "0.5", 1, 600, network, 0.0, -sign * of) for sign in (1, 3) for network, of in losses.items()
    ]
    (_, shared) = summarise_contributions(Truth(LOSSES, COSTS), scores)
    assert shared == {
        "weights": "shared, after 600 steps",
        "searches": 2,
        "k": pytest.approx(-0.2),
        "s": pytest.approx(0.6),
    }


def test_the_table_has_the_means_over_seeds_of_each_score() -> None:
    settings, _ = read_settings(CONFIG)
    config, truth = read_config(settings, []), Truth(LOSSES, COSTS)
    good = {network: -of[0] for network, of in LOSSES.items()}
    scores = [
        Score("variant", "0.5", seed, 600, network, sign * of, sign * of)
        for seed, sign in ((1, 1.0), (2, -1.0))
        for network, of in good.items()
    ]
    records = summarise(truth, scores, config)
    assert [record["score"] for record in records] == ["pi", "inherited", "estimate"]
    assert all(record["seeds"] == 2 for record in records)
    assert records[0]["tau, all"] == pytest.approx(0.0), "one seed ranks as the table, one the other way"
    assert records[0]["behind the best"] == pytest.approx((0.0 + 30.0) / 2)
