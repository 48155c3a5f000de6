"""Comparison of the derived network with its baselines, all trained with the same settings and from several seeds.

The difference between the perplexities of the derived network and of a baseline has a 95 % confidence interval over the
seeds (Student's t, paired by seed). Random networks of the same cost show how much better the derived network is than a
network chosen by chance.
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
from parnas.runs.run import BASELINES
from parnas.studies.baselines import DERIVED, RANDOM, Baselines
from parnas.studies.train_or_load import prepare_folder, reached_perplexity, train_once
from parnas.training.progress import Reporter
from parnas.training.retrain import retrain
from parnas.training.session import MAY_DIFFER

__all__ = ["BaselineComparison", "compare_baselines"]

_LEVEL = 0.95  # confidence level of the intervals


class _Difference(NamedTuple):
    """A network's perplexity minus a baseline's, in per cent of the baseline's; negative if the network is better."""

    mean: float  # over the seeds; nan if a perplexity is not finite
    low: float | None  # lower end of the 95 % confidence interval of the mean; `None` for fewer than two pairs
    high: float | None  # upper end of the interval
    p: float | None  # two-sided p value of the mean being 0; `None` where there is no interval
    pairs: int  # number of seeds from which both networks were trained

    @property
    def verdict(self) -> str:
        """A phrase: the network is better, worse or not significantly different, or why there is no interval."""
        if math.isnan(self.mean):
            return "no difference, since a perplexity is not finite"
        if self.low is None or self.high is None:
            return "one seed, so no interval"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "no significant difference"


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> _Difference:
    """Return the mean of `ours` minus `theirs` in per cent of `theirs`, with its 95 % confidence interval.

    `ours` and `theirs` are the perplexities of two networks by seed. For one seed the difference is
    100 · (ours / theirs - 1). The mean is taken over the n seeds that both networks have; the interval is
    mean ± t(0.975, n - 1) · sd / √n with Student's t, and p is that of the same test.
    """
    percent = [_percent_above(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    mean, pairs = fmean(percent), len(percent)
    if pairs < 2 or math.isnan(mean):
        return _Difference(mean, None, None, None, pairs)
    error = float(stats.sem(percent))  # 0 for equal networks
    half = float(stats.t.ppf((1 + _LEVEL) / 2, pairs - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, pairs - 1)) if error else float(mean == 0)
    return _Difference(mean, mean - half, mean + half, p, pairs)


def _percent_above(ours: float, theirs: float) -> float:
    """Return perplexity `ours` minus perplexity `theirs` in per cent of `theirs`; nan if either is not finite."""
    return 100 * (ours / theirs - 1) if math.isfinite(ours) and math.isfinite(theirs) else math.nan


@dataclass(frozen=True)
class NetworkResult:
    """A trained network of the comparison: its name, its cost, and its perplexity for each seed."""

    name: str
    arch: str
    share: float  # predicted cost of the blocks as a share of the reference's (`Costs`)
    ppl: Mapping[int, float]  # per token of the validation split, by seed; inf if the training diverged
    random: bool = False

    @property
    def mean(self) -> float:
        """Mean perplexity over the seeds."""
        return fmean(self.ppl.values())

    @property
    def sd(self) -> float | None:
        """Sample standard deviation of perplexity over the seeds; `None` for one seed, or if a training diverged."""
        return stdev(self.ppl.values()) if len(self.ppl) > 1 and math.isfinite(self.mean) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the network's row of `baselines.csv`, by column."""
        reached = {"valid_ppl_mean": self.mean, "valid_ppl_sd": self.sd, "n": len(self.ppl)}
        return {"name": self.name, "arch": self.arch, "cost_share": self.share, **reached}


@dataclass(frozen=True)
class _Verdict:
    """The result of comparing the derived network with one baseline, or with all random networks."""

    against: str  # name of the baseline, or "random"
    difference: _Difference
    text: str  # a sentence for the user


@dataclass(frozen=True)
class BaselineComparison:
    """The perplexities of the derived network and its baselines, with notes on the baselines and on diverged runs."""

    networks: tuple[NetworkResult, ...]
    notes: tuple[str, ...]
    metric: str  # cost metric of `NetworkResult.share`

    def verdicts(self) -> list[_Verdict]:
        """Return one verdict per baseline, and one for the random networks together; see `compare_networks`."""
        return compare_networks(self.networks)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `baselines.json`."""
        networks = [
            {**each.to_dict(), "random": each.random, "valid_ppl": {str(seed): ppl for seed, ppl in each.ppl.items()}}
            for each in self.networks
        ]
        answers = [
            {"against": each.against, "percent": each.difference._asdict(), "text": each.text}
            for each in self.verdicts()
        ]
        return {"metric": self.metric, "networks": networks, "answers": answers, "notes": list(self.notes)}

    def write(self, folder: Path) -> list[Path]:
        """Write `baselines.csv` (a row per network) and `baselines.json` (with the verdicts), and return the paths."""
        table = pd.DataFrame([each.to_dict() for each in self.networks])
        write_text(folder / "baselines.csv", table.to_csv(index=False, lineterminator="\n"))
        write_json(folder / BASELINES, self.to_dict())
        return [folder / "baselines.csv", folder / BASELINES]


def compare_baselines(
    baselines: Baselines, config: Config, folder: Path, seeds: Sequence[int], reporter: Reporter
) -> BaselineComparison:
    """Train the derived network and its baselines from each seed, and return the perplexities that they reach.

    Random networks are trained from the first seed alone. Each training has a subfolder `NAME-seed-SEED` of `folder`;
    finished trainings are loaded, others started or resumed. If two baselines are the same network, it is trained once
    per seed. All networks are trained from the first seed before any is trained from the second. The perplexity of a
    training that diverges counts as infinite, and the next call repeats the training. `config` is the configuration of
    the search with its corpus and softmax cutoffs filled in.

    Raises `ParnasError` if `folder` holds trainings of another configuration, or files but no `config.yaml`.
    """
    config = config.from_scratch(model__arch=None)
    prepare_folder(folder, config, MAY_DIFFER)
    first_names: dict[Architecture, str] = {}  # the name of a network that its subfolders have
    for each in baselines.networks:
        first_names.setdefault(each.architecture, each.name)
    trainings = [(each, seed) for seed in seeds for each in baselines.networks if seed == seeds[0] or not each.random]
    reached: dict[str, dict[int, float]] = {each.name: {} for each in baselines.networks}
    for number, (each, seed) in enumerate(trainings, 1):
        reporter.note(f"training {number} of {len(trainings)}: {each.name} from seed {seed}, {each.architecture}")
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
        f"{name} from seed {seed} diverged; its perplexity counts as infinite"
        for name, ppl in reached.items()
        for seed in ppl
        if ppl[seed] == math.inf
    ]
    results = [
        NetworkResult(each.name, str(each.architecture), each.share, reached[each.name], each.random)
        for each in baselines.networks
    ]
    return BaselineComparison(tuple(results), (*baselines.notes, *notes), baselines.metric)


def compare_networks(networks: Sequence[NetworkResult]) -> list[_Verdict]:
    """Compare the network named `derived` with each baseline, and with the median of the random networks, if any."""
    by_name = {each.name: each for each in networks}
    derived = by_name.pop(DERIVED)
    verdicts = [compare_pair(derived, each) for each in by_name.values() if not each.random]
    if random := [each for each in by_name.values() if each.random]:
        verdicts.append(_compare_with_random(derived, random))
    return verdicts


def compare_pair(derived: NetworkResult, other: NetworkResult) -> _Verdict:
    """Return the verdict on the derived network against one baseline, with perplexities paired by seed."""
    difference = paired_difference(derived.ppl, other.ppl)
    between = "" if difference.low is None else f", 95 % interval {difference.low:+.2f} to {difference.high:+.2f} %"
    size = "" if math.isnan(difference.mean) else f"{difference.mean:+.2f} % perplexity{between}, "
    text = (
        f"derived against {other.name} (cost share {other.share:.3f}): {size}{difference.pairs} pair(s) of seeds: "
        f"{difference.verdict}"
    )
    return _Verdict(other.name, difference, text)


def _compare_with_random(derived: NetworkResult, random: Sequence[NetworkResult]) -> _Verdict:
    """Return the verdict on the derived network against all random networks.

    The mean perplexity of the derived network is compared with the median over the random networks. There is no
    interval, since random networks have one seed each.
    """
    difference = _Difference(_percent_above(derived.mean, median(each.mean for each in random)), None, None, None, 0)
    size = "" if math.isnan(difference.mean) else f"{difference.mean:+.2f} % perplexity; "
    worse = sum(derived.mean < each.mean for each in random)
    text = (
        f"derived against the median of {len(random)} random networks of its cost: {size}better than {worse} of "
        f"{len(random)}"
    )
    if len(derived.ppl) > 1:  # random networks have one seed, which may be better or worse than the mean of the seeds
        same_seed = sum(derived.ppl[seed] < ppl for each in random for seed, ppl in each.ppl.items())
        text += f" by its mean over {len(derived.ppl)} seeds, than {same_seed} by the seed of the random networks"
    return _Verdict(RANDOM, difference, text)
