"""The temperature of the Gumbel-softmax over the steps of a search."""

import math


def temperature(schedule: str, step: int, steps: int, start: float, end: float) -> float:
    """tau at `step` (0 ≤ step < steps): exactly `start` at the first step and exactly `end` at the last.

    `schedule` is exponential, linear or cosine; a search of one step has `end`.
    """
    if step >= steps - 1:
        return end
    progress = step / (steps - 1)
    if schedule == "exponential":
        return start * math.exp(progress * math.log(end / start))
    if schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return start + (end - start) * progress
