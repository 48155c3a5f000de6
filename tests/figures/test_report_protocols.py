"""Rows of other evaluation protocols on the report page: in tables of their own, not compared with others."""

import json
from pathlib import Path

import pytest
from helpers.report_helpers import make_all, page_of, write_comparison

from parnas.errors import ParnasError
from parnas.figures.report.charts import latency_chart
from parnas.figures.report.data import read_report_data
from parnas.figures.report.tables import network_tables


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """A comparison whose rows stand there once more, read dynamically, with much lower perplexities."""
    folder = make_all(tmp_path)
    rows = json.loads((folder / "comparison.json").read_text())
    conditions = {"changes": {"evaluation.stride": 1, "evaluation.dynamic.lr": 1e-05}, "tuned": True}
    plain = [{**each, "evaluation": "plain", "settings": "", "conditions": conditions} for each in rows]
    dynamic = [
        {**each, "evaluation": "dynamic", "settings": "lr 1e-05", "ppl": each["ppl"] / 2, "latency_ms": None}
        for each in rows
    ]
    mixed = [each for pair in zip(dynamic, plain, strict=True) for each in pair]  # in any order
    mixed[0]["conditions"] = conditions
    return write_comparison(folder, mixed)


def test_each_protocol_has_a_table_with_its_own_best(compared: Path) -> None:
    plain, dynamic = network_tables(read_report_data([compared]))
    assert dynamic.caption == "The same networks with dynamic evaluation on the test split"
    assert any("comparable within this table" in note for note in dynamic.notes)
    assert any("derived: lr 1e-05" in note for note in dynamic.notes)
    assert "latency_ms" not in {column.key for column in dynamic.columns}
    for table, least in ((plain, 64.2), (dynamic, 32.1)):
        assert table.least["ppl"] == least


def test_answer_and_chart_are_of_the_plain_evaluation(compared: Path) -> None:
    data = read_report_data([compared])
    assert len(data.comparisons[0].rows) == len(data.comparisons[0].others) == 3
    chart = latency_chart(data.comparisons[0], "chart")
    assert "64.20" in chart.svg
    assert "32.10" not in chart.svg
    assert not any("Not drawn" in note for note in chart.notes)
    text = page_of(compared).text
    assert "reaches 64.20 perplexity per token" in text
    assert "reaches 32.10" not in text


def test_the_command_names_each_run_once_with_all_settings(compared: Path) -> None:
    text = " ".join(page_of(compared).text.split())
    assert "--split test --tuned evaluation.stride=1 evaluation.dynamic.lr=1e-05 --out" in text
    command = text[text.index("parnas evaluate") :].partition("--out")[0]
    assert command.count("/derived") == 1


def test_an_unknown_protocol_is_refused(compared: Path) -> None:
    rows = json.loads((compared / "comparison.json").read_text())
    for name in (3, "dynamic"):
        write_comparison(compared, [{**each, "evaluation": name} for each in rows])
        with pytest.raises(ParnasError, match="comparison"):
            read_report_data([compared])
