"""The last choice of a pipeline: the derived network or one of less attention, by what short trainings reach.

A search judges layers by weights that are shared and young, which favours what learns soonest. So it may tell the order
of layers better than the amount of attention, and training settles that.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from parnas.architecture import ATTENTION, COMPRESSIVE, Architecture
from parnas.config import Config
from parnas.errors import Diverged, ParnasError
from parnas.files import write_json
from parnas.nas.derive import Derivation, derive
from parnas.nas.knapsack import is_limited
from parnas.run import Run
from parnas.training.repeated import reached_perplexity, train_once
from parnas.training.reporter import Reporter
from parnas.training.retrain import retrain

SHORTER = 8  # times, that a finalist's training is than the recipe's


class Finalist(NamedTuple):
    """A derivation and the perplexity per token of the validation split that its short training reached."""

    derivation: Derivation
    ppl: float
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """The figures, for a file."""
        arch, costs = self.derivation.architecture, self.derivation.costs
        return {
            "arch": str(arch),
            "max": dict(self.derivation.demands.limits),
            "cost": None if costs is None else costs.share(arch),
            "ppl": self.ppl,
            "steps": self.steps,
        }


def less_and_less(run: Run, derivation: Derivation, reporter: Reporter) -> Iterator[Derivation]:
    """What a search derives, then with at least one attention layer less each, down to none.

    Where layers of both kinds of attention are candidates, neither may take the other's place: the more frequent one
    loses a layer, and the other gains none.
    """
    space = run.config().search.candidates
    kinds = [kind for kind in (ATTENTION, COMPRESSIVE) if any(is_limited(name, kind) for name in space)]
    while True:
        yield derivation
        counts = {kind: count_kind(derivation.architecture, kind) for kind in kinds}
        if not any(counts.values()):
            return
        most = max(counts, key=counts.__getitem__)
        demands = replace(derivation.demands, limits=counts | {most: counts[most] - 1})
        try:
            derive(run, replace(demands, rescore=0))  # which reads no text, and fails where nothing meets the demands
        except ParnasError as error:
            reporter.note(f"no network has less attention: {error}")
            return
        derivation = derive(run, demands, reporter)


def count_kind(architecture: Architecture, kind: str) -> int:
    """How many layers have that letter."""
    return sum(is_limited(layer, kind) for layer in architecture)


def hold_final(
    run: Run, derivation: Derivation, count: int, config: Config, folder: Path, reporter: Reporter
) -> list[Finalist]:
    """Up to `count` finalists of a search, the best first; writes `finalists.json` beside their trainings.

    Each is trained by the recipe of `config` in an eighth of its steps, the schedule shrunk to them, in a
    subfolder of its own. Finished trainings are kept, begun ones gone on with. One that diverges comes last, and is
    tried again in the next call; raises `Diverged` where all do. A single one is not trained: empty.
    """
    derivations = list(islice(less_and_less(run, derivation, reporter), count))
    if len(derivations) < count:
        reporter.note(f"the search has {len(derivations)} finalist(s) in place of {count}")
    if len(derivations) < 2:
        return []
    short, found = shorten(config), list[Finalist]()
    for number, each in enumerate(derivations, 1):
        arch = str(each.architecture)
        reporter.note(f"finalist {number} of {len(derivations)}: training {arch} for {short.train.steps} steps")
        place = folder / str(number)
        refuse_other_network(place, arch)
        train = partial(train_once, retrain, short.replace(model__arch=arch), place, reporter)
        found.append(Finalist(each, reached_perplexity(train, reporter), short.train.steps))
    found.sort(key=lambda finalist: finalist.ppl)
    write_json(folder / "finalists.json", [finalist.to_dict() for finalist in found])
    if found[0].ppl == math.inf:
        raise Diverged(f"All finalists in {folder} diverged; lower train.lr or raise train.warmup_steps.")
    return found


def shorten(config: Config) -> Config:
    """The recipe in an eighth of its steps, with a warm-up of at most a quarter of these."""
    steps = math.ceil(config.train.steps / SHORTER)
    return config.replace(train__steps=steps, train__warmup_steps=min(config.train.warmup_steps, steps // 4))


def refuse_other_network(folder: Path, arch: str) -> None:
    """Raise where a run folder of a pipeline holds a training of another network than the one it now comes to."""
    run = Run(folder)
    if run.begun() and (trained := run.config().model.arch) != arch:
        raise ParnasError(
            f"{folder} was begun with {trained}, and now {arch} was derived. Give --finalists as before, or remove "
            f"{folder}, to train the other one."
        )
