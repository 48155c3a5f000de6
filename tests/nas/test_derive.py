"""From pi to an architecture."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import small_config

from parnas.config.schema import Reach, Shape
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas import derive as derive_module
from parnas.nas.cost import Metric, count_costs, read_costs, write_costs
from parnas.nas.derive import (
    BlockChoice,
    Constraints,
    derive,
    read_constraints,
    read_limits,
    read_within,
    write_derivation,
)
from parnas.nas.rerank import held_out, read_rerank
from parnas.nas.search import search
from parnas.runs.files import read_json
from parnas.runs.run import PI, RERANK, Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.progress import Silent


def with_pi(run: Run, folder: Path, pi: list[list[float]]) -> Run:
    """A copy of a search whose alpha still learns, the last line of pi given."""
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns(RERANK))
    copy = Run(folder)
    copy.append(PI, {"step": run.config().search.alpha_end_step - 1, "tau": 0.1, "pi": pi})
    return copy


def test_argmax_entropy_and_margin_of_a_block() -> None:
    block = BlockChoice.from_pi("f", {"s": 0.2, "f": 0.5, "i": 0.3})
    assert block.margin == pytest.approx(0.2)
    assert block.entropy == pytest.approx(-(0.2 * math.log(0.2) + 0.5 * math.log(0.5) + 0.3 * math.log(0.3)))
    assert BlockChoice.from_pi("f", {"s": 0.0, "f": 1.0}).entropy == 0
    assert BlockChoice.from_pi("s", {"s": 0.2, "f": 0.5, "i": 0.3}).margin == pytest.approx(-0.3)
    assert BlockChoice.from_pi("s", {"s": 1.0}).margin == 1


def test_derives_the_last_pi_and_warns_of_small_margins(search_run: Run, tmp_path: Path) -> None:
    run = with_pi(search_run, tmp_path / "run", [[0.8, 0.1, 0.1], [0.31, 0.40, 0.29], [0.1, 0.2, 0.7]])
    derivation = derive(run)
    assert str(derivation.architecture) == "sfi"
    (warning,) = (warning for warning in derivation.warnings if "undecided" in warning)
    assert warning.startswith("block 2 is undecided")
    assert "0.090" in warning


def test_arch_file_holds_the_string_and_its_evidence(search_run: Run, tmp_path: Path) -> None:
    derivation = derive(search_run)
    write_derivation(derivation, search_run, tmp_path / "arch.yaml")
    content = yaml.safe_load((tmp_path / "arch.yaml").read_text())
    assert content["arch"] == search_run.summary().arch
    assert [list(block["pi"].values()) for block in content["blocks"]] == search_run.pi_records()[-1].pi
    assert sum(content["counts"].values()) == len(content["arch"])


def test_parameters_are_those_of_the_network(search_run: Run, tmp_path: Path) -> None:
    derivation = derive(with_pi(search_run, tmp_path / "run", [[1, 0, 0], [0, 0, 1], [0, 1, 0]]))
    loaded = load(search_run.folder)
    network = TransformerXL.build(loaded.config.model, derivation.architecture, loaded.tokenizer.vocab_size)
    assert derivation.parameters == sum(parameter.numel() for parameter in network.parameters())


def test_an_unfinished_search_is_said_to_be(search_run: Run, tmp_path: Path) -> None:
    shutil.copytree(search_run.folder, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert any("has not ended" in warning for warning in derive(Run(tmp_path / "run")).warnings)


def test_what_cannot_be_derived_is_refused(search_run: Run, retrain_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"no pi\.jsonl"):
        derive(retrain_run)
    with pytest.raises(ParnasError, match="identity"):
        derive(with_pi(search_run, tmp_path / "run", [[0, 0, 1]] * 3))
    shutil.copytree(search_run.folder, tmp_path / "empty")
    (tmp_path / "empty" / PI).write_text("")
    with pytest.raises(ParnasError, match=PI):
        derive(Run(tmp_path / "empty"))
    lines = [json.dumps({"step": 1, "tau": 1.0, "pi": [[1, 0, 0]]}), "not json", "{}"]
    (tmp_path / "empty" / PI).write_text("\n".join(lines))
    with pytest.raises(ParnasError, match="line 2"):
        derive(Run(tmp_path / "empty"))


# Constraints

PI_OF_THREE = [[0.6, 0.3, 0.1], [0.55, 0.35, 0.1], [0.2, 0.3, 0.5]]


def slow_best(pi: list[list[float]], costs: dict[str, float], budget: float, most_s: int = 3) -> list[str]:
    """All strings within a budget, the most probable first, one for each network."""
    strings = ["".join(letters) for letters in itertools.product("sfi", repeat=3)]
    fitting = [
        string
        for string in strings
        if sum(costs[letter] for letter in string) <= budget and string.count("s") <= most_s and set(string) != {"i"}
    ]
    ranked = sorted(
        fitting, key=lambda string: -math.prod(row["sfi".index(letter)] for row, letter in zip(pi, string, strict=True))
    )
    first: dict[str, str] = {}
    for string in ranked:
        first.setdefault(string.replace("i", ""), string)
    return list(first.values())


@pytest.mark.parametrize("metric", ["macs", "parameters"])
@pytest.mark.parametrize("cost_target", [0.3, 0.65, 1.0, math.inf])
def test_derives_the_most_probable_within_a_budget(
    search_run: Run, tmp_path: Path, metric: Metric, cost_target: float
) -> None:
    run = with_pi(search_run, tmp_path / "run", PI_OF_THREE)
    derivation = derive(run, Constraints(cost_target, metric, top_k=4))
    costs = count_costs(run.config(), metric)
    assert derivation.costs == costs
    expected = slow_best(PI_OF_THREE, dict(costs.per_layer), cost_target * costs.interleaved)
    assert [str(each.architecture) for each in derivation.ranking] == expected[:4]
    assert costs.share(derivation.architecture) <= cost_target + 1e-9
    content = derivation.to_record(run).to_dict()
    assert content["cost"]["share"] == pytest.approx(costs.cost(derivation.architecture) / costs.interleaved)
    assert content["ranking"][0]["behind"] == 0
    chances = [
        math.prod(row["sfi".index(letter)] for row, letter in zip(PI_OF_THREE, str(each.architecture), strict=True))
        for each in derivation.ranking
    ]
    assert [each.probability for each in derivation.ranking] == pytest.approx(chances)
    assert [each.behind for each in derivation.ranking] == pytest.approx([math.log(chances[0] / p) for p in chances])


def test_limits_of_a_layer_hold(search_run: Run, tmp_path: Path) -> None:
    run = with_pi(search_run, tmp_path / "run", PI_OF_THREE)
    assert str(derive(run).architecture) == "ssi"
    derivation = derive(run, read_constraints(None, None, {"s": 1}, 1))
    assert str(derivation.architecture) == slow_best(PI_OF_THREE, dict.fromkeys("sfi", 0.0), 1.0, 1)[0] == "sfi"
    assert "at most 1 of s" in derivation.method
    assert derivation.to_record(run).constraints == {"top_k": 1, "max": {"s": 1}}
    assert derive(run).to_record(run).constraints == {}
    assert derivation.blocks[1].margin == pytest.approx(0.35 - 0.55)


def without_evolution(run: Run) -> Run:
    """Return the run after changing its configuration: it re-ranks the most probable networks alone."""
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("evolution_steps: 4", "evolution_steps: 0"))
    return run


def test_reranking_adds_inherited_loss_and_pi(search_run: Run, tmp_path: Path) -> None:
    """Against the loss of each network read by itself, on the same text, and the product of its probabilities."""
    run = without_evolution(with_pi(search_run, tmp_path / "run", PI_OF_THREE))
    asked = derive(run, Constraints(rerank_top_k=5, top_k=7, limits={"s": 2}))
    by_pi = derive(run, Constraints(top_k=7, limits={"s": 2})).ranking
    found = load(run.folder, supernet_weights=True)
    streams = prepare(found.config.data)
    eos_id, text = streams.tokenizer.eos_id, held_out(found.config, streams)
    device, shape = choose_device(found.config.runtime), Shape(1, 8, Reach(8))
    scores = {}
    for each in by_pi[:5]:
        loss = measure_loss(found.model.extract(each.architecture), text, eos_id, device, shape).per_token
        scores[each.architecture] = loss - found.config.search.entropy_end / 2 * math.log(each.probability)
    first = sorted(scores, key=scores.__getitem__)
    assert [each.architecture for each in asked.ranking] == [*first, *(each.architecture for each in by_pi[5:])]
    assert [each.score for each in asked.ranking[:5]] == pytest.approx(sorted(scores.values()), rel=1e-4)
    assert all(each.loss is each.score is None for each in asked.ranking[5:])
    assert asked.architecture == asked.ranking[0].architecture
    assert [block.layer for block in asked.blocks] == list(asked.architecture)
    assert "best by pi and by the SuperNet's weights of 5 networks within at most 2 of s" in asked.method


def test_networks_that_the_search_has_reranked_are_not_evaluated_again(search_run: Run, tmp_path: Path) -> None:
    shutil.copytree(search_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    run = Run(tmp_path / "run")
    kept = {each["arch"]: each["loss"] for each in read_json(run.folder / RERANK)["networks"]}
    shutil.rmtree(run.supernet)
    for constraints in (Constraints(), Constraints(top_k=2), Constraints(rerank_top_k=16)):
        ranking = derive(run, constraints).ranking
        assert {str(each.architecture): each.loss for each in ranking}.items() <= kept.items()
        scores = [each.score for each in ranking]
        assert scores == sorted(scores)
    with pytest.raises(ParnasError, match="checkpoint"):
        derive(run, Constraints(limits={"s": 1}))  # other networks have to be evaluated
    assert derive(run, Constraints(rerank_top_k=0)).method == "argmax of pi"


@pytest.mark.parametrize("lost", ["file", "of later steps"])
def test_a_lost_reranking_is_repeated(search_run: Run, tmp_path: Path, lost: str) -> None:
    """As of a run folder that was copied in part, or a killed search that began again."""
    run = Run(Path(shutil.copytree(search_run.folder, tmp_path / "run")))
    path = run.folder / RERANK
    if lost == "file":
        path.unlink()
    else:
        path.write_text(json.dumps({**read_json(path), "step": 10**6}))
    again, first = derive(run), derive(search_run)
    assert [each.architecture for each in again.ranking] == [each.architecture for each in first.ranking]
    assert [each.loss for each in again.ranking] == pytest.approx([each.loss for each in first.ranking], rel=1e-5)


def test_top_k_gives_so_many_of_the_best(search_run: Run) -> None:
    every = derive(search_run).ranking
    assert len(every) == len(read_rerank(search_run, 24)) > 3
    assert derive(search_run, Constraints(top_k=3)).ranking == every[:3]
    assert len(derive(search_run, Constraints(top_k=3, rerank_top_k=0)).ranking) == 3


def test_no_reranking_before_alpha_is_frozen(search_run: Run, tmp_path: Path) -> None:
    run = with_pi(search_run, tmp_path / "run", PI_OF_THREE)
    assert derive(run).ranking[0].loss is None


def test_re_ranking_on_another_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "text")
    run = search(small_config(tmp_path / "text"), tmp_path / "run", Silent())
    text = (tmp_path / "text" / "train.txt").read_text()
    (tmp_path / "text" / "train.txt").write_text(text[len(text) // 2 :])
    assert derive(run).ranking[0].loss, "what was kept needs no text"
    (run.folder / RERANK).unlink()
    with pytest.raises(ParnasError, match=r"data\.corpus"):
        derive(run)


def test_re_ranking_needs_the_shared_weights(search_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(search_run.folder, tmp_path / "run")))
    for path in run.supernet.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    (run.folder / RERANK).unlink()
    with pytest.raises(ParnasError, match="supernet"):
        derive(run)


def test_a_damaged_re_ranking_is_refused(search_run: Run, tmp_path: Path) -> None:
    shutil.copytree(search_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    run = Run(tmp_path / "run")
    path = run.folder / RERANK
    lost = {**read_json(search_run.folder / RERANK)}
    lost["networks"][0]["loss"] = None
    path.write_text(json.dumps(lost))
    assert math.isinf(derive(run).ranking[-1].loss or 0)
    foreign = [{**lost, "networks": [{"arch": arch, "loss": 1.0}]} for arch in ("kkk", "s")]
    for content in ([1, 2], *foreign):
        path.write_text(json.dumps(content))
        with pytest.raises(ParnasError, match=RERANK):
            derive(run)
    assert derive(run, Constraints(rerank_top_k=0)).ranking[0].loss is None, "which does not need it"


def test_a_target_that_no_network_meets_is_refused_before_training(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__space=("s", "f"), search__cost__target=0.1)
    with pytest.raises(ParnasError, match=r"0\.1 .* search\.cost\.target .* to 0\.\d+ "):
        search(config, tmp_path / "run", Silent())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_text_for_re_ranking_is_unseen_by_the_weights(corpus: Path) -> None:
    config = small_config(corpus)
    streams = prepare(config.data)
    assert len(held_out(config.replace(search__estimator="soft"), streams)) == len(streams.tokens("valid"))
    own = held_out(config.replace(search__alpha_split=0.25), streams)
    train = streams.tokens("train")
    assert own.tolist() == train[-len(own) :].tolist()
    assert len(own) == pytest.approx(len(train) / 4, abs=1)


def test_the_target_of_the_search_is_kept_by_default(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__cost__target=0.65, search__cost__metric="parameters")
    run = with_pi(search(config, tmp_path / "search", Silent()), tmp_path / "run", [[0.9, 0.09, 0.01]] * 3)
    derivation = derive(run)
    assert derivation.costs == read_costs(run.folder) == count_costs(config, "parameters")
    assert derivation.target == 0.65
    assert derivation.costs is not None
    assert derivation.costs.share(derivation.architecture) <= 0.65
    assert str(derive(run, Constraints(cost_target=math.inf)).architecture) == "sss"


def test_a_stored_ranking_is_not_used_where_costs_have_changed_since(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(corpus, search__cost__target=0.65, search__cost__metric="parameters", search__rerank_top_k=2)
    run = search(config, tmp_path / "run", Silent())
    loads: list[Run] = []
    original = derive_module.losses_of_run
    monkeypatch.setattr(derive_module, "losses_of_run", lambda *given: (loads.append(given[0]), original(*given))[1])
    stored = derive(run)
    assert not loads
    costs = count_costs(config, "parameters")
    factor = 0.7 / max(costs.share(each.architecture) for each in stored.ranking)
    costly = replace(costs, per_layer={name: factor * value for name, value in costs.per_layer.items()})
    write_costs(costly, run.folder)
    found = derive(run)
    assert loads == [run]
    assert all(costly.share(each.architecture) <= 0.65 for each in found.ranking)


def test_a_collapsed_search_is_said_to_be(search_run: Run, tmp_path: Path) -> None:
    run = with_pi(search_run, tmp_path / "run", [[0.3, 0.1, 0.6], [0.1, 0.1, 0.8], [0.2, 0.1, 0.7]])
    assert any("70%" in warning for warning in derive(run).warnings)


def test_constraints_that_cannot_be_read_are_refused() -> None:
    assert read_constraints(0.5, "macs", read_limits(["s=4", "f=0"]), 3) == Constraints(
        0.5, "macs", {"s": 4, "f": 0}, 3
    )
    for target, metric, limits in [(0.0, None, {}), (None, "time", {}), (None, None, {"s": -1})]:
        with pytest.raises(ParnasError, match="give"):
            read_constraints(target, metric, limits, 1)
    for text in ("s", "s=-1", "=1"):
        with pytest.raises(ParnasError, match="give"):
            read_limits([text])


def test_a_constraint_is_given_once() -> None:
    with pytest.raises(ParnasError, match=r"Two cost targets \(--within\) are for macs"):
        read_within("macs=0.5, macs=0.3")
    with pytest.raises(ParnasError, match=r"Two limits \(--max\) are for s"):
        read_limits(["s=4", "s=2"])
