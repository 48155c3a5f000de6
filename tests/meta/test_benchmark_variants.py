"""The benchmark of variants in its tiny form, its plans, and the changed networks that it tries."""

from pathlib import Path

import pytest
import variants
from conftest import make_corpus, small_config
from trainings import read_rows
from tried_layers import CHANGED_NETWORKS

from parnas.architecture import Architecture
from parnas.config.yaml_file import read_yaml
from parnas.errors import ParnasError
from parnas.runs.files import read_json, write_json, write_text
from parnas.runs.resolve import read_config
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

BENCHMARKS = Path(variants.__file__).parent
PLANS = ["hybrid", "layers", "recipe"]


@pytest.mark.parametrize("name", PLANS)
def test_every_variant_of_a_plan_is_valid_and_differs_from_the_first(name: str) -> None:
    settings = read_yaml((BENCHMARKS / f"{name}.yaml").read_text(encoding="utf-8"), name)
    found = variants.read_variants(settings.pop(name))
    config = read_config(settings, [])
    assert len({variant.name for variant in found}) == len(found)
    first, *others = [
        (variants.changed_config(config, variants.Job(each, each.steps[-1], 1)), each.tried) for each in found
    ]
    assert all(other != first for other in others)
    assert {name for each in found for name in each.tried} <= variants.ALL_TRIED.keys()


@pytest.mark.slow
def test_variants_are_trained_once_and_compared_by_seed(tmp_path: Path) -> None:
    plan = "study:\n  variants: [{name: interleaved}, {name: other, changes: {model.arch: fs}}]\n  targets: [0.5]\n"
    plan += "  search_seeds: [1, 3]\n"
    write_text(
        tmp_path / "study.yaml",
        plan + "data: {}\nsearch: {cost: {metric: macs}}\nmodel: {arch: f}\nruntime: {threads: 1}\n",
    )
    common = [str(tmp_path / "study.yaml"), "--tiny", "--device", "cpu", "--out", str(tmp_path), "--workers", "1"]
    common += ["--corpus", str(make_corpus(tmp_path / "corpus"))]
    variants.main([*common, "--search"])
    first, second = read_json(tmp_path / "study_search.json")["searches"]
    assert (first["seed"], second["seed"]) == (1, 3)
    assert all(Architecture.parse(each["derived"]["0.5"]).canonical() for each in (first, second))
    assert len(first["pi"]) == 4
    assert first["pi"] != second["pi"]
    for _ in range(2):
        variants.main(common)
    rows = read_rows(tmp_path / "study.csv", variants.Row)
    names = "interleaved", "other", "derived within 0.5"
    other_search = "derived within 0.5, search from seed 3"
    expected = [(name, 4, seed) for seed in (1, 2) for name in names]
    assert [row[:3] for row in rows] == [*expected[:3], (other_search, 4, 1), *expected[3:]]
    variants.main([*common, "--search"])  # nothing is missing
    write_json(tmp_path / "study_search.json", {"searches": [first]})
    with pytest.raises(ParnasError, match="search from seed 3; delete their rows"):
        variants.main([*common, "--search"])
    write_json(tmp_path / "study_search.json", {"searches": [first, second]})
    for stage in ("--latency", "--report"):
        variants.main([*common, stage])
    base, other, *_ = read_json(tmp_path / "study-cpu.json")["variants"]
    assert base["ppl"] == pytest.approx((rows[0].ppl + rows[4].ppl) / 2)
    assert base["latency"] == 1, "relative to the interleaved network"
    assert "percent" not in base
    assert base["ppl_by_seed"] == {"1": rows[0].ppl, "2": rows[4].ppl}
    percents = [100 * (rows[i + 1].ppl / rows[i].ppl - 1) for i in (0, 4)]
    assert other["percent"] == pytest.approx(sum(percents) / 2)
    assert other["low"] < other["percent"] < other["high"]
    assert 0 < other["p"] < 1


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(corpus, model__arch="sfsf", model__n_heads=4, train__optimizer="muon", train__lr=1e-2)
    return retrain(config, tmp_path_factory.mktemp("plain") / "run", Silent())


@pytest.mark.parametrize("name", CHANGED_NETWORKS)
def test_a_changed_network_trains_otherwise(name: str, plain: Run, tmp_path: Path) -> None:
    config, summary = plain.config(), plain.summary()
    with CHANGED_NETWORKS[name]():
        changed = retrain(config, tmp_path / "changed", Silent()).summary()
    assert changed.valid.ppl != summary.valid.ppl
    assert changed.parameters - summary.parameters == {
        "bigrams": bigram_parameters(config.model.d_model),
        "gated_heads": 2 * config.model.d_model * config.model.n_heads,
        "half_skips": 2 * config.model.d_model,
        "smear": config.model.d_model + 1,
    }.get(name, 0)


def test_networks_are_as_before_when_a_change_has_ended(plain: Run, tmp_path: Path) -> None:
    for change in CHANGED_NETWORKS.values():
        with change():
            pass
    assert retrain(plain.config(), tmp_path / "after", Silent()).summary().valid == plain.summary().valid


def bigram_parameters(d_model: int) -> int:
    return 10_240 * 128 + 128 * d_model
