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

from parnas.architecture import drop_identity
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.nas.budget import Budget
from parnas.nas.derive import BlockChoice, derive
from parnas.nas.rerank import NetworkLosses, losses_of_run, rank
from parnas.nas.search import search
from parnas.runs.files import write_json, write_text
from parnas.runs.run import Run
from parnas.studies.train_or_load import prepare_folder, train_once
from parnas.training.progress import Reporter
from parnas.training.session import MAY_DIFFER, resolve_cutoffs, resolve_paths

__all__ = ["Stability", "stability"]

_MIN_PI = 1e-38  # lower bound of probabilities in logarithms, about the smallest normal float32


@dataclass(frozen=True)
class _BlockVotes:
    """The votes of all seeds for the candidates of one block, and the mean probabilities of the candidates."""

    votes: dict[str, int]  # number of seeds whose derived network has the candidate
    mean_pi: dict[str, float]  # mean over the seeds of the candidate's probability
    mean_log_pi: dict[str, float]  # mean over the seeds of the logarithm of this probability, in nats
    consensus: str  # layer of the consensus architecture; see `compare_seeds`
    majority: str | None  # the candidate of more seeds than any other; `None` for a tie

    @property
    def agrees(self) -> bool:
        """Whether the consensus layer has more votes than any other candidate."""
        return self.majority == self.consensus


@dataclass(frozen=True)
class Stability:
    """The architectures that N seeds derived, their distances from each other, and their consensus."""

    seeds: tuple[int, ...]
    strings: tuple[tuple[str, ...], ...]  # derived architecture of each seed, one layer per block
    blocks: tuple[_BlockVotes, ...]

    @property
    def consensus(self) -> tuple[str, ...]:
        """The consensus architecture, one layer per block; see `compare_seeds`."""
        return tuple(block.consensus for block in self.blocks)

    @property
    def majority_agrees(self) -> bool:
        """Whether the consensus layer has more votes than any other candidate in every block."""
        return all(block.agrees for block in self.blocks)

    def hamming(self) -> list[list[int]]:
        """Return the Hamming distances, [N, N]: the number of blocks in which two seeds' architectures differ."""
        return [[sum(map(operator.ne, one, other)) for other in self.strings] for one in self.strings]

    def edits(self) -> list[list[int]]:
        """Return each `edit_distance` between two seeds' architectures, [N, N]; identity layers are left out."""
        networks = [drop_identity(string) for string in self.strings]
        return [[edit_distance(one, other) for other in networks] for one in networks]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `stability.json`; architectures are lists, as a layer name may have several letters."""
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
        """Write `stability.json`, and `stability.csv` with a row per block and candidate; return their paths."""
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
    """Repeat a search with several seeds, each in a subfolder `seed-SEED`, and compare the derived architectures.

    `seeds` is the number of seeds, which count up from `runtime.seed`. Finished searches are loaded, others started or
    resumed. Raises `ParnasError` if `folder` holds searches of another configuration, or files but no `config.yaml`.
    """
    config = resolve_paths(config)
    config = resolve_cutoffs(config, prepare(config.data, reporter.note))
    prepare_folder(folder, config, MAY_DIFFER)
    numbers = [config.runtime.seed + offset for offset in range(seeds)]
    runs: list[Run] = []
    for seed in numbers:
        reporter.note(f"seed {seed}, {len(runs) + 1} of {seeds}")
        runs.append(train_once(search, config.replace(runtime__seed=seed), folder / f"seed-{seed}", reporter))
    derivations = [derive(run, reporter=reporter) for run in runs]
    blocks, first = [each.blocks for each in derivations], derivations[0]
    budget = Budget(first.costs, first.target, least=config.search.least_layers)
    budget = budget.spend(config.search.cost.spend, [block.pi for block in first.blocks])
    if not config.search.rerank_count:
        return compare_seeds(numbers, blocks, budget)

    def rank_by_mean_loss(pi: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        losses = NetworkLosses.mean([losses_of_run(run, reporter) for run in runs])
        return rank(pi, budget, config, losses, own_weights=config.search.parent is not None)[0].choice.layers

    return compare_seeds(numbers, blocks, budget, rank_by_mean_loss)


def compare_seeds(
    seeds: Sequence[int],
    blocks: Sequence[Sequence[BlockChoice]],
    budget: Budget | None = None,
    select: Callable[[Sequence[Mapping[str, float]]], tuple[str, ...]] | None = None,
) -> Stability:
    """Compare searches of the same space with different seeds: count votes per block and find a consensus.

    Without `select`, the consensus is the architecture within the cost target with the greatest mean over seeds of log
    pi (a product of experts). If each seed drew an architecture from its pi, with independent blocks, this is the one
    that all seeds would most probably draw together. Unlike a vote, the consensus weighs confidence: a seed that gives
    a candidate almost no probability counts heavily against the candidate. If the searches re-rank, `stability` passes
    a `select` that minimises the mean re-ranking score.

    Args:
        seeds: the seeds of the searches.
        blocks: for each seed and block, the derived layer and the probabilities of all candidates.
        budget: the constraints on the consensus; `None` for none.
        select: returns the consensus for a probability of each candidate, by name, for each block (each a product over
            the seeds); `None` selects the most probable architecture.

    Raises:
        ParnasError: the candidates of a block differ between the searches.
    """
    candidates = [[list(block.pi) for block in own_blocks] for own_blocks in blocks]
    if any(own_candidates != candidates[0] for own_candidates in candidates):
        raise ParnasError(
            "The searches have different blocks or candidates; give only searches of the same search space."
        )
    strings = tuple(tuple(block.layer for block in own_blocks) for own_blocks in blocks)
    choices = list(zip(*blocks, strict=True))
    mean_log_pi = [
        {name: sum(math.log(max(each.pi[name], _MIN_PI)) for each in block) / len(block) for name in block[0].pi}
        for block in choices
    ]
    # A candidate with probability 0 for every seed cannot be in the consensus.
    products = [
        {name: math.exp(mean) if any(each.pi[name] for each in block) else 0.0 for name, mean in means.items()}
        for block, means in zip(choices, mean_log_pi, strict=True)
    ]
    consensus = (budget or Budget()).most_probable(products)[0].layers if select is None else select(products)
    votes = tuple(map(_count_votes, choices, mean_log_pi, consensus))
    return Stability(tuple(seeds), strings, votes)


def _count_votes(choices: Sequence[BlockChoice], log_pi: Mapping[str, float], consensus: str) -> _BlockVotes:
    """Count how many seeds chose each candidate of one block, and return the counts with the mean probabilities.

    `choices` has an entry per seed; `log_pi` is the mean over seeds of log pi by candidate.
    """
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
    """Return the Levenshtein distance: the least number of layers to insert, remove or replace to make both equal."""
    row = list(range(len(other) + 1))  # edit distances between the layers read so far and each prefix of `other`
    for read, layer in enumerate(one, 1):
        before, row = row, [read]
        for index, counterpart in enumerate(other):
            row.append(min(before[index] + (layer != counterpart), before[index + 1] + 1, row[index] + 1))
    return row[-1]


def mean_of_pairs(distances: Sequence[Sequence[float]]) -> float:
    """Return the mean distance over all pairs, given a symmetric matrix of distances; 0 for fewer than two rows."""
    pairs = [distances[one][other] for one, other in combinations(range(len(distances)), 2)]
    return fmean(pairs) if pairs else 0.0
