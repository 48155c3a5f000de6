"""The choice of baselines: interleaved and sandwich networks, and random ones of the same cost."""

import itertools
import random
import shutil
from pathlib import Path

import pytest

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.nas.cost import Costs, make_costs
from parnas.runs.files import write_text
from parnas.runs.run import Run
from parnas.studies.baselines import Baseline, Baselines, choose_baselines, deepest_interleaved, find_baselines
from parnas.training.progress import Silent

SFI = ("s", "f", "i")


def costs_of(blocks: int, s: float = 1.7, f: float = 1.0, i: float = 0.0) -> Costs:
    return make_costs("macs", {"s": s, "f": f, "i": i}, blocks)


def choose(derived: str, blocks: int, count: int = 0, seed: int = 0, costs: Costs | None = None) -> Baselines:
    parsed = Architecture.parse(derived)
    return choose_baselines(parsed, costs or costs_of(blocks), [SFI] * blocks, count, seed)


def strings(baselines: Baselines) -> dict[str, str]:
    return {each.name: str(each.architecture) for each in baselines.networks}


def random_ones(baselines: Baselines) -> list[Baseline]:
    return [each for each in baselines.networks if each.random]


# The choice of networks.


def test_the_shallower_one_is_the_deepest_interleaved_that_costs_no_more() -> None:
    draw = random.Random(0)
    for _ in range(200):
        blocks = draw.randint(1, 9)
        costs = costs_of(blocks, draw.uniform(0.1, 3), draw.uniform(0.1, 3))
        most = draw.uniform(0, 1.2) * costs.interleaved
        affordable = [depth for depth in range(1, blocks + 1) if costs.cost(("sf" * depth)[:depth]) <= most]
        expected = ("sf" * blocks)[: max(affordable, default=1)]
        assert str(deepest_interleaved(costs, most, blocks)) == expected


def test_networks_of_the_same_layers_in_another_order_cost_the_same() -> None:
    """Sums of floats depend on their order; comparisons of costs must not."""
    layers, costs = "f" * 5 + "s" * 5, costs_of(10, 0.3, 0.7)
    assert costs.cost(layers) < costs.interleaved, "the floats differ, or this test shows nothing"
    assert strings(choose(layers, 10, costs=costs))["shallower"] == "sfsfsfsfsf"


def test_a_network_cheaper_than_any_interleaved_one_gets_a_note() -> None:
    baselines = choose("f", 4)
    assert strings(baselines)["shallower"] == "s"
    assert any("even one block" in note for note in baselines.notes)
    assert not choose("ff", 4).notes


@pytest.mark.parametrize(
    ("blocks", "name", "string"),
    [
        (2, "sandwich-2-1", "sf"),
        (5, "sandwich-4-1", "ssff"),
        (6, "sandwich-6-1", "ssfsff"),
        (8, "sandwich-8-1", "ssfsfsff"),
        (10, "sandwich-10-2", "sssfsfsfff"),
    ],
)
def test_the_sandwich_has_ends_of_a_third_of_its_pairs(blocks: int, name: str, string: str) -> None:
    baselines = choose("s", blocks)
    assert strings(baselines)[name] == string
    assert any(f"{name} has one block less" in note for note in baselines.notes) == bool(blocks % 2)


def test_a_single_block_has_no_sandwich() -> None:
    assert strings(choose("s", 1)) == {"derived": "s", "interleaved": "s", "shallower": "s"}


def test_compressive_memory_everywhere_is_a_baseline_if_it_is_a_candidate() -> None:
    costs = make_costs("macs", {"s": 1.7, "c": 2.0, "f": 1.0, "i": 0.0}, 4)
    baselines = choose_baselines(Architecture("scff"), costs, [("s", "c", "f", "i")] * 4, 0, 0)
    assert strings(baselines)["compressive"] == "cfcf"
    assert "compressive" not in strings(choose("ssff", 4))


def test_alternating_mixers_are_a_baseline_if_convolution_is_a_candidate() -> None:
    costs = make_costs("macs", {"s": 3.0, "k": 1.0, "f": 1.0, "i": 0.0}, 6)
    baselines = choose_baselines(Architecture("kskkk"), costs, [("s", "k", "f", "i")] * 6, 0, 0)
    assert strings(baselines)["alternating"] == "kfsfk"
    assert "alternating" not in strings(choose("ssff", 4))


