"""How the learning rate moves over the steps of a run."""

import math


def learning_rate(step: int, steps: int, peak: float, warmup_steps: int) -> float:
    """Linear warm-up to `peak`, then a half cosine that reaches zero after the last of `steps` (0 ≤ step < steps)."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def shorten_warmup(warmup_steps: int, steps: int) -> int:
    """The warm-up itself, or a tenth of a run that is not longer than it."""
    return warmup_steps if warmup_steps < steps else steps // 10
