"""Whether a search finds the same again: repeated with other seeds, the strings compared, one consensus drawn."""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from parnas.architecture import Architecture, drop_identity
from parnas.config import Config
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.files import write_json, write_text
from parnas.nas.cost import Costs
from parnas.nas.derive import BlockChoice, choose, derive
from parnas.nas.inherited import rank_again, rescorer
from parnas.nas.knapsack import Choice
from parnas.nas.search import search
from parnas.run import Run
from parnas.training.phases import resolve_corpus, resolve_cutoffs
from parnas.training.repeated import settle_folder, train_once
from parnas.training.reporter import Reporter

LEAST_PI = 1e-38  # what float32 cannot tell from zero: a logarithm is taken of no less


@dataclass(frozen=True)
class BlockVotes:
    """What the seeds say of one block."""

    votes: dict[str, int]  # seeds that derived it
    mean_pi: dict[str, float]
    mean_log_pi: dict[str, float]  # nats
    consensus: str
    majority: str | None  # the candidate of more seeds than any other; none where two are equal

    @property
    def agrees(self) -> bool:
        """Whether the consensus is what most seeds chose."""
        return self.majority == self.consensus


@dataclass(frozen=True)
class Stability:
    """The strings of N seeds, their distances [N, N] and their consensus."""

    seeds: tuple[int, ...]
    strings: tuple[tuple[str, ...], ...]  # of each seed, one layer per block
    blocks: tuple[BlockVotes, ...]

    @property
    def consensus(self) -> tuple[str, ...]:
        """One layer per block."""
        return tuple(block.consensus for block in self.blocks)

    @property
    def majority_agrees(self) -> bool:
        """Whether in every block the consensus is what most seeds chose."""
        return all(block.agrees for block in self.blocks)

    def hamming(self) -> list[list[int]]:
        """In how many blocks each two strings differ."""
        return [
            [sum(a != b for a, b in zip(one, other, strict=True)) for other in self.strings] for one in self.strings
        ]

    def edits(self) -> list[list[int]]:
        """Edit distance of each two networks: strings without identity, which stands for no layer."""
        networks = [drop_identity(string) for string in self.strings]
        return [[edit_distance(one, other) for other in networks] for one in networks]

    def to_dict(self) -> dict[str, Any]:
        """The content of `stability.json`; layers stand in lists, so that names of any length can be told apart."""
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
            "blocks": [
                {
                    "votes": block.votes,
                    "mean_pi": block.mean_pi,
                    "mean_log_pi": block.mean_log_pi,
                    "consensus": block.consensus,
                    "majority": block.majority,
                    "agrees": block.agrees,
                }
                for block in self.blocks
            ],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `stability.json`, and `stability.csv` with a row per block and candidate."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["block", "candidate", "votes", "mean_pi", "mean_log_pi", "consensus", "majority"])
        for number, block in enumerate(self.blocks, 1):
            for candidate, votes in block.votes.items():
                figures = [votes, block.mean_pi[candidate], block.mean_log_pi[candidate]]
                chosen = [int(candidate == block.consensus), int(candidate == block.majority)]
                rows.writerow([number, candidate, *figures, *chosen])
        write_json(folder / "stability.json", self.to_dict())
        write_text(folder / "stability.csv", text.getvalue())
        return [folder / "stability.json", folder / "stability.csv"]


def stability(config: Config, folder: Path, seeds: int, reporter: Reporter) -> Stability:
    """Search with `seeds` seeds from `runtime.seed` on, each in a subfolder `seed-SEED`, and compare what they found.

    Finished searches are kept, begun ones gone on with. Raises `ParnasError` where the folder holds other things, or
    searches of another configuration.
    """
    config = resolve_corpus(config)
    config = resolve_cutoffs(config, prepare(config.data, reporter.note))
    settle_folder(folder, config)
    numbers = [config.runtime.seed + offset for offset in range(seeds)]
    runs: list[Run] = []
    for seed in numbers:
        reporter.note(f"seed {seed}, {len(runs) + 1} of {seeds}")
        runs.append(train_once(search, config.replace(runtime__seed=seed), folder / f"seed-{seed}", reporter))
    derivations = [derive(run, reporter=reporter) for run in runs]
    first = derivations[0]  # all have the target and the costs of one configuration on one machine
    found, count = [each.blocks for each in derivations], config.search.looked_at

    def look_again(chosen: Sequence[Choice]) -> Choice:
        losses = [list(map(rescorer(run, reporter), (Architecture(each.layers) for each in chosen))) for run in runs]
        means = [fmean(of_network) for of_network in zip(*losses, strict=True)]
        return rank_again(chosen, means, config.search.weight_of_pi)[0].choice

    return compare_seeds(numbers, found, first.costs, first.target, count, look_again if count else None)


