"""Rows of other ways of evaluation on the report page: in tables of their own, compared with no others."""

import json
from pathlib import Path

import pytest
from report_helpers import make_all, page_of, write_comparison

from parnas.errors import ParnasError
from parnas.figures.report import trade_off
from parnas.figures.report_runs import gather
from parnas.figures.report_tables import tables_of


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """A comparison whose rows stand there once more, read dynamically, with much lower perplexities."""
    folder = make_all(tmp_path)
    rows = json.loads((folder / "comparison.json").read_text())
    conditions = {"changes": {"evaluation.stride": 1, "evaluation.dynamic.lr": 1e-05}, "adapted": True}
    plain = [{**each, "evaluation": "plain", "settings": "", "conditions": conditions} for each in rows]
    dynamic = [
        {**each, "evaluation": "dynamic", "settings": "lr 1e-05", "ppl": each["ppl"] / 2, "latency_ms": None}
        for each in rows
    ]
    mixed = [each for pair in zip(dynamic, plain, strict=True) for each in pair]  # in any order
    mixed[0]["conditions"] = conditions
    return write_comparison(folder, mixed)


def test_each_way_has_a_table_whose_best_is_its_own(compared: Path) -> None:
    plain, dynamic = tables_of(gather([compared]))
    assert dynamic.caption == "The same by dynamic evaluation on the test split"
    assert any("compare within this table alone" in note for note in dynamic.notes)
    assert any("derived: lr 1e-05" in note for note in dynamic.notes)
    assert "latency_ms" not in {column.key for column in dynamic.columns}
    for table, least in ((plain, 64.2), (dynamic, 32.1)):
        column = [each.key for each in table.columns].index("ppl")
        assert [cells[column].value for _, cells in table.rows if cells[column].best] == [least]


def test_answer_and_chart_are_of_the_plain_evaluation(compared: Path) -> None:
    material = gather([compared])
    assert len(material.comparisons[0].rows) == len(material.comparisons[0].others) == 3
    _, chart, notes = trade_off(material.comparisons[0])
    assert chart is not None
    assert "32.1" not in chart.label
    assert notes == []
    told = page_of(compared).text
    assert "reaches 64.20 perplexity per token" in told
    assert "reaches 32.10" not in told


def test_the_command_names_each_run_once_with_all_settings(compared: Path) -> None:
    told = " ".join(page_of(compared).text.split())
    assert "--split test --adapted evaluation.stride=1 evaluation.dynamic.lr=1e-05 --out" in told
    command = told[told.index("parnas evaluate") :].partition("--out")[0]
    assert command.count("/derived") == 1


def test_what_is_no_way_is_refused(compared: Path) -> None:
    rows = json.loads((compared / "comparison.json").read_text())
    for name in (3, "dynamic"):
        write_comparison(compared, [{**each, "evaluation": name} for each in rows])
        with pytest.raises(ParnasError, match="give evaluate again"):
            gather([compared])
