"""Learning rate and temperature over the steps of a run."""

import math
from itertools import pairwise

import pytest

from parnas.config.schema import TrainConfig
from parnas.nas.architecture_optimizer import temperature
from parnas.training.optimizers import Schedule, learning_rate


def test_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    schedule = Schedule(100, 0.5, 10)
    rates = [learning_rate(step, schedule) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.5 / 90)
    assert learning_rate(55, schedule) == pytest.approx(0.25)


def test_learning_rate_stays_at_its_peak_where_weights_are_averaged() -> None:
    schedule = Schedule.of(TrainConfig(steps=100, lr=0.5, warmup_steps=10, average=0.25))
    assert schedule.averaged == 25
    rates = [learning_rate(step, schedule) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert set(rates[10:]) == {0.5}
    assert [Schedule.of(TrainConfig(steps=3, average=share)).averaged for share in (0.0, 1e-3, 0.9)] == [0, 1, 3]


@pytest.mark.parametrize(("warmup", "steps", "expected"), [(10, 100, 10), (100, 100, 10), (4000, 50, 5), (5, 1, 0)])
def test_warmup_longer_than_the_run_is_shortened(warmup: int, steps: int, expected: int) -> None:
    notes: list[str] = []
    assert Schedule(steps, 0.5, warmup).fit_warmup(notes.append) == Schedule(steps, 0.5, expected)
    assert bool(notes) == (warmup != expected)


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine"])
@pytest.mark.parametrize("steps", [2, 3, 24, 1000])
def test_temperature_goes_exactly_from_start_to_end(schedule: str, steps: int) -> None:
    taus = [temperature(schedule, step, steps, 1.7, 0.3) for step in range(steps)]
    assert (taus[0], taus[-1]) == (1.7, 0.3)
    assert taus == sorted(taus, reverse=True)


def test_middle_of_each_temperature_schedule() -> None:
    assert temperature("linear", 50, 101, 1.0, 0.1) == pytest.approx(0.55)
    assert temperature("cosine", 50, 101, 1.0, 0.1) == pytest.approx(0.55)
    assert temperature("exponential", 50, 101, 1.0, 0.1) == pytest.approx(math.sqrt(0.1))
    assert temperature("cosine", 10, 101, 1.0, 0.1) > temperature("linear", 10, 101, 1.0, 0.1)


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine"])
def test_a_search_of_one_step_has_the_last_temperature(schedule: str) -> None:
    assert temperature(schedule, 0, 1, 1.0, 0.1) == 0.1
