"""Short trainings that choose between the derived network and networks with less attention (the finalists).

A search judges layers by shared weights after few steps, which favours layers that learn fast. So it may find the best
order of layers but not the best number of attention layers; short trainings of the finalists choose that number.
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

_SHORTER = 8  # a finalist is trained for the configured steps divided by this


class Finalist(NamedTuple):
    """A derived network and the perplexity that it reached in its short training."""

    derivation: Derivation
    ppl: float  # per token of the validation split
    steps: int  # of the short training

    def to_dict(self) -> dict[str, Any]:
        """Return this finalist's entry in `finalists.json`; `max` holds the largest allowed number of each layer."""
        arch, costs = self.derivation.architecture, self.derivation.costs
        return {
            "arch": str(arch),
            "max": dict(self.derivation.constraints.limits),
            "cost": None if costs is None else costs.share(arch),
            "ppl": self.ppl,
            "steps": self.steps,
        }


def fewer_attention_variants(run: Run, derivation: Derivation, reporter: Reporter) -> Iterator[Derivation]:
    """Yield `derivation`, derived from `run`, then the best derivations of `run` with fewer and fewer attention layers.

    Each derivation has at least one attention layer less than the previous one: of plain and compressive attention, the
    kind with more layers may have one layer less than now, and the other kind may have no more layers than now. The
    series ends with a network without attention or with `search.least_attention` layers of it, or when no network meets
    these limits.
    """
    search = run.config().search
    space, least = search.candidates, search.least_layers.get(ATTENTION, 0)
    kinds = [kind for kind in (ATTENTION, COMPRESSIVE) if any(is_limited(name, kind) for name in space)]
    while True:
        yield derivation
        counts = {kind: sum(is_limited(layer, kind) for layer in derivation.architecture) for kind in kinds}
        spare = {kind: count - (least if kind == ATTENTION else 0) for kind, count in counts.items()}
        if not any(count > 0 for count in spare.values()):
            return
        most = max((kind for kind in kinds if spare[kind] > 0), key=counts.__getitem__)
        constraints = replace(derivation.constraints, limits=counts | {most: counts[most] - 1})
        try:
            # Without re-ranking this reads no text; it fails if no network meets the constraints.
            derive(run, replace(constraints, rerank_top_k=0))
        except ParnasError as error:
            reporter.note(f"no network of the search has fewer attention layers: {error}")
            return
        derivation = derive(run, constraints, reporter)


def train_finalists(
    run: Run, derivation: Derivation, count: int, config: Config, folder: Path, reporter: Reporter
) -> list[Finalist]:
    """Train up to `count` finalists of a search briefly; return them, the best first, and write `finalists.json`.

    Finalists are the first networks of `fewer_attention_variants`. Each is trained with the settings of `config` for
    an eighth of the steps, in a subfolder of `folder`. Finished trainings are loaded, others started or resumed. A
    finalist that diverges comes last, and the next call repeats its training. A single finalist is not trained, and the
    returned list is empty. Raises `Diverged` if all finalists diverge.
    """
    derivations = list(islice(fewer_attention_variants(run, derivation, reporter), count))
    if len(derivations) < count:
        reporter.note(f"the search has only {len(derivations)} finalist(s); {count} were requested")
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
    """Return the configuration for a finalist: an eighth of the training steps, at most a quarter of them warm-up."""
    steps = math.ceil(config.train.steps / _SHORTER)
    return config.replace(train__steps=steps, train__warmup_steps=min(config.train.warmup_steps, steps // 4))


def refuse_other_network(folder: Path, arch: str) -> None:
    """Raise `ParnasError` if the run folder holds a training of another network than `arch`."""
    run = Run(folder)
    if run.started() and (trained := run.config().model.arch) != arch:
        raise ParnasError(
            f"{folder} holds a training of {trained}, but the network to train is now {arch}. Give the options of the "
            f"earlier call, such as --finalists, or remove {folder}."
        )
