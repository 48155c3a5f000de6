"""The result file of a pipeline, and the page that is made of it."""

import json
import re
import runpy
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import word_level

from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.figures.draw import draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.nas.derive import derive, write_derivation
from parnas.runs.files import read_json, to_json, write_json
from parnas.runs.records import InheritedWeights
from parnas.runs.run import Run
from parnas.training.progress import Silent

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pipeline(search_run: Run, retrain_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished pipeline, put together from small runs."""
    made = tmp_path_factory.mktemp("pipeline") / "wikitext2-word-cpu"
    shutil.copytree(search_run.folder, made / "search")
    search = Run(made / "search")
    arch = search.folder / "arch.yaml"
    write_derivation(derive(search), search, arch)
    arch.write_text(re.sub("^arch: .*", "arch: sfs", arch.read_text()))  # as if it had derived what is trained here
    draw_run(search, AnimationOptions())
    for name in ("derived", "equal-cost"):
        shutil.copytree(retrain_run.folder, made / name)
    short = {"max": {"s": 1}, "cost": 0.5, "steps": 1200}
    (made / "finalists").mkdir()
    write_json(made / "finalists" / "finalists.json", [{"arch": "sifs", "ppl": 61.25, **short}])
    runs = [made / "derived", made / "equal-cost"]
    compare(runs, EvalOptions(changes={"evaluation.cache.size": 50}), Silent()).write(made)
    compare(runs, EvalOptions(split="test"), Silent()).write(made / "test")
    return made


@pytest.fixture
def folder(pipeline: Path, tmp_path: Path) -> Path:
    """A copy of the pipeline's folder, which the test may change."""
    return Path(shutil.copytree(pipeline, tmp_path / pipeline.name))


def make_page(name: str, monkeypatch: pytest.MonkeyPatch, results: Path | None = None) -> dict[str, Any]:
    """Run a script of docs/make, which then reads the results of a folder, and return its names."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    page = runpy.run_path(str(ROOT / "docs" / "make" / f"{name}.py"), init_globals={})
    if results is not None:
        page["render"].__globals__["RESULTS"] = results
    return page


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for result files; pictures go into another beside it."""
    for name, folder in (("RESULTS", "results"), ("IMAGES", "images")):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(word_level, name, tmp_path / folder)
    return tmp_path / "results"


def test_every_figure_of_the_page_is_copied_from_the_runs(
    folder: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level.main([str(folder)])
    text = (results / "word_level-wikitext2-word-cpu.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert {path.name for path in (tmp_path / "images").iterdir()} == {
        f"wikitext2-word-cpu-{kind}" for kind in ("curves.png", "network.png", "pi.gif")
    }
    written = make_page("results", monkeypatch, results)["render"]()
    for split, place in (("valid", folder), ("test", folder / "test")):
        for row in read_json(place / "comparison.json"):
            assert f"| {row['word_ppl']:,.2f} " in written, split
    assert f"`{Run(folder / 'search').derivation().arch}`" in written
    assert "## Evaluation protocols" in written
    assert "size 50" in written
    assert "Not run yet: `wikitext2-word` and `wikitext2-word-gpu`." in written
    searched, trained = (Run(folder / name).summary().steps for name in ("search", "derived"))
    assert re.search(rf"\| derived +\| `sfs` +\| [\d.]+ +\| {searched} \+ {trained} .*\| – +\|", written)
    assert re.search(rf"\| equal-cost +\| `sfs` +\| [\d.]+ +\| 0 \+ {trained} .*\| \+0.0 % +\|", written)
    assert "Each\nrow is one training.\n" in written
    assert " --one-run --baselines equal-cost --tune-eval " in written
    assert "What did not help" not in written, "nothing was compared"
    assert result["runs"]["derived"]["curves"]["valid"][-1][1] == Run(folder / "derived").summary().valid.ppl
    hours = sum(Run(folder / name).summary().seconds for name in ("search", "derived")) / 3600
    assert f"**{hours:.2f}**" in written


def test_a_one_run_is_drawn_after_its_search_and_has_no_path(folder: Path, results: Path) -> None:
    config = folder / "derived" / "config.yaml"
    config.write_text(config.read_text().replace("inherit: null", "inherit: /elsewhere/search"))
    inherited = InheritedWeights(run="/elsewhere/search", steps=7, seconds=1.0, sha256="0" * 64)
    Run(folder / "derived").write_inherited(inherited)
    result = word_level.collect(folder)
    assert "elsewhere" not in to_json(result)
    assert result["runs"]["derived"]["curves"]["first"] == 7
    assert result["runs"]["derived"]["curves"]["valid"][-1][0] == Run(folder / "derived").summary().steps + 7
    assert word_level.recipes({"runs": {"derived": result["runs"]["derived"]}}) == word_level.recipes(result)


def test_the_page_has_trainings_of_equal_time_and_the_ablation_once_they_are_measured(
    folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level.main([str(folder)])
    render = make_page("results", monkeypatch, results)["render"]
    before = render()
    without = "dynamic evaluation with a cache of `wikitext2-word-cpu`"
    assert f"not been measured yet: {without}; trainings of equal time" in before
    assert "## Trainings of equal time" not in before
    assert "## What each part is worth" not in before
    difference = {"percent": -4.25, "low": -5.0, "high": -3.5, "p": 0.01}
    network = {"name": "by hand", "archs": ["sif"], "seeds": 3, "latency": 0.6, "search_steps": 0, "steps": 1200}
    seeds = {"1": 80.0, "2": 81.5, "3": 83.0}
    networks = [
        network | {"ppl": 81.5, "ppl_by_seed": seeds, "test": 78.5, "test_difference": difference, **difference}
    ]
    networks.append(network | {"name": "one run", "ppl": 85.0, "test": 82.0, "search_steps": 300})
    result = {"benchmark": "equal_time_words", "minutes": 16, "text": 1.0, "by_hand": ["by hand"], "networks": networks}
    write_json(results / "equal_time_words-cpu.json", result)
    epochs = result | {"benchmark": "equal_time_epochs", "minutes": 7, "text": 0.125}
    write_json(results / "equal_time_epochs-cpu.json", epochs)
    change = {"source": "–", "seeds": 1, "ppl": "99.00", "± sd": "–", "time": "1.00", "parameters": 5}
    effects = {"helps": "-1.20 %", "does not help": "+0.30 % (no pointer)", "no pointer": "+9.00 %", "the recipe": "–"}
    changes = [change | {"change": name, "against the recipe": effect} for name, effect in effects.items()]
    write_json(results / "ablation_hybrid-cpu.json", {"precisions": ["fp32"], "changes": changes})
    page = render()
    assert f"not been measured yet: {without}.\n" in page
    assert "a standard deviation of\n1.8 % between seeds.\n" in page
    assert re.search(
        r"\| by hand +\| `sf` +\| 3 +\| 0.60 .*\| 81.50 +\| 78.50 +(\| -4.2 % \(-5.0 to -3.5 %\) +){2}\|", page
    )
    better = "1 of the 1 hand-designed networks had a lower perplexity than the one run"
    assert f"* A search of 300 steps in trainings of 16 minutes: {better}" in page
    eighth = "7 minutes on 12.5 % of the training text, whose vocabulary is smaller"
    assert f"* A search of 300 steps in trainings of {eighth}: {better}" in page
    assert f"\nTrainings of {eighth} (`PLAN` equal_time_epochs):\n" in page
    assert "\n* In the ablation above: does not help (+0.30 % (no pointer)).\n" in page


def test_evaluations_with_other_lengths_are_copied(
    folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, split in (("memory-7", "valid"), ("memory-7/test", "test")):
        options = EvalOptions(split, mem_len=7, changes={"evaluation.cache.size": 50})
        compare([folder / "derived"], options, Silent()).write(folder / "lengths" / place)
    word_level.main([str(folder)])
    result = read_json(results / "word_level-wikitext2-word-cpu.json")
    rows = read_json(folder / "lengths" / "memory-7" / "comparison.json")
    rows += read_json(folder / "lengths" / "memory-7" / "test" / "comparison.json")
    plain, cached, plain_test, cached_test = rows
    found = [(row["split"], row["mem_len"], row["word_ppl"]) for row in result["lengths"]]
    assert found == [("valid", 7, plain["word_ppl"]), ("test", 7, plain_test["word_ppl"])]
    caches = {
        (split, row["run"], row["mem_len"]): row["word_ppl"]
        for split, rows in result["comparison"].items()
        for row in rows
        if row["evaluation"] == "cache"
    }
    trained = result["runs"]["derived"]["settings"]["model"]["mem_len"]
    assert caches["valid", "derived", 7] == cached["word_ppl"]
    assert caches["test", "derived", 7] == cached_test["word_ppl"]
    assert set(caches) == {("valid", "derived", 7), ("test", "derived", 7), ("valid", "equal-cost", trained)}
    written = make_page("results", monkeypatch, results)["render"]()
    for protocol, settings, first, second in (
        ("plain", "", plain, plain_test),
        ("cache", "size 50, theta 0.1, weight 0.1", cached, cached_test),
    ):
        figures = f"{first['word_ppl']:,.2f} +\\| {second['word_ppl']:,.2f}"
        network = r"\| `wikitext2-word-cpu`, derived"
        line = rf"{network} +\| {protocol} +\| segments \d+, memory 7 +\| {settings} +\| {figures} "
        assert re.search(line, written), protocol
    shutil.copytree(folder / "lengths" / "memory-7", folder / "lengths" / "again")
    with pytest.raises(ParnasError, match="several evaluations of one run by one protocol"):
        word_level.collect(folder)
    shutil.rmtree(folder / "lengths" / "again")
    shutil.rmtree(folder / "lengths" / "memory-7" / "test")
    options = EvalOptions("test", changes={"evaluation.cache.size": 50})
    compare([folder / "derived"], options, Silent()).write(folder / "test")
    alone = word_level.collect(folder)["comparison"]["test"]
    assert [row["evaluation"] for row in alone] == ["plain"], "a cache with other lengths does not stand beside it"


def test_the_first_sentences_name_what_else_a_longer_training_has(
    folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level.main([str(folder)])
    word_level.main([str(folder), "wikitext2-word"])
    path = results / "word_level-wikitext2-word.json"
    longer = read_json(path)
    longer["runs"]["derived"]["settings"]["model"]["dropout"] = 0.625
    longer["runs"]["derived"]["settings"]["train"]["steps"] *= 2
    write_json(path, longer)
    page = make_page("results", monkeypatch, results)["render"]()
    assert " With twice the steps and `model.dropout 0.625`, another, of " in page
    for name in ("wikitext2-word-cpu", "wikitext2-word"):
        assert page.count(f"## Beside hand-designed networks: `{name}`\n") == 1


def test_search_and_retrainings_may_come_from_several_machines(folder: Path, results: Path, tmp_path: Path) -> None:
    whole = word_level.collect(folder)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder / "derived", elsewhere / "derived")
    for place, run in ((elsewhere, "derived"), (folder, "equal-cost")):
        compare([place / run], EvalOptions(), Silent()).write(place)
    word_level.main([str(folder)])
    path = results / "word_level-wikitext2-word-cpu.json"
    assert set(read_json(path)["runs"]) == {"equal-cost"}
    word_level.main([str(elsewhere), folder.name])
    result = read_json(path)
    assert result["search"] == json.loads(to_json(whole["search"]))
    assert result["finalists"] == whole["finalists"]
    assert set(result["runs"]) == {"derived", "equal-cost"}
    assert [row["run"] for row in result["comparison"]["valid"]] == ["derived", "equal-cost"]
    assert [row["run"] for row in result["comparison"]["test"]] == ["equal-cost"], "the other was trained anew"


def test_retrainings_by_an_earlier_recipe_stay_beside_those_of_today(
    folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level.main([str(folder)])
    path = results / "word_level-wikitext2-word-cpu.json"
    result = read_json(path)
    for run in result["runs"].values():
        run["settings"]["model"]["dropout"] = 0.625
        del run["settings"]["model"]["init_std"]  # added later: equal to its default
        run["settings"]["model"]["locked_dropout"] = True
        run["settings"]["train"]["clip"] = None
    write_json(path, result)
    word_level.main([str(folder)])
    word_level.main([str(folder)])
    now = read_json(path)
    assert (now["runs"], now["comparison"]) == (read_json(path)["runs"], result["comparison"])
    assert [each["comparison"] for each in now["earlier"]] == [result["comparison"]]
    assert [list(each["runs"]) for each in now["earlier"]] == [["derived", "equal-cost"]]
    for run in now["runs"].values():
        run["settings"]["model"]["dropout"] = 0.5
    again = word_level.set_aside(now, word_level.recipes(now["earlier"][0]))
    assert [word_level.recipes(each) for each in again["earlier"]] == [word_level.recipes(now)], "each recipe once"
    now = read_json(path)
    page = make_page("earlier_results", monkeypatch)
    today = now["runs"]["derived"]["settings"]
    monkeypatch.setitem(page["render_earlier"].__globals__, "recipe_of", lambda _: today)
    *_, written, gone, _, relative = page["render_earlier"](now)
    ppl = now["comparison"]["valid"][0]["word_ppl"]
    assert gone.startswith("`model.locked_dropout`")
    assert written.count("| model.dropout 0.625, model.locked_dropout true, train.clip null") == 2
    assert "init_std" not in written
    assert f" {ppl:,.2f} " in written
    assert relative.endswith(": +0.0 %.\n")


def test_a_string_may_come_from_the_search_of_another_result(
    folder: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level.main([str(folder)])
    pieces = tmp_path / "wikitext2-pieces-cpu"
    shutil.copytree(folder / "derived", pieces / "derived")
    for split, place in (("valid", pieces), ("test", pieces / "test")):
        compare([pieces / "derived"], EvalOptions(split=split), Silent()).write(place)
    with pytest.raises(ParnasError, match="has no search; give one where it is first, or --string-of"):
        word_level.main([str(pieces)])
    word_level.main([str(pieces), "--string-of", folder.name])
    word_level.main([str(pieces)])
    path = results / "word_level-wikitext2-pieces-cpu.json"
    both = {each.name: read_json(word_level.result_file(each.name)) for each in (folder, pieces)}
    assert read_json(path)["search"] == {**both[folder.name]["search"], "of": folder.name}
    for row in both[folder.name]["comparison"]["valid"]:
        row["word_ppl"] *= 0.8
    page = make_page("earlier_results", monkeypatch)
    words, own = both[folder.name], both[pieces.name]
    written = "\n".join(page["render_pieces"](own, words))
    assert "The network `sfs`, which the search by words derived" in written
    assert "+25.0 % in validation" in written
    before = {"runs": deepcopy(words["runs"]), "comparison": words["comparison"]}
    words["runs"]["derived"]["settings"]["train"]["average"] = 0.25
    assert "was not trained with this recipe" in page["describe_same_architecture"](own, words)
    assert "+25.0 % in validation" in page["describe_same_architecture"](own, {**words, "earlier": [before]})
    before["runs"]["derived"]["arch"] = "sf"
    assert "was not trained with this recipe" in page["describe_same_architecture"](own, {**words, "earlier": [before]})


def test_a_pipeline_that_has_not_ended_is_refused(folder: Path) -> None:
    (folder / "comparison.json").unlink()
    with pytest.raises(ParnasError, match="run the pipeline to its end"):
        word_level.collect(folder)


def test_parts_that_do_not_belong_together_are_refused(folder: Path) -> None:
    whole = word_level.collect(folder)
    other = {**whole["search"], "derivation": {**whole["search"]["derivation"], "arch": "ffff"}}
    shutil.rmtree(folder / "search")
    with pytest.raises(ParnasError, match="has no search"):
        word_level.collect(folder)
    with pytest.raises(ParnasError, match="search derived ffff, but"):
        word_level.collect(folder, {**whole, "search": other})
    shutil.copyfile(folder / "test" / "comparison.json", folder / "comparison.json")
    with pytest.raises(ParnasError, match="not of the split valid"):
        word_level.collect(folder, whole)


def test_one_runs_by_an_earlier_recipe_have_their_own_table_on_the_page(
    folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level.main([str(folder)])
    path = results / "word_level-wikitext2-word-cpu.json"
    result = read_json(path)
    searched_and_interleaved = {"runs": deepcopy(result["runs"]), "comparison": result["comparison"], "space": None}
    del result["runs"]["equal-cost"]
    for run in (*result["runs"].values(), *searched_and_interleaved["runs"].values()):
        run["settings"]["model"]["init_std"] = 0.125
    write_json(path, {**result, "earlier": [searched_and_interleaved]})
    word_level.main([str(folder)])
    now = read_json(path)
    space = now["search"]["settings"]["space"]
    assert [each["space"] for each in now["earlier"]] == [None, space]
    page = make_page("earlier_results", monkeypatch)
    *_, written = page["render_one_runs"]([now, {**now, "name": "wikitext2-word"}])
    assert f"| {', '.join(space)} " in written
    assert [written.count(f"| `{name}` ") for name in ("wikitext2-word-cpu", "wikitext2-word")] == [1, 1]
    assert written.count("model.init_std 0.125") == 2, "not the result with an interleaved network"
    assert "train.steps" not in written
    page = make_page("results", monkeypatch)
    assert [len(each["runs"]) for each in page["since_interleaved"](now["earlier"])] == [2, 1]
    changes = "\n".join(page["render_transfer"](now))
    *_, first, second, third = (line for line in changes.splitlines() if line)
    assert first.startswith("| – "), "nothing is before it"
    assert f"| candidates {', '.join(space)} " in second
    value = now["runs"]["derived"]["settings"]["model"]["init_std"]
    assert f"| model.init_std {to_json(value)} " in third
    assert "+0.0 %" in third, "it is the same training"
