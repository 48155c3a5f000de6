"""Timing in turns, and the profiles that are kept."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import small_config

from parnas.config.loader import Config
from parnas.nas.latency_table import ModeTable, Profile, Timing, cached_profile
from parnas.training import latency
from parnas.training.device import Device
from parnas.training.progress import Silent


@pytest.mark.parametrize(("rounds", "warm_up"), [(2, 3), (50, 5)])
def test_the_first_rounds_do_not_count(rounds: int, warm_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are slow until they are warm; then the one takes 2 ms, the other 5."""
    now, called = 0.0, ""

    def call(name: str, milliseconds: float) -> Callable[[], None]:
        def timed() -> None:
            nonlocal now, called
            now += (milliseconds if called.count(name) >= warm_up else 1000) / 1000
            called += name

        return timed

    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: now))
    calls = {"A": call("A", 2), "B": call("B", 5)}
    times = latency.time_in_turns(calls, Device(torch.device("cpu"), "fp32"), rounds)
    assert called == "AB" * (warm_up + rounds)
    assert times["A"] == pytest.approx([2] * rounds)
    assert times["B"] == pytest.approx([5] * rounds)


def test_a_profile_is_measured_once_for_each_shape(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Config] = []

    def measure(config: Config, *_: object, **settings: object) -> Profile:
        measured.append(config)
        timing = Timing(len(measured), 0.0, 9.0)
        return Profile({}, "fp32", {}, 3, 9, ModeTable(timing, {"s": timing, "f": timing}), None)

    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path))
    monkeypatch.setattr("parnas.nas.latency_table.profile", measure)
    shapes: list[dict[str, object]] = [{}, {"data__tgt_len": 7}, {"model__mem_len": 7}, {"model__d_inner": 64}]
    configs = [small_config(corpus, **changes) for changes in shapes]
    kept = [cached_profile(config, Silent()) for config in [*configs, *configs]]
    assert measured == configs
    assert [each.latency("s") for each in kept] == [1, 2, 3, 4, 1, 2, 3, 4]
