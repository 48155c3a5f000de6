"""Watching runs through their files."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import small_config
from helpers.command_helpers import refusal, run_command

from parnas.cli.watch import SILENT_SECONDS, read_state, watch
from parnas.nas.search import search
from parnas.runs.files import write_json
from parnas.runs.records import MetricsRecord, PiRecord
from parnas.runs.run import METRICS, PI, Run
from parnas.training.progress import Loop, Silent


class RecordingReporter(Silent):
    """Records all calls."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []
        self.steps: list[tuple[str, int]] = []
        self.notes: list[str] = []
        self.reached, self.stopped = 0, 0

    def start(self, loop: Loop) -> None:
        self.loops.append(loop)

    def advance(self, step: int) -> None:
        self.reached = step

    def metrics(self, record: MetricsRecord) -> None:
        self.steps.append((record.split, record.step))

    def pi(self, space: Sequence[str], record: PiRecord) -> None:
        assert len(record.pi[0]) == len(space)
        self.steps.append(("pi", record.step))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None:
        self.stopped += 1


def add(run: Run, *steps: int, split: str = "train") -> None:
    for step in steps:
        run.append(METRICS, {"step": step, "split": split, "loss": 1.0, "ppl": 2.7})
        if split == "train":
            run.append(PI, {"step": step, "tau": 1.0, "pi": [[0.2, 0.3, 0.5]] * 3})


def finish(run: Run) -> None:
    write_json(run.folder / "summary.json", {})


def sleep_that_runs(*actions: Callable[[], object]) -> Callable[[float], None]:
    """Return a function for `sleep` that runs the next action at each call, like another process would."""
    remaining = iter(actions)
    return lambda _: next(remaining)() and None


@pytest.fixture
def running(searched: Run) -> Run:
    """A search that has not logged anything yet."""
    for name in (METRICS, PI, "summary.json"):
        (searched.folder / name).unlink()
    return searched


def test_written_lines_are_reported_until_the_run_is_finished(running: Run) -> None:
    reporter = RecordingReporter()
    actions = (
        lambda: add(running, 4, 8),
        lambda: None,
        lambda: add(running, 8, split="valid"),
        lambda: add(running, 12),
        lambda: finish(running),
    )
    state = watch(running, reporter, sleep_that_runs(*actions))
    assert reporter.loops == [Loop("searched (search)", 0, 24)]
    expected = [("train", 4), ("train", 8), ("pi", 4), ("pi", 8), ("valid", 8), ("train", 12), ("pi", 12)]
    assert reporter.steps == expected
    assert (reporter.reached, reporter.stopped, state.finished, state.step) == (12, 1, True, 12)


def test_of_earlier_lines_only_the_last_is_reported(running: Run) -> None:
    add(running, 4, 8, 12)
    add(running, 12, split="valid")
    reporter = RecordingReporter()
    watch(running, reporter, sleep_that_runs(lambda: finish(running)))
    assert reporter.steps == [("train", 12), ("valid", 12), ("pi", 12)]


def test_steps_repeated_after_a_checkpoint_are_reported_again(running: Run) -> None:
    add(running, 4, 8, 12)
    reporter = RecordingReporter()

    def go_back() -> None:
        running.truncate_after(4)

    watch(running, reporter, sleep_that_runs(go_back, lambda: add(running, 8), lambda: finish(running)))
    assert reporter.steps == [("train", 12), ("pi", 12), ("train", 8), ("pi", 8)]
    assert reporter.reached == 8


def test_a_silent_run_is_reported_once(running: Run) -> None:
    add(running, 4)
    reporter = RecordingReporter()

    long_ago = time.time() - 2 * SILENT_SECONDS

    def wait() -> None:
        for path in running.folder.glob("*"):
            os.utime(path, (long_ago, long_ago))

    watch(running, reporter, sleep_that_runs(wait, wait, wait, wait, lambda: finish(running)))
    assert len(reporter.notes) == 1
    assert reporter.notes[0].startswith("warning: nothing was written for 2 minutes")


def test_a_partial_line_is_read_once_it_is_complete(running: Run) -> None:
    add(running, 4)
    line = json.dumps({"step": 8, "split": "train", "loss": 1.0, "ppl": 2.7})

    def write(text: str) -> None:
        with (running.folder / METRICS).open("a") as file:
            file.write(text)

    reporter = RecordingReporter()
    actions = (lambda: write(line[:20]), lambda: write(f"{line[20:]}\n"), lambda: finish(running))
    watch(running, reporter, sleep_that_runs(*actions))
    assert reporter.steps == [("train", 4), ("pi", 4), ("train", 8)]


def test_the_state_of_a_run_as_text_and_as_json(search_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("watch", search_run.folder) == 0
    text = capsys.readouterr().out
    assert "search, step 24 of 24, finished" in text
    assert "train loss" in text
    assert "valid loss" in text
    assert run_command("watch", search_run.folder, "--json") == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["kind"], state["step"], state["finished"]) == ("search", 24, True)
    assert state["pi"] == search_run.pi_records()[-1].to_dict()
    assert set(state["latest"]) == {"train", "valid"}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *((METRICS, {"lr": value}) for value in ("x", [1], {})),
        *((METRICS, {"split": value}) for value in ("\x1b]0;title\x07", "test", None, 1)),
        (METRICS, {"loss": "none"}),
        *(
            (PI, {"pi": value})
            for value in (None, 5, [[]], [[None, 1, 0]] * 3, "abc", [[0.25] * 4] * 3, [[0.2] * 3] * 9)
        ),
    ],
)
def test_lines_that_no_training_wrote_are_refused(
    running: Run, name: str, line: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {METRICS: {"split": "train", "loss": 1.0, "ppl": 2.7}, PI: {"tau": 1.0, "pi": [[0.2, 0.3, 0.5]] * 3}}
    running.append(name, {"step": 4, **whole[name], **line})
    assert name in refusal(capsys, "watch", running.folder, "--once")


def test_figures_that_are_not_finite_are_shown_as_such(running: Run, capsys: pytest.CaptureFixture[str]) -> None:
    running.append(METRICS, {"step": 4, "split": "train", "loss": 1.0, "ppl": 2.7, "tokens_per_s": None})
    assert run_command("watch", running.folder, "--once") == 0
    assert "nan tokens/s" in capsys.readouterr().out


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no run folder" in refusal(capsys, "watch", tmp_path / "none")


def test_a_search_is_watched_while_it_trains(corpus: Path, tmp_path: Path) -> None:
    """By a second reporter in the same process, which looks at the files whenever the search logs."""
    run, seen = Run(tmp_path / "run"), []

    class Looking(Silent):
        def advance(self, step: int) -> None:
            seen.append(read_state(run).step)

    search(small_config(corpus), run.folder, Looking())
    assert seen == [step - step % 4 for step in range(1, 25)]