def compare_seeds(
    seeds: Sequence[int],
    found: Sequence[Sequence[BlockChoice]],
    costs: Costs | None = None,
    target: float | None = None,
    count: int = 1,
    look_again: Callable[[Sequence[Choice]], Choice] | None = None,
) -> Stability:
    """Votes, strings and consensus of searches over the same space, [seeds][blocks].

    The consensus takes the mean over seeds of log pi, a product of experts. If every seed draws its layers from its own
    pi, independently in each block, this is the string within the target of cost that all of them draw with the
    greatest probability together. Unlike a vote, it counts how sure a seed is, and one seed that all but excludes a
    candidate weighs heavily against it. With `look_again`, it is what that takes of the `count` first of such strings.

    Raises `ParnasError` where the candidates of a block are not the same in all.
    """
    if any([list(block.pi) for block in blocks] != [list(block.pi) for block in found[0]] for blocks in found):
        raise ParnasError("The searches had different blocks or candidates; only those of one space can be compared.")
    strings = tuple(tuple(block.layer for block in blocks) for blocks in found)
    choices = list(zip(*found, strict=True))
    chosen = choose([product_of_experts(block) for block in choices], costs, target, count=max(1, count))
    consensus = (chosen[0] if look_again is None else look_again(chosen)).layers
    votes = tuple(count_votes(block, layer) for block, layer in zip(choices, consensus, strict=True))
    return Stability(tuple(seeds), strings, votes)


def product_of_experts(choices: Sequence[BlockChoice]) -> dict[str, float]:
    """exp of the mean over the seeds of one block's log pi, by candidate; 0 for what no seed has there."""
    return {
        name: math.exp(mean) if any(each.pi[name] for each in choices) else 0.0
        for name, mean in mean_log_pi(choices).items()
    }


def mean_log_pi(choices: Sequence[BlockChoice]) -> dict[str, float]:
    """Mean over the seeds of one block's log pi, by candidate."""
    return {
        name: sum(math.log(max(each.pi[name], LEAST_PI)) for each in choices) / len(choices) for name in choices[0].pi
    }


def count_votes(choices: Sequence[BlockChoice], consensus: str) -> BlockVotes:
    """What the seeds' choices for one block come to."""
    candidates, count = list(choices[0].pi), len(choices)
    chosen = Counter(choice.layer for choice in choices)
    most = [candidate for candidate in candidates if chosen[candidate] == max(chosen.values())]
    return BlockVotes(
        votes={candidate: chosen[candidate] for candidate in candidates},
        mean_pi={candidate: sum(choice.pi[candidate] for choice in choices) / count for candidate in candidates},
        mean_log_pi=mean_log_pi(choices),
        consensus=consensus,
        majority=most[0] if len(most) == 1 else None,
    )


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Least number of layers to insert, remove or replace that makes one network the other (Levenshtein)."""
    row = list(range(len(other) + 1))  # distances of the layers read so far to each beginning of `other`
    for read, layer in enumerate(one, 1):
        before, row = row, [read]
        for index, counterpart in enumerate(other):
            row.append(min(before[index] + (layer != counterpart), before[index + 1] + 1, row[index] + 1))
    return row[-1]


def mean_of_pairs(distances: Sequence[Sequence[float]]) -> float:
    """Mean over all pairs of a symmetric matrix; 0 for a single row, which has no pair."""
    pairs = [distances[one][other] for one, other in combinations(range(len(distances)), 2)]
    return sum(pairs) / len(pairs) if pairs else 0.0
