"""Stability of a search: repeat it with other seeds and compare the derived architectures.

The study reports how many seeds chose each candidate of each block, the Hamming and edit distances between the
architectures, and a consensus.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from parnas.architecture import Architecture, drop_identity
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.nas.cost import Costs
from parnas.nas.derive import BlockChoice, choose, derive
from parnas.nas.knapsack import LayerString
from parnas.nas.rerank import rerank, rescorer
from parnas.nas.search import search
from parnas.runs.files import write_json, write_text
from parnas.runs.run import Run
from parnas.studies.train_or_load import prepare_folder, train_once
from parnas.training.progress import Reporter
from parnas.training.session import resolve_corpus, resolve_cutoffs

__all__ = ["Stability", "stability"]

_MIN_PI = 1e-38  # the least argument of a logarithm; float32 cannot distinguish less from zero


@dataclass(frozen=True)
class _BlockVotes:
    """The votes and mean probabilities of one block over the seeds."""

    votes: dict[str, int]  # seeds by the candidate that they derived
    mean_pi: dict[str, float]
    mean_log_pi: dict[str, float]  # nats
    consensus: str
    majority: str | None  # the candidate of more seeds than any other; `None` for a tie

    @property
    def agrees(self) -> bool:
        """Return whether the consensus is what most seeds chose."""
        return self.majority == self.consensus


@dataclass(frozen=True)
class Stability:
    """The architectures found with N seeds, how much each pair differs, and their consensus."""

    seeds: tuple[int, ...]
    strings: tuple[tuple[str, ...], ...]  # of each seed, one layer per block
    blocks: tuple[_BlockVotes, ...]

    @property
    def consensus(self) -> tuple[str, ...]:
        """Return one layer per block."""
        return tuple(block.consensus for block in self.blocks)

    @property
    def majority_agrees(self) -> bool:
        """Return whether in every block the consensus is what most seeds chose."""
        return all(block.agrees for block in self.blocks)

    def hamming(self) -> list[list[int]]:
        """Return the number of blocks in which each pair of architectures differs, [N, N]."""
        return [[sum(map(operator.ne, one, other)) for other in self.strings] for one in self.strings]

    def edits(self) -> list[list[int]]:
        """Return the edit distance of each pair of architectures without identity, [N, N]."""
        networks = [drop_identity(string) for string in self.strings]
        return [[edit_distance(one, other) for other in networks] for one in networks]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `stability.json`; a layer name may have several letters."""
        hamming, edits = self.hamming(), self.edits()
        return {
            "seeds": list(self.seeds),
            "strings": [list(string) for string in self.strings],
            "networks": [list(drop_identity(string)) for string in self.strings],
            "hamming": hamming,
            "edit": edits,
            "mean_hamming": mean_of_pairs(hamming),
            "mean_edit": mean_of_pairs(edits),
            "consensus": list(self.consensus),
            "majority_agrees": self.majority_agrees,
            "blocks": [asdict(block) | {"agrees": block.agrees} for block in self.blocks],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `stability.json`, and `stability.csv` with a row per block and candidate."""
        rows = [
            {
                "block": number,
                "candidate": candidate,
                "votes": votes,
                "mean_pi": block.mean_pi[candidate],
                "mean_log_pi": block.mean_log_pi[candidate],
                "consensus": int(candidate == block.consensus),
                "majority": int(candidate == block.majority),
            }
            for number, block in enumerate(self.blocks, 1)
            for candidate, votes in block.votes.items()
        ]
        write_json(folder / "stability.json", self.to_dict())
        write_text(folder / "stability.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
        return [folder / "stability.json", folder / "stability.csv"]


def stability(config: Config, folder: Path, seeds: int, reporter: Reporter) -> Stability:
    """Search with `seeds` seeds from `runtime.seed` on, each in a subfolder `seed-SEED`, and compare the results.

    Finished searches are loaded, others resumed. Raises `ParnasError` if the folder holds other files, or searches of
    another configuration.
    """
    config = resolve_corpus(config)
    config = resolve_cutoffs(config, prepare(config.data, reporter.note))
    prepare_folder(folder, config)
    numbers = [config.runtime.seed + offset for offset in range(seeds)]
    runs: list[Run] = []
    for seed in numbers:
        reporter.note(f"seed {seed}, {len(runs) + 1} of {seeds}")
        runs.append(train_once(search, config.replace(runtime__seed=seed), folder / f"seed-{seed}", reporter))
    derivations = [derive(run, reporter=reporter) for run in runs]
    first = derivations[0]  # all have the target and the costs of one configuration on one machine
    blocks, count = [each.blocks for each in derivations], config.search.rerank_count

    def rerank_by_mean_loss(choices: Sequence[LayerString]) -> LayerString:
        losses = [list(map(rescorer(run, reporter), (Architecture(each.layers) for each in choices))) for run in runs]
        means = [fmean(network_losses) for network_losses in zip(*losses, strict=True)]
        return rerank(choices, means, config.search.rerank_pi_weight)[0].choice

    return compare_seeds(numbers, blocks, first.costs, first.target, count, rerank_by_mean_loss if count else None)


def compare_seeds(
    seeds: Sequence[int],
    blocks: Sequence[Sequence[BlockChoice]],
    costs: Costs | None = None,
    target: float | None = None,
    count: int = 1,
    rerank_choices: Callable[[Sequence[LayerString]], LayerString] | None = None,
) -> Stability:
    """Return votes, strings and consensus of searches over the same space; `blocks` is [seeds][blocks].

    The consensus maximises the mean over seeds of log pi, a product of experts. If every seed drew its layers from its
    own pi, independently in each block, this is the architecture within the cost target that all seeds would draw with
    the greatest probability. Unlike a vote, it weighs the confidence of each seed: one that almost excludes a candidate
    counts heavily against it. `rerank_choices` chooses the consensus among the `count` most probable architectures;
    without it, the most probable one is the consensus.

    Raises `ParnasError` if the candidates of a block differ between searches.
    """
    candidates = [[list(block.pi) for block in own_blocks] for own_blocks in blocks]
    if any(own_candidates != candidates[0] for own_candidates in candidates):
        raise ParnasError("The searches had different blocks or candidates; only those of one space can be compared.")
    strings = tuple(tuple(block.layer for block in own_blocks) for own_blocks in blocks)
    choices = list(zip(*blocks, strict=True))
    mean_log_pi = [
        {name: sum(math.log(max(each.pi[name], _MIN_PI)) for each in block) / len(block) for name in block[0].pi}
        for block in choices
    ]
    # A candidate that every seed excludes is none of the consensus.
    products = [
        {name: math.exp(mean) if any(each.pi[name] for each in block) else 0.0 for name, mean in means.items()}
        for block, means in zip(choices, mean_log_pi, strict=True)
    ]
    likeliest = choose(products, costs, target, count=max(1, count))
    consensus = (likeliest[0] if rerank_choices is None else rerank_choices(likeliest)).layers
    votes = tuple(map(_count_votes, choices, mean_log_pi, consensus))
    return Stability(tuple(seeds), strings, votes)


def _count_votes(choices: Sequence[BlockChoice], log_pi: Mapping[str, float], consensus: str) -> _BlockVotes:
    """Return the votes of the seeds for one block."""
    chosen = Counter(choice.layer for choice in choices)
    (first, most), *others = chosen.most_common()
    return _BlockVotes(
        votes={candidate: chosen[candidate] for candidate in log_pi},
        mean_pi={candidate: fmean(choice.pi[candidate] for choice in choices) for candidate in log_pi},
        mean_log_pi=dict(log_pi),
        consensus=consensus,
        majority=None if others and others[0][1] == most else first,
    )


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the Levenshtein distance: the least number of layers to insert, remove or replace."""
    row = list(range(len(other) + 1))  # distances of the layers read so far to each beginning of `other`
    for read, layer in enumerate(one, 1):
        before, row = row, [read]
        for index, counterpart in enumerate(other):
            row.append(min(before[index] + (layer != counterpart), before[index + 1] + 1, row[index] + 1))
    return row[-1]


def mean_of_pairs(distances: Sequence[Sequence[float]]) -> float:
    """Return the mean over all pairs of a symmetric matrix; 0 for a single row, which has no pair."""
    pairs = [distances[one][other] for one, other in combinations(range(len(distances)), 2)]
    return fmean(pairs) if pairs else 0.0
