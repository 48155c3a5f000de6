"""Learning rate and temperature over the steps of a run."""

import math
from itertools import pairwise

import pytest

from parnas.nas.temperature import temperature
from parnas.training.schedules import learning_rate, shorten_warmup


def test_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 0.5, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.5 / 90)
    assert learning_rate(55, 100, 0.5, 10) == pytest.approx(0.25)


@pytest.mark.parametrize(("warmup", "steps", "expected"), [(10, 100, 10), (100, 100, 10), (4000, 50, 5), (5, 1, 0)])
def test_warmup_longer_than_the_run_is_shortened(warmup: int, steps: int, expected: int) -> None:
    assert shorten_warmup(warmup, steps) == expected


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
