"""Schedules over the steps of a run: the learning rate, and the temperature of a search."""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

from parnas.config.schema import TrainConfig


class Schedule(NamedTuple):
    """The learning-rate schedule of a training phase."""

    steps: int
    lr: float  # the peak
    warmup_steps: int
    averaged: int = 0  # the last steps, whose weights are averaged

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """Return the schedule of a retraining."""
        averaged = max(1, round(train.average * train.steps)) if train.average else 0
        return cls(train.steps, train.lr, train.warmup_steps, averaged)


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate at `step` (0 ≤ step < steps): linear warm-up, then linear decay to zero.

    In short runs this ends at a lower loss than a half cosine (Bergsma et al. 2025, arXiv 2502.15938). Where weights
    are averaged the rate stays at its peak: averaging replaces the decay.
    """
    steps, peak, warmup_steps, averaged = schedule
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak if averaged else peak * (steps - step) / (steps - warmup_steps)


def fit_warmup(schedule: Schedule, note: Callable[[str], None]) -> Schedule:
    """Return the schedule with a warm-up that fits into its steps; `note` receives a line where it is shortened."""
    steps, asked = schedule.steps, schedule.warmup_steps
    warmup = shorten_warmup(asked, steps)
    if warmup != asked:
        note(f"the warm-up of {asked} steps is shortened to {warmup} of {steps}")
    return schedule._replace(warmup_steps=warmup)


def shorten_warmup(warmup_steps: int, steps: int) -> int:
    """Return the warm-up, or a tenth of the steps where it is not shorter than the run."""
    return warmup_steps if warmup_steps < steps else steps // 10


def temperature(schedule: str, step: int, steps: int, start: float, end: float) -> float:
    """Return tau at `step` (0 ≤ step < steps): `start` at the first step, `end` at the last.

    `schedule` is exponential, linear or cosine; a search of one step uses `end`.
    """
    if step >= steps - 1:
        return end
    progress = step / (steps - 1)
    if schedule == "exponential":
        return start * math.exp(progress * math.log(end / start))
    if schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return start + (end - start) * progress
