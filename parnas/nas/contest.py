"""The derived network and its baselines, trained alike: what each reaches, and whether the search was worth it."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.files import write_json, write_text
from parnas.nas.baselines import DERIVED, RANDOM, Baselines
from parnas.nas.intervals import Difference, paired_difference, relative, spread
from parnas.training.repeated import reached_perplexity, settle_folder, train_once
from parnas.training.reporter import Reporter
from parnas.training.retrain import retrain


@dataclass(frozen=True)
class Standing:
    """A network and the perplexities that it reached."""

    name: str
    arch: str
    share: float  # predicted cost of the blocks over that of the interleaved network's
    ppl: Mapping[int, float]  # per token of the validation split, by seed; inf where the training diverged
    random: bool = False

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.ppl.values())

    @property
    def sd(self) -> float | None:
        """Over the seeds; none of a single one, or where one diverged."""
        return spread(list(self.ppl.values()))

    def to_dict(self) -> dict[str, Any]:
        """The figures, for a table or a file."""
        return {
            "name": self.name,
            "arch": self.arch,
            "cost_share": self.share,
            "valid_ppl_mean": self.mean,
            "valid_ppl_sd": self.sd,
            "n": len(self.ppl),
        }


@dataclass(frozen=True)
class Answer:
    """The derived network against another: perplexities that differ by so many per cent."""

    against: str
    difference: Difference
    text: str


@dataclass(frozen=True)
class Contest:
    """What all networks reached, and what must be known to read it."""

    standings: tuple[Standing, ...]
    notes: tuple[str, ...]
    metric: str  # that the costs are of

    def answers(self) -> list[Answer]:
        """The derived network against each guess, and against chance."""
        return compare_standings(self.standings)

    def to_dict(self) -> dict[str, Any]:
        """The content of `baselines.json`."""
        return {
            "metric": self.metric,
            "networks": [
                each.to_dict()
                | {"random": each.random, "valid_ppl": {str(seed): ppl for seed, ppl in each.ppl.items()}}
                for each in self.standings
            ],
            "answers": [
                {"against": each.against, "percent": each.difference._asdict(), "text": each.text}
                for each in self.answers()
            ],
            "notes": list(self.notes),
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `baselines.csv` with a row per network, and `baselines.json` with the answers too."""
        rows = [each.to_dict() for each in self.standings]
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(folder / "baselines.csv", text.getvalue())
        write_json(folder / "baselines.json", self.to_dict())
        return [folder / "baselines.csv", folder / "baselines.json"]


def hold_contest(found: Baselines, config: Config, folder: Path, seeds: Sequence[int], reporter: Reporter) -> Contest:
    """Train every network from each seed, random ones from the first alone, each in a subfolder `NAME-seed-SEED`.

    config: of a search, so with its text and cutoffs settled. Finished trainings are kept, begun ones gone on with;
    names that stand for one network share its trainings. Every network is trained from the first seed before any is
    from the second. A training that diverges counts as infinite, with a note; it is tried again in the next call.
    Raises `ParnasError` where the folder holds other things, or trainings of another configuration.
    """
    config = config.replace(model__arch=None)
    settle_folder(folder, config)
    first: dict[Architecture, str] = {}  # the name whose subfolder a network is trained in
    for each in found.networks:
        first.setdefault(each.architecture, each.name)
    wanted = [(each, seed) for seed in seeds for each in found.networks if seed == seeds[0] or not each.random]
    reached: dict[str, dict[int, float]] = {each.name: {} for each in found.networks}
    for number, (each, seed) in enumerate(wanted, 1):
        reporter.note(f"{each.name} from seed {seed}, {number} of {len(wanted)}: {each.architecture}")
        changed = config.replace(model__arch=str(each.architecture), runtime__seed=seed)
        place = folder / f"{first[each.architecture]}-seed-{seed}"
        reached[each.name][seed] = reached_perplexity(partial(train_once, retrain, changed, place, reporter), reporter)
    notes = [
        f"{each.name} is the same network as {first[each.architecture]}"
        for each in found.networks
        if first[each.architecture] != each.name
    ]
    notes += [
        f"{name} from seed {seed} diverged, and counts as infinite"
        for name, ppl in reached.items()
        for seed in ppl
        if ppl[seed] == math.inf
    ]
    standings = [
        Standing(each.name, str(each.architecture), each.share, reached[each.name], each.random)
        for each in found.networks
    ]
    return Contest(tuple(standings), (*found.notes, *notes), found.metric)


def compare_standings(standings: Sequence[Standing]) -> list[Answer]:
    """The derived network against each guess, and against the random ones, whose median stands for chance."""
    named = {each.name: each for each in standings}
    derived = named.pop(DERIVED)
    answers = [answer(derived, each) for each in named.values() if not each.random]
    if chance := [each for each in named.values() if each.random]:
        answers.append(answer_chance(derived, chance))
    return answers


def answer(derived: Standing, other: Standing) -> Answer:
    """The derived network against another by pairs of the same seed."""
    difference = paired_difference(derived.ppl, other.ppl)
    between = "" if difference.low is None else f", 95 % interval {difference.low:+.2f} to {difference.high:+.2f} %"
    size = "" if math.isnan(difference.mean) else f"{difference.mean:+.2f} % perplexity{between}, "
    text = (
        f"derived against {other.name} (cost share {other.share:.3f}): {size}{difference.pairs} pair(s) of seeds: "
        f"{difference.verdict}"
    )
    return Answer(other.name, difference, text)


def answer_chance(derived: Standing, chance: Sequence[Standing]) -> Answer:
    """The derived network's mean against the median of random networks' perplexities, which form no pairs."""
    difference = Difference(relative(derived.mean, median(each.mean for each in chance)), None, None, 0)
    size = "" if math.isnan(difference.mean) else f"{difference.mean:+.2f} % perplexity; "
    worse = sum(derived.mean < each.mean for each in chance)
    text = (
        f"derived against the median of {len(chance)} random networks of its cost: {size}better than {worse} of "
        f"{len(chance)}"
    )
    if len(derived.ppl) > 1:  # the others have one seed, which may be a good or a bad one
        same = sum(derived.ppl[seed] < ppl for each in chance for seed, ppl in each.ppl.items())
        text += f" in the mean of its {len(derived.ppl)} seeds, than {same} by the seed that they have"
    return Answer(RANDOM, difference, text)
