"""Means of few seeds, and how sure they are."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import t as student

LEVEL = 0.95  # of the intervals


class Difference(NamedTuple):
    """How far perplexities lie from those of another network, in per cent; negative is better."""

    mean: float  # not a number where a perplexity is not finite
    low: float | None  # ends of the 95 % interval; none where one pair alone gives none
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if math.isnan(self.mean):
            return "not every perplexity is finite, so no difference can be told"
        if self.low is None or self.high is None:
            return "one seed, so no interval"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "no difference that the seeds can tell"


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Mean of 100 · (ours / theirs − 1) over the seeds that both have, with its interval by Student's t.

    mean ± t(0.975, n − 1) · sd / √n. Perplexities by seed.
    """
    each = [relative(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    assert each, "the networks have a seed in common"
    mean, deviation = fmean(each), spread(each)
    if deviation is None:
        return Difference(mean, None, None, len(each))
    half = float(student.ppf((1 + LEVEL) / 2, len(each) - 1)) * deviation / math.sqrt(len(each))
    return Difference(mean, mean - half, mean + half, len(each))


def relative(ours: float, theirs: float) -> float:
    """By how many per cent our perplexity differs from theirs; not a number where one is not finite."""
    return 100 * (ours / theirs - 1) if math.isfinite(ours) and math.isfinite(theirs) else math.nan


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation of the values as a sample; none of a single one, or where one is not finite."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
