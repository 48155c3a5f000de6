"""What the terminal shows: live bars, plain lines, and tables that fit 80 columns."""

import io
from pathlib import Path

import pandas as pd
import pytest
from conftest import small_config
from optuna.distributions import FloatDistribution
from rich.console import Console

from parnas.cli.tables import COST_COLUMNS, QUALITY_COLUMNS, check_table, comparison_table, profile_table, show_tuned
from parnas.nas.latency_table import Check, CheckedNetwork, ModeTable, Profile, Timing
from parnas.runs.records import MetricsRecord, PiRecord
from parnas.studies.tuning import TrialResult, TuningResult
from parnas.training.progress import LiveReporter, Loop, PlainReporter, describe_metrics, make_display, pi_bar
from parnas.training.retrain import retrain

TRAIN = MetricsRecord(step=50, split="train", loss=4.0, ppl=54.6, lr=1e-3, tau=0.5, tokens_per_s=14213.0)
VALID = MetricsRecord(step=50, split="valid", loss=3.9, ppl=49.4, argmax_ppl=50.1, bits_per_byte=1.468)
SEEN = {"expected_cost": 0.71, "entropy": 0.93, "identity_share": 0.22, "argmax_changes": 3}
PI = [[0.7, 0.2, 0.1], [0.05, 0.9, 0.05]]


