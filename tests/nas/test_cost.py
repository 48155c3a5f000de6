"""What architectures cost, and what a search makes of it."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import make_supernet

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.config.schema import SearchConfig
from parnas.errors import ParnasError
from parnas.model.layers import make_layer
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.architecture_optimizer import ArchitectureOptimizer
from parnas.nas.budget import Budget
from parnas.nas.cost import (
    Costs,
    cache_size,
    costs_of_run,
    count_costs,
    find_costs,
    make_costs,
    penalty,
    read_costs,
    write_costs,
)
from parnas.nas.diagnostics import entropies
from parnas.nas.latency_table import ModeTable, Profile, Timing, describe_shapes
from parnas.nas.search import search
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

CONFIG = Config().replace(model__d_model=16, model__n_heads=2, model__d_inner=40, search__blocks=3)


def build(arch: str) -> TransformerXL:
    return TransformerXL.build(CONFIG.model, Architecture(arch), 50)


@pytest.mark.parametrize("arch", ["sff", "sss", "fsf", "f"])
def test_counted_costs_are_differences_of_whole_networks(arch: str) -> None:
    """u and v, which all attention layers share, are not a layer's own."""
    empty, network = TransformerXL(CONFIG.model, [], 50), build(arch)
    parameters = count_costs(CONFIG, "parameters")
    shared = sum(p.numel() for p in (network.u, network.v) if p is not None)
    total = sum(p.numel() for p in network.parameters()) - sum(p.numel() for p in empty.parameters())
    assert parameters.cost(arch) == total - shared
    counts = range(50, 0, -1)
    lengths = CONFIG.data.tgt_len, CONFIG.model.reach
    macs = network.multiply_adds(*lengths, counts) - empty.multiply_adds(*lengths, counts)
    assert count_costs(CONFIG, "macs").cost(arch) == pytest.approx(macs)


def test_shares_are_of_the_interleaved_network() -> None:
    costs = make_costs("macs", {"s": 3.0, "f": 2.0, "i": 0.0}, 5)
    assert costs.interleaved == 3 + 2 + 3 + 2 + 3
    assert costs.share("sfsfs") == 1
    assert costs.share("sifi") == pytest.approx(5 / 13)
    torch.testing.assert_close(costs.relative(["f", "i", "s"]), torch.tensor([2 / 13, 0, 3 / 13]))


def test_costs_without_those_of_the_parent_are_found_again(corpus: Path, tmp_path: Path) -> None:
    parent = retrain(small_config(corpus, model__arch="ff", train__steps=1), tmp_path / "parent", Silent())
    changes = {"search__parent": str(parent.folder), "search__blocks": 2, "model__arch": None}
    config = parent.config().replace(**changes)
    (tmp_path / "search").mkdir()
    write_costs(make_costs("macs", {"s": 3.0, "f": 2.0, "i": 0.0}, 2), tmp_path / "search")
    costs = costs_of_run(tmp_path / "search", config, "macs", Silent())
    assert costs.share("ff") == 1.0
    with pytest.raises(ParnasError, match="have no cache"):
        count_costs(config, "cache")
    other = retrain(small_config(corpus, model__arch="kf", train__steps=1), tmp_path / "other", Silent())
    outside = config.replace(search__parent=str(other.folder), search__space=("s", "f"))
    assert count_costs(outside, "macs").share("kf") == 1.0, "a layer of the parent that is no candidate has a cost too"


def test_shares_are_of_the_parent_in_a_trained_network() -> None:
    costs = make_costs("macs", {"s": 3.0, "f": 2.0, "i": 0.0}, 3, ("f", "f", "s"))
    assert costs.interleaved == 8
    assert costs.share("ffs") == 1
    assert costs.share("fii") == pytest.approx(2 / 7)
    torch.testing.assert_close(costs.relative(["s"]), torch.tensor([3 / 7]))
    assert Budget(costs, 4 / 7).most_probable([{"s": 0.6, "f": 0.3, "i": 0.1}] * 3)[0].layers.count("f") == 2


