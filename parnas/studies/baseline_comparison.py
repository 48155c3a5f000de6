"""Comparison of the derived network with its baselines: all are trained alike, from several seeds.

The differences of perplexity between the derived network and each baseline come with a 95 % interval over the seeds
(Student's t, paired by seed); random networks of its cost show how much better it is than chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import pandas as pd
from scipy import stats

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.runs.files import write_json, write_text
from parnas.studies.baselines import DERIVED, RANDOM, Baselines
from parnas.studies.train_or_load import prepare_folder, reached_perplexity, train_once
from parnas.training.progress import Reporter
from parnas.training.retrain import retrain

_LEVEL = 0.95  # of the intervals


class Difference(NamedTuple):
    """The difference of perplexities from those of another network in per cent; negative is better."""

    mean: float  # not a number if a perplexity is not finite
    low: float | None  # ends of the 95 % interval; `None` for a single pair
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """The conclusion from the interval."""
        if math.isnan(self.mean):
            return "not every perplexity is finite, so no difference can be told"
        if self.low is None or self.high is None:
            return "one seed, so no interval"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "no significant difference"


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Return the mean of 100 · (ours / theirs - 1) over the common seeds, with its interval by Student's t.

    The interval is mean ± t(0.975, n - 1) · sd / √n. Both arguments are perplexities by seed.
    """
    percent = [relative(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    assert percent, "the networks have a seed in common"
    mean, pairs = fmean(percent), len(percent)
    if pairs < 2 or math.isnan(mean):
        return Difference(mean, None, None, pairs)
    half = float(stats.t.ppf((1 + _LEVEL) / 2, pairs - 1) * stats.sem(percent))
    return Difference(mean, mean - half, mean + half, pairs)


def relative(ours: float, theirs: float) -> float:
    """Return by how many per cent our perplexity differs; not a number if one is not finite."""
    return 100 * (ours / theirs - 1) if math.isfinite(ours) and math.isfinite(theirs) else math.nan


@dataclass(frozen=True)
class NetworkResult:
    """A network and the perplexities that it reached."""

    name: str
    arch: str
    share: float  # predicted cost of the blocks over that of the interleaved network's
    ppl: Mapping[int, float]  # per token of the validation split, by seed; inf if the training diverged
    random: bool = False

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.ppl.values())

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over the seeds; `None` for a single seed, or if one diverged."""
        return stdev(self.ppl.values()) if len(self.ppl) > 1 and math.isfinite(self.mean) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "name": self.name,
            "arch": self.arch,
            "cost_share": self.share,
            "valid_ppl_mean": self.mean,
            "valid_ppl_sd": self.sd,
            "n": len(self.ppl),
        }


@dataclass(frozen=True)
class BaselineVerdict:
    """The difference of the derived network from one baseline, or from the random networks."""

    against: str
    difference: Difference
    text: str


@dataclass(frozen=True)
class BaselineComparison:
    """The results of all networks, with notes."""

    networks: tuple[NetworkResult, ...]
    notes: tuple[str, ...]
    metric: str  # of the costs

    def verdicts(self) -> list[BaselineVerdict]:
        """Return the verdict on each baseline, and on the random networks."""
        return compare_networks(self.networks)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `baselines.json`."""
        return {
            "metric": self.metric,
            "networks": [
                each.to_dict()
                | {"random": each.random, "valid_ppl": {str(seed): ppl for seed, ppl in each.ppl.items()}}
                for each in self.networks
            ],
            "answers": [
                {"against": each.against, "percent": each.difference._asdict(), "text": each.text}
                for each in self.verdicts()
            ],
            "notes": list(self.notes),
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `baselines.csv` with a row per network, and `baselines.json` with the verdicts too."""
        table = pd.DataFrame([each.to_dict() for each in self.networks])
        write_text(folder / "baselines.csv", table.to_csv(index=False, lineterminator="\n"))
        write_json(folder / "baselines.json", self.to_dict())
        return [folder / "baselines.csv", folder / "baselines.json"]


def compare_baselines(
    baselines: Baselines, config: Config, folder: Path, seeds: Sequence[int], reporter: Reporter
) -> BaselineComparison:
    """Train every network from each seed, random ones from the first only, each in a subfolder `NAME-seed-SEED`.

    config: of a search, with its text and cutoffs resolved. Finished trainings are loaded, others resumed; names of one
    network share its trainings. Every network is trained from the first seed before any is from the second. A training
    that diverges counts as infinite, with a note, and is tried again in the next call. Raises `ParnasError` if the
    folder holds other files, or trainings of another configuration.
    """
    config = config.replace(model__arch=None)
    prepare_folder(folder, config)
    first_names: dict[Architecture, str] = {}  # that name the subfolders of a network
    for each in baselines.networks:
        first_names.setdefault(each.architecture, each.name)
    trainings = [(each, seed) for seed in seeds for each in baselines.networks if seed == seeds[0] or not each.random]
    reached: dict[str, dict[int, float]] = {each.name: {} for each in baselines.networks}
    for number, (each, seed) in enumerate(trainings, 1):
        reporter.note(f"{each.name} from seed {seed}, {number} of {len(trainings)}: {each.architecture}")
        changed = config.replace(model__arch=str(each.architecture), runtime__seed=seed)
        run_folder = folder / f"{first_names[each.architecture]}-seed-{seed}"
        train = partial(train_once, retrain, changed, run_folder, reporter)
        reached[each.name][seed] = reached_perplexity(train, reporter)
    notes = [
        f"{each.name} is the same network as {first_names[each.architecture]}"
        for each in baselines.networks
        if first_names[each.architecture] != each.name
    ]
    notes += [
        f"{name} from seed {seed} diverged, and counts as infinite"
        for name, ppl in reached.items()
        for seed in ppl
        if ppl[seed] == math.inf
    ]
    results = [
        NetworkResult(each.name, str(each.architecture), each.share, reached[each.name], each.random)
        for each in baselines.networks
    ]
    return BaselineComparison(tuple(results), (*baselines.notes, *notes), baselines.metric)


def compare_networks(networks: Sequence[NetworkResult]) -> list[BaselineVerdict]:
    """Compare the derived network with each baseline, and with the median of the random networks."""
    by_name = {each.name: each for each in networks}
    derived = by_name.pop(DERIVED)
    verdicts = [compare_pair(derived, each) for each in by_name.values() if not each.random]
    if random := [each for each in by_name.values() if each.random]:
        verdicts.append(_compare_with_random(derived, random))
    return verdicts


def compare_pair(derived: NetworkResult, other: NetworkResult) -> BaselineVerdict:
    """Compare the derived network with another one by pairs of the same seed."""
    difference = paired_difference(derived.ppl, other.ppl)
    between = "" if difference.low is None else f", 95 % interval {difference.low:+.2f} to {difference.high:+.2f} %"
    size = "" if math.isnan(difference.mean) else f"{difference.mean:+.2f} % perplexity{between}, "
    text = (
        f"derived against {other.name} (cost share {other.share:.3f}): {size}{difference.pairs} pair(s) of seeds: "
        f"{difference.verdict}"
    )
    return BaselineVerdict(other.name, difference, text)


def _compare_with_random(derived: NetworkResult, random: Sequence[NetworkResult]) -> BaselineVerdict:
    """Compare the derived network's mean with the median perplexity of random networks, which form no pairs."""
    difference = Difference(relative(derived.mean, median(each.mean for each in random)), None, None, 0)
    size = "" if math.isnan(difference.mean) else f"{difference.mean:+.2f} % perplexity; "
    worse = sum(derived.mean < each.mean for each in random)
    text = (
        f"derived against the median of {len(random)} random networks of its cost: {size}better than {worse} of "
        f"{len(random)}"
    )
    if len(derived.ppl) > 1:  # the others have one seed, which may be a good or a bad one
        same_seed = sum(derived.ppl[seed] < ppl for each in random for seed, ppl in each.ppl.items())
        text += f" in the mean of its {len(derived.ppl)} seeds, than {same_seed} by the seed that they have"
    return BaselineVerdict(RANDOM, difference, text)