def shown(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_a_line_of_metrics_says_what_it_knows() -> None:
    assert describe_metrics(TRAIN) == "train loss 4.000  ppl 54.60  14,213 tokens/s  lr 1.0e-03  tau 0.500"
    assert "argmax ppl 50.10  bits/byte 1.468" in describe_metrics(VALID)


@pytest.mark.parametrize("pi", [[1.0, 0.0, 0.0], [1 / 3] * 3, [0.014, 0.98, 0.006]])
def test_a_bar_is_divided_as_pi_is(pi: list[float]) -> None:
    bar = pi_bar(3, "sfi", pi)
    assert bar.plain.count("█") == 24
    best = max(range(3), key=pi.__getitem__)
    assert bar.plain.endswith(f"{'sfi'[best]} {pi[best]:.2f}")


def test_live_display_shows_progress_metrics_and_every_block() -> None:
    reporter = LiveReporter(Console(file=io.StringIO(), force_terminal=True, width=80))
    reporter.start(Loop("search", 0, 200))
    reporter.advance(50)
    reporter.metrics(TRAIN.model_copy(update=SEEN))
    reporter.metrics(VALID)
    reporter.pi("sfi", PiRecord(step=50, tau=0.5, pi=PI))
    text = shown(reporter.render())
    reporter.stop()
    for part in ("search", "50/200", "14,213 tokens/s", "argmax ppl 50.10", "1 █", "s 0.70", "f 0.90"):
        assert part in text
    for part in ("cost 0.71", "entropy 0.93", "identity 22%", "argmax changed 3 times"):
        assert part in " ".join(text.split()), "whole, on a terminal of 80 columns"


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter()
    reporter.start(Loop("search", 0, 20))
    for step in range(1, 21):
        if step % 4 == 0:
            reporter.metrics(TRAIN.model_copy(update={"step": step}))
            reporter.pi("sfi", PiRecord(step=50, tau=0.5, pi=PI))
        reporter.advance(step)
    reporter.metrics(VALID.model_copy(update={"step": 20}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "search: steps 0 to 20"
    reporter.start(Loop("blackbox", 3, 9, "trials"))
    assert capsys.readouterr().err == "blackbox: trials 3 to 9\n"
    assert any(line.startswith("search 20/20: train loss 4.000") and line.endswith("pi argmax sf") for line in lines)
    assert lines[-1].startswith("search 20/20: valid loss 3.900")
    assert not any("\x1b" in line for line in lines)


def test_each_line_of_a_training_has_the_figures_of_its_step(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(corpus, train__log_every=5, model__arch="sf")
    run = retrain(config, tmp_path / "run", PlainReporter())
    lines = [line for line in capsys.readouterr().err.splitlines() if " loss " in line]
    records = run.metrics()
    assert [record.step for record in records] == [5, 10, 12, 15, 20, 24, 24]
    assert lines == [f"retrain {record.step}/24: {describe_metrics(record)}" for record in records]


def test_verbose_has_a_line_for_each_logged_step_and_quiet_warnings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet, verbose, expected in ((False, True, 8), (True, False, 1)):
        reporter = make_display(quiet, every=verbose)
        reporter.start(Loop("search", 0, 100))
        for step in (10, 20):
            reporter.metrics(TRAIN.model_copy(update={"step": step}))
            reporter.pi("sfi", PiRecord(step=step, tau=0.5, pi=PI))
            reporter.advance(step)
        reporter.metrics(VALID.model_copy(update={"step": 20}))
        reporter.note("scoring")
        reporter.note("warning: identity wins")
        reporter.stop()
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == expected
        assert lines[-1] == "warning: identity wins"


def test_tables_of_large_numbers_fit_a_terminal() -> None:
    row = {
        "run": "interleaved",
        "network": "SuperNet",
        "arch": "sfsfsfsfsfsfsfsfsfsfsfsfsfsfsfsf",
        "bits_per_byte": 1.4680,
        "ppl": 66.13,
        "word_ppl": 206.5,
        "parameters": 151_107_538,
        "without_embeddings": 41_000_000,
        "multiply_adds_per_token": 123_456_789.0,
        "latency_ms": 123.45,
        "latency_p95_ms": 234.56,
        "train_tokens_per_s": 123_456.0,
        "train_seconds": 12_345.0,
        "tgt_len": 150,
        "mem_len": 150,
    }
    frame = pd.DataFrame([row, {**row, "run": "derived"}, {**row, "run": "[red]x"}])
    quality, cost = (shown(comparison_table(frame, columns)) for columns in (QUALITY_COLUMNS, COST_COLUMNS))
    for part in ("interleaved", "[red]x", "SuperNet", "1.4680", "66.13", "206.50", "151,107,538"):
        assert part in quality
    for part in ("derived", "123,456,789", "123.45", "234.56", "123,456", "12,345", "150"):
        assert part in cost


def test_a_profile_is_shown_beside_a_feed_forward_layer() -> None:
    layers = {"s": Timing(123.44, 100.04, 234.56), "f": Timing(2.0, 1.5, 2.5), "s:heads=2": Timing(-0.0012, -9.0, 9.0)}
    training = ModeTable(Timing(9000.0, 8000.0, 9100.0), {**layers, "f": Timing(4.0, 3.0, 5.0)})
    profile = Profile({}, "fp32", {}, 3, 9, ModeTable(Timing(7.0, 6.0, 8.0), layers), training)
    rows = [line.split() for line in shown(profile_table(profile)).splitlines()]
    assert rows[1] == ["fixed", "7.000", "6.000–8.000", "3.50", "9000.0", "8000.0–9100.0", "2250.00"]
    assert rows[2] == ["s", "123.4", "100.0–234.6", "61.72", "123.4", "100.0–234.6", "30.86"]
    assert rows[3] == ["f", "2.000", "1.500–2.500", "1.00", "4.000", "3.000–5.000", "1.00"]
    assert rows[4][:3] == ["s:heads=2", "-0.001", "-9.000–9.000"]
    networks = [CheckedNetwork("sf" * 20, 12.345, 10.0, 0.2345), CheckedNetwork("f", 9.0, 10.0, -0.1)]
    lines = shown(check_table(Check(0.1, 0.2, networks))).splitlines()
    assert lines[1].split() == ["sf" * 20, "12.35", "10.00", "+23.4%"]
    assert lines[2].split() == ["f", "9.00", "10.00", "-10.0%"]


def test_of_trials_with_equal_settings_one_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [6.2, 6.0, 6.0, 6.0, 6.0, 6.0, 6.1]
    dropouts = [0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    trials = tuple(
        TrialResult(number, "complete", loss, 9, 1.0, None, {"model.dropout": dropout})
        for number, (loss, dropout) in enumerate(zip(losses, dropouts, strict=True))
    )
    space = {"model.dropout": FloatDistribution(0.0, 0.5)}
    show_tuned(TuningResult(tmp_path, "study", "retrain", space, trials, trials[1], None, trials[0], None))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:4]] == [["1", "6.0000"], ["6", "6.1000"], ["*0", "6.2000"]]
    assert lines[4][:2] == ["7", "trials:"]


def test_names_with_options_are_shown() -> None:
    space = ("s", "s:heads=2", "g")
    bar = pi_bar(1, space, [0.2, 0.7, 0.1])
    assert bar.plain.endswith("s:heads=2 0.70")
    assert len({span.style for span in bar.spans}) == 3
    reporter = PlainReporter()
    reporter.pi(space[:2], PiRecord(step=1, tau=0.5, pi=[[0.2, 0.8], [0.9, 0.1]]))
    assert reporter.latest.endswith("pi argmax s:heads=2 s")