def test_identity_is_dropped_and_shares_are_of_the_interleaved_network() -> None:
    derived = choose("sifi", 4).networks[0]
    assert (derived.name, str(derived.architecture)) == ("derived", "sf")
    assert derived.share == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_random_networks_are_others_of_the_same_cost(seed: int) -> None:
    costs = costs_of(10, i=0.4)  # what identity may cost as a candidate, a network does not
    baselines = choose("sfsfisfffi", 10, 12, seed, costs)
    cost = costs.cost("sfsfsfff")
    drawn = random_ones(baselines)
    assert [each.name for each in drawn] == [f"random-{number}" for number in range(1, 13)]
    for each in drawn:
        assert "i" not in each.architecture.layers
        assert 0.97 * cost <= costs.cost(each.architecture) <= 1.03 * cost
        assert each.share == pytest.approx(costs.share(each.architecture))
    others = {each.architecture for each in drawn}
    assert len(others) == 12
    assert Architecture.parse("sfsfsfff") not in others
    assert not baselines.notes


def test_random_networks_follow_from_the_seed_and_fewer_are_the_first_of_more() -> None:
    """Also if more need a wider band: trainings of a smaller count can then be reused."""
    twelve = random_ones(choose("sfsffsff", 8, 12, 1))
    assert twelve == random_ones(choose("sfsffsff", 8, 12, 1))
    assert twelve != random_ones(choose("sfsffsff", 8, 12, 2))
    for count in (0, 5, 40, 200):
        baselines = choose("sfsffsff", 8, count, 1)
        assert random_ones(baselines)[:12] == twelve[:count]
    assert any("within ± " in note for note in baselines.notes), "200 need a wider band"


def test_the_band_widens_only_if_networks_are_missing() -> None:
    """With s at 1.7 and f at 1, sf alone costs as much as fs; the next, fff, costs 3."""
    baselines = choose("fs", 3, 2, 0)
    assert str(random_ones(baselines)[0].architecture) == "sf"
    reach = abs(random_ones(baselines)[1].share / baselines.networks[0].share - 1)
    assert str(random_ones(baselines)[1].architecture) == "fff"
    assert 0.06 < reach <= 0.12
    assert any("within ± 12% " in note and "fewer than 2 are within ± 3%" in note for note in baselines.notes)


def test_a_space_with_too_few_networks_gives_all_it_has() -> None:
    baselines = choose("s", 2, 9, 0)
    assert {str(each.architecture) for each in random_ones(baselines)} == {"f", "ss", "ff", "fs"}  # not s, not sf
    assert any("of any cost" in note for note in baselines.notes)
    assert any("only 4 other networks" in note for note in baselines.notes)


def test_random_networks_have_the_candidates_of_each_block() -> None:
    spaces = [("s",), ("s", "f"), ("f", "i"), ("f", "i")]
    baselines = choose_baselines(Architecture.parse("ssf"), costs_of(4), spaces, 9, 0)
    possible = {"".join(layers).replace("i", "") for layers in itertools.product(*spaces)}
    assert {str(each.architecture) for each in random_ones(baselines)} == possible - {"ssf", "sfsf"}


def test_layers_without_a_cost_and_negative_counts_are_refused() -> None:
    with pytest.raises(ParnasError, match="s:heads=2"):
        choose("s:heads=2 f", 2)
    with pytest.raises(ParnasError, match="--random"):
        choose("sf", 2, -1)


def test_only_a_finished_search_is_taken(search_run: Run, retrain_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match="retrain"):
        find_baselines(retrain_run, 1, 0, Silent())
    shutil.copytree(search_run.folder, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ParnasError, match="--resume"):
        find_baselines(Run(tmp_path / "run"), 1, 0, Silent())


def test_the_derived_network_is_that_of_arch_yaml_if_there_is_one(search_run: Run, tmp_path: Path) -> None:
    shutil.copytree(search_run.folder, tmp_path / "run")
    (tmp_path / "run" / "arch.yaml").unlink(missing_ok=True)
    run = Run(tmp_path / "run")
    argmax = Architecture.parse(search_run.summary().arch).canonical()
    assert find_baselines(run, 0, 0, Silent()).networks[0].architecture == argmax  # no target of cost
    for string in ("ff", "fs"):
        write_text(run.folder / "arch.yaml", f"arch: {string}\n")
        assert str(find_baselines(run, 0, 0, Silent()).networks[0].architecture) == string
