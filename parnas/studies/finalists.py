"""Short trainings that choose between the derived network and networks with less attention.

A search judges layers by shared weights after few steps, which favours layers that learn fast. So it may find the best
order of layers but not the best amount of attention, and short trainings of the finalists decide that.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from parnas.architecture import ATTENTION, COMPRESSIVE
from parnas.config.loader import Config
from parnas.errors import Diverged, ParnasError
from parnas.nas.derive import Derivation, derive
from parnas.nas.knapsack import is_limited
from parnas.runs.files import write_json
from parnas.runs.run import Run
from parnas.studies.train_or_load import reached_perplexity, train_once
from parnas.training.progress import Reporter
from parnas.training.retrain import retrain

__all__ = ["Finalist"]

_SHORTER = 8  # the training of a finalist has this fraction of the steps: 1 / 8


class Finalist(NamedTuple):
    """A derivation and the perplexity per token of the validation split after its short training."""

    derivation: Derivation
    ppl: float
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        arch, costs = self.derivation.architecture, self.derivation.costs
        return {
            "arch": str(arch),
            "max": dict(self.derivation.constraints.limits),
            "cost": None if costs is None else costs.share(arch),
            "ppl": self.ppl,
            "steps": self.steps,
        }


def fewer_attention_variants(run: Run, derivation: Derivation, reporter: Reporter) -> Iterator[Derivation]:
    """Yield the derived network, then the best network under ever lower limits on attention layers.

    It ends when no attention is left, or no network meets the limits. If plain and compressive attention are both
    candidates, each step lowers the limit of the more frequent kind by one and limits the less frequent kind to its
    count, so that a removed layer is not replaced by one of that kind.
    """
    space = run.config().search.candidates
    kinds = [kind for kind in (ATTENTION, COMPRESSIVE) if any(is_limited(name, kind) for name in space)]
    while True:
        yield derivation
        counts = {kind: sum(is_limited(layer, kind) for layer in derivation.architecture) for kind in kinds}
        if not any(counts.values()):
            return
        most = max(counts, key=counts.__getitem__)
        constraints = replace(derivation.constraints, limits=counts | {most: counts[most] - 1})
        try:
            derive(run, replace(constraints, rerank_top_k=0))  # reads no text; fails if no network meets them
        except ParnasError as error:
            reporter.note(f"no network has less attention: {error}")
            return
        derivation = derive(run, constraints, reporter)


def train_finalists(
    run: Run, derivation: Derivation, count: int, config: Config, folder: Path, reporter: Reporter
) -> list[Finalist]:
    """Train up to `count` finalists of a search and return them, the best first; write `finalists.json` beside them.

    Each is trained with the settings of `config` for an eighth of its steps, with a shorter schedule, in a subfolder of
    its own. Finished trainings are loaded, others resumed. One that diverges comes last, and is tried again in the next
    call; raises `Diverged` if all do. A single finalist is not trained: the list is empty.
    """
    derivations = list(islice(fewer_attention_variants(run, derivation, reporter), count))
    if len(derivations) < count:
        reporter.note(f"the search has {len(derivations)} finalist(s) in place of {count}")
    if len(derivations) < 2:
        return []
    short, finalists = shorten(config), list[Finalist]()
    for number, each in enumerate(derivations, 1):
        arch = str(each.architecture)
        reporter.note(f"finalist {number} of {len(derivations)}: training {arch} for {short.train.steps} steps")
        run_folder = folder / str(number)
        refuse_other_network(run_folder, arch)
        train = partial(train_once, retrain, short.replace(model__arch=arch), run_folder, reporter)
        finalists.append(Finalist(each, reached_perplexity(train, reporter), short.train.steps))
    finalists.sort(key=lambda finalist: finalist.ppl)
    write_json(folder / "finalists.json", [finalist.to_dict() for finalist in finalists])
    if finalists[0].ppl == math.inf:
        raise Diverged(f"All finalists in {folder} diverged; lower train.lr or raise train.warmup_steps.")
    return finalists


def shorten(config: Config) -> Config:
    """Return the configuration with an eighth of the training steps, and a warm-up of at most a quarter of these."""
    steps = math.ceil(config.train.steps / _SHORTER)
    return config.replace(train__steps=steps, train__warmup_steps=min(config.train.warmup_steps, steps // 4))


def refuse_other_network(folder: Path, arch: str) -> None:
    """Raise `ParnasError` if a run folder of a pipeline holds a training of another network."""
    run = Run(folder)
    if run.started() and (trained := run.config().model.arch) != arch:
        raise ParnasError(
            f"{folder} was started with {trained}, and now {arch} was derived. Give --finalists as before, or remove "
            f"{folder} to train {arch}."
        )
