"""What a search says of itself while it trains: the gap, a collapse, and the figures on the display."""

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import small_config

from parnas.nas.diagnostics import Monitor
from parnas.nas.search import search
from parnas.runs.records import MetricsRecord
from parnas.runs.run import Run
from parnas.training.progress import Silent, describe_metrics


def test_the_gap_is_what_the_mixture_loses_to_the_derived_network(corpus: Path, tmp_path: Path) -> None:
    run = search(small_config(corpus, search__estimator="soft"), tmp_path / "soft", Silent())
    lines = [line for line in run.metrics() if line.split == "valid"]
    assert lines
    for line in lines:
        assert line.gap == pytest.approx(line.mixture_loss - line.argmax_loss)
        assert abs(line.gap) > 1e-5, "else its sign would say nothing"


def test_what_is_trained_on_single_paths_is_not_evaluated_as_a_mixture(search_run: Run) -> None:
    (line,) = [line for line in search_run.metrics() if line.split == "valid"][-1:]
    assert (line.mixture_loss, line.gap) == (None, None)
    assert line.loss == line.argmax_loss
    assert search_run.summary().mixture is None


def test_each_collapse_is_told_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on each line while it lasts, but again where it comes back."""
    shares, notes, reporter = iter([0.2, 0.71, 0.82, 0.3, 0.93, 0.94]), list[str](), Silent()
    original = Monitor.observe

    def observe(self: Monitor, *arguments: Any) -> dict[str, Any]:
        return {**original(self, *arguments), "identity_share": next(shares)}

    monkeypatch.setattr(Monitor, "observe", observe)
    monkeypatch.setattr(reporter, "note", notes.append)
    search(small_config(corpus), tmp_path / "run", reporter)
    warnings = [note for note in notes if "collapsing" in note]
    assert [re.findall(r"\d+%", note)[0] for note in warnings] == ["71%", "93%"]
    assert all(note.startswith("warning: ") for note in warnings)


def test_a_search_shows_entropy_identity_and_the_gap() -> None:
    train = MetricsRecord(step=1, split="train", loss=4.0, ppl=54.6, entropy=0.4321, identity_share=0.137)
    assert describe_metrics(train) == "train loss 4.000  ppl 54.60  entropy 0.43  identity 14%"
    valid = MetricsRecord(step=1, split="valid", loss=4.0, ppl=54.6, gap=-0.1234)
    assert describe_metrics(valid) == "valid loss 4.000  ppl 54.60  mixture behind argmax by -0.123"