@pytest.mark.parametrize("target", [0.3, 0.65, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_penalty_equals_the_mean_over_all_strings(target: float, seed: int) -> None:
    pi = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1).double()
    costs = make_costs("macs", {"s": 3.0, "f": 1.5, "i": 0.0}, 3)
    expected = 0.0
    for string in itertools.product(range(3), repeat=3):
        chance = math.prod(float(pi[block, candidate]) for block, candidate in enumerate(string))
        expected += chance * costs.share("sfi"[candidate] for candidate in string)
    found = penalty(pi, costs.relative("sfi").double(), target)
    assert float(found) == pytest.approx(max(0.0, expected / target - 1) ** 2, abs=1e-6)


def test_penalty_has_a_gradient_in_alpha_above_the_target_alone() -> None:
    """Numbers cut off from alpha would train nothing."""
    costs = make_costs("macs", {"s": 3.0, "f": 1.0, "i": 0.0}, 4).relative("sfi")
    for target, falls in ((0.2, True), (5.0, False)):
        alpha = torch.zeros(4, 3, requires_grad=True)
        penalty(alpha.softmax(dim=-1), costs, target).backward()
        assert alpha.grad is not None
        if falls:
            assert bool((alpha.grad[:, 0] > 0).all())  # descent takes from attention
            assert bool((alpha.grad[:, 2] < 0).all())  # and gives to identity
        else:
            assert not alpha.grad.any()


@pytest.mark.parametrize("estimator", ["soft", "uniform"])
def test_search_brings_the_expected_cost_to_its_target(corpus: Path, tmp_path: Path, estimator: str) -> None:
    changes = {"search__steps": 48, "search__alpha_lr": 0.16, "search__alpha_split": 0.2, "search__alpha_every": 2}
    cost = {"search__cost__target": 0.4, "search__cost__metric": "parameters", "search__cost__weight": 20.0}
    run = search(small_config(corpus, search__estimator=estimator, **changes, **cost), tmp_path / "run", Silent())
    shares = [line.expected_cost for line in run.metrics() if line.split == "train"]
    costs = read_costs(run.folder)
    assert costs is not None
    last = torch.tensor(run.pi_records()[-1].pi) @ costs.relative(["s", "f", "i"])
    assert shares[-1] == pytest.approx(float(last.sum()), rel=1e-5)
    assert shares[0] > 0.55
    assert shares[-1] < 0.45


def test_penalty_ends_near_its_target_and_not_below() -> None:
    """With Adam's steps, and a gain that every layer brings."""
    relative = make_costs("macs", {"s": 2.0, "f": 1.0, "i": 0.0}, 4).relative("sfi")
    alpha = torch.zeros(4, 3, requires_grad=True)
    optimizer = torch.optim.Adam([alpha], lr=0.04)
    for _ in range(400):
        pi = alpha.softmax(dim=-1)
        loss = (pi @ torch.tensor([-0.05, -0.02, 0.0])).sum() - 0.02 * entropies(pi).sum()
        optimizer.zero_grad()
        (loss + 2 * penalty(pi, relative, 0.6)).backward()
        optimizer.step()
    assert 0.6 < float((alpha.detach().softmax(dim=-1) @ relative).sum()) < 0.68


def test_uniform_searches_without_a_penalty_unless_one_is_given() -> None:
    weights = {name: SearchConfig.model_validate({"estimator": name}).cost_weight for name in ("uniform", "soft")}
    assert weights == {"uniform": 0.0, "soft": 2.0}
    assert SearchConfig.model_validate({"cost": {"weight": 0.5}}).cost_weight == 0.5


def test_weight_of_the_cost_rises_over_its_share_of_alphas_training(corpus: Path) -> None:
    cost = {"search__cost__target": 0.5, "search__cost__weight": 4.0, "search__cost__ramp": 0.5}
    schedule = {"search__steps": 106, "search__alpha_start_step": 6, "search__uniform_fraction": 1.0}
    search_config = small_config(corpus, **schedule, **cost).search
    optimizer = ArchitectureOptimizer(make_supernet(), search_config, 0, None)
    weights = [optimizer.cost_weight(step) for step in (0, 6, 31, 56, 105)]
    assert weights == pytest.approx([0, 0, 2, 4, 4])


def test_costs_are_kept_in_the_run_folder(tmp_path: Path) -> None:
    costs = count_costs(CONFIG, "macs")
    assert read_costs(tmp_path) is None
    write_costs(costs, tmp_path)
    assert read_costs(tmp_path) == costs
    (tmp_path / "costs.json").write_text('{"metric": "money"}')
    with pytest.raises(ParnasError, match="metric"):
        read_costs(tmp_path)


def test_latency_comes_from_the_table_that_is_given(tmp_path: Path) -> None:
    layers = {name: Timing(ms, ms, ms) for name, ms in {"s": 4.0, "f": 1.0}.items()}
    inference = ModeTable(Timing(1.0, 1.0, 1.0), layers)
    profile = Profile({}, "fp32", describe_shapes(CONFIG), 3, 9, inference, None)
    profile.write(tmp_path / "profile.json")
    config = CONFIG.replace(search__cost__table=str(tmp_path / "profile.json"))
    assert find_costs(config, "latency", Silent()) == Costs("latency", {"s": 4.0, "f": 1.0, "i": 0.0}, 9.0)
    with pytest.raises(ParnasError, match="tgt_len"):
        find_costs(config.replace(data__tgt_len=7), "latency", Silent())


@pytest.mark.parametrize("name, per_position", [("s", 16), ("s:kv_heads=1", 8)])
def test_the_cache_of_attention_holds_keys_and_values_of_its_memory(name, per_position):
    config = Config().replace(model__d_model=8, model__n_heads=2, model__d_inner=16, model__mem_len=5, data__tgt_len=3)
    assert cache_size(make_layer(name, config.model), config) == 5 * per_position


@pytest.mark.parametrize("name, size", [("s:window=4", 4 * 16), ("k:width=3", 2 * 8), ("r", 8), ("f", 0), ("i", 0)])
def test_the_cache_of_other_layers_does_not_depend_on_the_length_of_memory(name, size):
    for mem_len in (5, 50):
        changes = {"model__d_model": 8, "model__n_heads": 2, "model__d_inner": 16, "data__tgt_len": 3}
        config = Config().replace(model__mem_len=mem_len, **changes)
        assert cache_size(make_layer(name, config.model), config) == size


def test_without_memory_the_cache_is_no_cost():
    with pytest.raises(ParnasError, match=r"raise model\.mem_len"):
        count_costs(Config().replace(model__mem_len=0), "cache")


def test_counting_the_cache_works_with_clusters_and_draws_no_random_number():
    clusters = {"model__cutoffs": (10, 20), "model__proj_dims": (8, 4), "model__tie_weights": False}
    config = Config().replace(model__d_model=16, model__mem_len=4, **clusters)
    state = torch.get_rng_state()
    count_costs(config, "cache")
    assert torch.equal(torch.get_rng_state(), state)
