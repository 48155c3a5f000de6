"""The benchmarks of compressive memory in tiny form, and the page that is made of their results."""

import json
import runpy
from pathlib import Path

import compressive
import compressive_search
import compressive_step
import pytest
from trainings import append_rows, read_rows

from parnas.config.loader import check_config
from parnas.config.yaml_file import read_yaml
from parnas.runs.files import read_json

ROOT = Path(__file__).resolve().parents[2]


def plan_and_config():
    settings = read_yaml(compressive.CONFIG.read_text(encoding="utf-8"), "compressive.yaml")
    plan = settings.pop("compressive")
    return plan, check_config(settings, "compressive.yaml")


def test_the_design_has_all_functions_losses_and_ratios_and_plain_memory_beside_them():
    plan, config = plan_and_config()
    networks = compressive.design(config, plan["ratios"])
    names = [network.name for network in networks]
    assert len(set(names)) == len(names)
    for function in compressive_step.FUNCTIONS:
        for ratio in (2, 3, 4):
            assert any(name.startswith(f"{function}, ") and f"{ratio}:1" in name for name in names)
    assert {f"conv, {loss}, {ratio}:1" for loss in compressive_step.LOSSES for ratio in (2, 3, 4)} <= set(names)
    assert {f"dilated_conv, {loss}, 3:1" for loss in compressive_step.LOSSES} <= set(names)
    made = {network.name: config.replace(**network.changes) for network in networks}
    model = config.model
    span = model.mem_len + model.memory.cmem_len
    assert made["plain, same span"].model.mem_len == span
    assert made["plain, same reach"].model.mem_len == model.mem_len + 3 * model.memory.cmem_len
    assert made["plain, no compressed memory"].model == model
    assert made["conv, bptt, 2:1"].model.memory.loss == "bptt"
    assert made["conv, attention, 3:1, tokens"].model.memory.distance == "tokens"


@pytest.mark.slow
def test_tiny_trainings_fill_the_table_once(corpus, tmp_path, capsys):
    arguments = ["--tiny", "--corpus", corpus, "--runs", tmp_path / "runs", "--out", tmp_path, "--workers", 1]
    compressive.main(list(map(str, arguments)))
    _, config = plan_and_config()
    rows = read_rows(tmp_path / "compressive.csv", compressive.Row)
    assert {row.name for row in rows} == {network.name for network in compressive.design(config, [3])}
    assert all(row.seed == 1 and 1 < row.ppl < 100 for row in rows)
    before = (tmp_path / "compressive.csv").read_text()
    compressive.main(list(map(str, [*arguments, "--report"])))
    assert (tmp_path / "compressive.csv").read_text() == before
    table = {line["memory"]: line for line in read_json(tmp_path / "compressive-cpu.json")["networks"]}
    assert table["plain, same span"]["better than plain, same span"] == "+0.00 %"
    assert "Validation perplexity per piece" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tiny_search_trains_what_it_derived_beside_guesses(corpus, tmp_path):
    arguments = ["--tiny", "--corpus", corpus, "--runs", tmp_path / "runs", "--out", tmp_path, "--workers", 1]
    for _ in range(2):  # the second time nothing is left to do
        compressive_search.main(list(map(str, arguments)))
    result = read_json(tmp_path / "compressive_search-cpu.json")
    assert result["share"] <= result["target"]
    names = ["derived", "derived, at any cost", "interleaved", "compressive"]
    assert [line["network"] for line in result["networks"]] == names
    assert set(result["pi"][0]) == {"s", "c", "f", "i"}
    assert (tmp_path / "runs" / "search" / "arch.yaml").is_file()


def test_the_tiny_step_times_every_kind_of_memory(tmp_path):
    compressive_step.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "compressive_step-cpu.json").read_text())
    names = [row["memory"] for row in result["results"][0]["rows"]]
    assert len(names) == 2 + 2 * (3 + 2 * 3)
    assert result["results"][0]["rows"][0]["of plain, same span"] == 1
    timed = [
        row["of plain, same span"]
        for of in result["results"]
        for row in of["rows"]
        if row["memory"] != compressive_step.FAR and "most_used" not in row["memory"]
    ]
    assert result["slowest"] == max(timed)


def test_a_step_trains_with_memory_carried_on():
    size = compressive_step.TINY
    device = compressive_step.harness.choose("cpu", "fp32")
    for letter, changes in compressive_step.variants(size).values():
        compressive_step.make_step(size, letter, changes, device)()


def test_tables_are_means_over_seeds_and_the_page_tells_them(tmp_path, monkeypatch):
    plan, config = plan_and_config()
    values = {"plain, same span": (30.0, 32.0), "max_pool, 3:1": (29.0, 30.0), "conv, attention, 3:1": (31.0,)}
    steps = {each.name: each.steps(config) for each in compressive.design(config, plan["ratios"])}
    for name, ppl in values.items():
        append_rows(
            tmp_path / "rows.csv",
            [
                compressive.Row(name, seed, steps[name], of, 1.5, 2.0, 3.0, 4.0, 100 * of)
                for seed, of in enumerate(ppl, 1)
            ],
        )
    table = compressive.tabulate(config, plan, tmp_path / "rows.csv")
    lines = {line["memory"]: line for line in table}
    assert (
        lines["max_pool, 3:1"]
        | {
            "ppl": "29.50",
            "± sd": "0.71",
            "seeds": 2,
            "better than plain, same span": "+4.79 %",
            "words under 100": "2,950",
        }
        == lines["max_pool, 3:1"]
    )
    assert lines["conv, attention, 3:1"]["± sd"] == "–"
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    page = runpy.run_path(str(ROOT / "docs" / "make" / "compressive.py"))
    sentences = list(page["judge_table"]({"networks": table}))
    figures = (
        ("31.00 ± 1.41 (2 seeds)",),
        ("max_pool, 3:1", "29.50 ± 0.71 (2 seeds)", "4.79 % better"),
        ("conv, attention, 3:1", "31.00 (1 seed)", "3.33 % worse"),
        ("max_pool 29.50 (2)", "conv, attention 31.00 (1)"),
        ("3:1", "31.00 (1 seed)", "3.33 % worse"),
    )
    for sentence, parts in zip(sentences, figures, strict=True):
        assert all(part in sentence for part in parts), sentence


def test_the_time_of_the_longer_training_is_what_was_measured():
    path = ROOT / "benchmarks" / "results" / "compressive_step-cpu.json"
    result = next(of for of in read_json(path)["results"] if (of["size"], of["precision"]) == ("small", "bf16"))
    ratios = {row["memory"]: row["of plain, same span"] for row in result["rows"]}
    assert pytest.approx(ratios["conv, attention, slots"], rel=0.05) == compressive.LONGER_BY
