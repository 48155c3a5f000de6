"""What TensorBoard is given of both phases."""

import sys
from pathlib import Path

import pytest
from conftest import small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parnas.nas.search import search
from parnas.runs.records import MetricsRecord, PiRecord
from parnas.runs.run import Run
from parnas.training.progress import Loop, TensorBoard
from parnas.training.retrain import retrain


def events_of(run: Run) -> EventAccumulator:
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_search_gives_metrics_pi_of_each_block_and_pictures(corpus: Path, tmp_path: Path) -> None:
    run = search(small_config(corpus), tmp_path / "run", TensorBoard())
    events = events_of(run)
    tags = set(events.Tags()["scalars"])
    assert {"train/lr", "train/tau", "train/loss", "train/ppl", "train/identity_share", "train/step_ms"} <= tags
    assert {"valid/loss", "valid/ppl", "valid/argmax_ppl", "valid/bits_per_byte"} <= tags
    train = [line for line in run.metrics() if line.split == "train"]
    expected = [(line.step, pytest.approx(line.loss, rel=1e-6)) for line in train]
    assert scalars(events, "train/loss") == expected
    for block in range(3):
        for number, name in enumerate("sfi"):
            expected = [(line.step, pytest.approx(line.pi[block][number], rel=1e-6)) for line in run.pi_records()]
            assert scalars(events, f"pi/block-{block + 1:02d}/{name}") == expected
    pictures = events.Images("pi")
    assert [picture.step for picture in pictures] == [line.step for line in run.pi_records()]
    assert all(picture.width > 300 and picture.encoded_image_string.startswith(b"\x89PNG") for picture in pictures)


def test_a_search_by_latency_tells_the_expected_milliseconds(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__cost__metric="latency", search__cost__target=0.8)
    run = search(config, tmp_path / "run", TensorBoard())
    found = scalars(events_of(run), "train/expected_latency_ms")
    assert found
    assert all(value > 0 for _, value in found)


def test_a_retraining_gives_its_metrics(corpus: Path, tmp_path: Path) -> None:
    run = retrain(small_config(corpus, model__arch="sf", train__steps=8), tmp_path / "run", TensorBoard())
    tags = set(events_of(run).Tags()["scalars"])
    assert {"train/lr", "train/loss", "train/ppl", "train/step_ms", "valid/loss", "valid/ppl"} <= tags


def test_a_tensorboard_that_is_missing_or_broken_ends_no_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = retrain(small_config(corpus, model__arch="sf", train__steps=4), tmp_path / "run", TensorBoard())
    assert run.finished()
    assert not (run.folder / "tensorboard").exists()


def test_what_comes_again_after_an_interruption_shows_once(tmp_path: Path) -> None:
    for first, last in ((0, 40), (20, 60)):
        writer = TensorBoard()
        writer.start(Loop("retrain", first, 60, folder=tmp_path))
        for step in range(first + 10, last + 1, 10):
            writer.metrics(MetricsRecord(step=step, split="train", loss=float(first)))
        writer.stop()
    found = scalars(events_of(Run(tmp_path)), "train/loss")
    assert found == [(10, 0.0), (20, 0.0), (30, 20.0), (40, 20.0), (50, 20.0), (60, 20.0)]


def test_a_long_search_has_pictures_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parnas.training.progress._MAX_PICTURES", 5)
    writer = TensorBoard()
    writer.start(Loop("search", 0, 100, folder=tmp_path))
    for step in range(1, 101):
        writer.pi("sf", PiRecord(step=step, tau=1.0, pi=[[0.5, 0.5]]))
    writer.stop()
    events = events_of(Run(tmp_path))
    assert [picture.step for picture in events.Images("pi")] == [1, 21, 41, 61, 81]
    assert len(events.Scalars("pi/block-01/s")) == 100
