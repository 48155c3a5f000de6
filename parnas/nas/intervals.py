"""Means of few seeds, and how sure they are."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import t as student

LEVEL = 0.95  # of the intervals


class Difference(NamedTuple):
    """How far perplexities lie from those of another network, in per cent; negative is better."""

    mean: float
    low: float | None  # ends of the 95 % interval; none where one pair alone gives none
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.low is None or self.high is None:
            return "one seed, so no interval"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "no difference that the seeds can tell"


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Mean of 100 · (ours / theirs − 1) over the seeds that both have, with its interval by Student's t.

    mean ± t(0.975, n − 1) · sd / √n. Perplexities by seed.
    """
    each = [100 * (ours[seed] / theirs[seed] - 1) for seed in ours if seed in theirs]
    assert each, "the networks have a seed in common"
    mean = fmean(each)
    if len(each) == 1:
        return Difference(mean, None, None, 1)
    half = float(student.ppf((1 + LEVEL) / 2, len(each) - 1)) * stdev(each) / math.sqrt(len(each))
    return Difference(mean, mean - half, mean + half, len(each))


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation of the values as a sample; none of a single one."""
    return stdev(values) if len(values) > 1 else None
