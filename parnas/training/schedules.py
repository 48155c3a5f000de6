"""How the learning rate moves over the steps of a run."""

from collections.abc import Callable
from typing import NamedTuple, Self

from parnas.sections import TrainConfig


class Schedule(NamedTuple):
    """How long a phase trains its weights, and how fast."""

    steps: int
    lr: float  # the peak
    warmup_steps: int
    averaged: int = 0  # last steps whose weights are averaged

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """That of a retraining."""
        averaged = max(1, round(train.average * train.steps)) if train.average else 0
        return cls(train.steps, train.lr, train.warmup_steps, averaged)


def learning_rate(step: int, schedule: Schedule) -> float:
    """Linear warm-up to the peak, then a line that reaches zero after the last of the steps (0 ≤ step < steps).

    In short runs it ends at a lower loss than a half cosine (Bergsma et al. 2025, arXiv 2502.15938). Where weights are
    averaged it stays at the peak: their mean does what a falling rate is for.
    """
    steps, peak, warmup_steps, averaged = schedule
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak if averaged else peak * (steps - step) / (steps - warmup_steps)


def fit_warmup(schedule: Schedule, note: Callable[[str], None]) -> Schedule:
    """The schedule with a warm-up that its steps have room for; tells where that is a shorter one."""
    steps, asked = schedule.steps, schedule.warmup_steps
    warmup = shorten_warmup(asked, steps)
    if warmup != asked:
        note(f"the warm-up of {asked} steps is shortened to {warmup} of {steps}")
    return schedule._replace(warmup_steps=warmup)


def shorten_warmup(warmup_steps: int, steps: int) -> int:
    """The warm-up itself, or a tenth of a run that is not longer than it."""
    return warmup_steps if warmup_steps < steps else steps // 10
