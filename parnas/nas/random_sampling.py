"""Random networks with a cost in a band: the baseline for a searched network of the same cost.

Architectures are sampled exactly uniformly by counting: block by block, a candidate is drawn with a probability in
proportion to the number of completions, that is, of choices for the following blocks with a total cost in the band.
(To draw architectures until a cost is in the band would take too long for a narrow band.) The number of completions
depends on the block and on the cost of the blocks before it. Costs are real numbers and their sums rarely coincide, so
a table of all sums would be large. The method is to meet in the middle: for each block of the second half, the sums
that the blocks from there on can have are stored, sorted; for the first half, the counts are added up recursively.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate
from operator import add

from parnas.architecture import IDENTITY, drop_identity
from parnas.errors import ParnasError
from parnas.nas.knapsack import TOLERANCE, exact_costs

__all__ = ["draw_networks"]


def draw_networks(
    spaces: Sequence[Sequence[str]],
    costs: Mapping[str, float],
    low: float,
    high: float,
    seed: int,
    without: Iterable[Sequence[str]] = (),
) -> Iterator[tuple[str, ...]]:
    """Yield random different networks with a cost from `low` to `high`, as one layer per block, until all were drawn.

    Each draw is uniform over the architectures in the band whose network was not drawn before. Architectures that
    differ only in the positions of identity are one network; identity in every block is not a network.

    Args:
        spaces: the candidates of each block.
        costs: cost of each layer by name, 0 or more, in any unit.
        low: least sum of costs, in the unit of `costs`; a relative tolerance of 1e-9 applies to `low` and `high`.
        high: largest sum of costs, in the unit of `costs`.
        seed: seed of the random numbers; equal seeds give equal networks.
        without: networks that are not to be drawn, each as a sequence of layers; identity in it is ignored.

    Raises:
        ParnasError: the band is empty, a block has no candidates, or a layer has no cost.
    """
    if not low <= high or low == math.inf:
        raise ParnasError(
            f"The band of costs from {low} to {high} is empty; give a finite low, and a high of at least low."
        )
    blocks = [tuple(dict.fromkeys(block)) for block in spaces]
    if not blocks or not all(blocks):
        raise ParnasError(
            "A block has no candidates, or there is no block; give one block or more, each with at least one candidate."
        )
    rng = random.Random(seed)
    band = _Band(blocks, costs, low, high)
    for word in {(), *map(drop_identity, without)}:
        band.remove(word)
    while band.count():
        layers = band.draw(rng)
        band.remove(drop_identity(layers))
        yield layers


class _Band:
    """The set of architectures with a cost from `low` to `high`, from which networks can be removed."""

    def __init__(self, blocks: Sequence[Sequence[str]], costs: Mapping[str, float], low: float, high: float) -> None:
        self.blocks = blocks
        self.costs, unit = exact_costs(dict.fromkeys(name for block in blocks for name in block), costs)
        dearest = sum(max(self.costs[name] for name in block) for block in blocks)
        self.low = math.ceil(Fraction(low) * (1 - TOLERANCE) * unit) if low > 0 else 0
        self.high = dearest if high == math.inf else math.floor(Fraction(high) * (1 + TOLERANCE) * unit)
        # removed[word][t]: how many removed architectures begin with given t blocks, whose layers without identity are
        # `word`.
        self.removed: dict[tuple[str, ...], list[int]] = {}
        self.middle = len(blocks) // 2
        self.tails = self._count_tails()
        self.completions = cache(self._count_completions)

    def count(self, blocks: int = 0, spent: int = 0, word: tuple[str, ...] = ()) -> int:
        """Return how many architectures of the set begin with given layers; without arguments, the size of the set.

        Args:
            blocks: number of given layers, one for each of the first blocks, identity included.
            spent: sum of the given layers' costs.
            word: the given layers without identity.
        """
        removed = self.removed.get(word)
        return self.completions(blocks, spent) - (removed[blocks] if removed else 0)

    def draw(self, rng: random.Random) -> tuple[str, ...]:
        """Return a uniformly random architecture of the set, by drawing its place in lexicographic order."""
        place = rng.randrange(self.count())
        layers: list[str] = []
        spent, word = 0, tuple[str, ...]()
        for number, block in enumerate(self.blocks, 1):
            for name in block:
                longer = word if name == IDENTITY else (*word, name)
                count = self.count(number, spent + self.costs[name], longer)
                if place < count:  # the place is among the architectures that go on with this candidate
                    break
                place -= count  # skip them all
            layers.append(name)
            spent, word = spent + self.costs[name], longer
        return tuple(layers)

    def remove(self, word: tuple[str, ...]) -> None:
        """Remove every architecture of a network from the set; `word` is the network's layers without identity.

        Call it once per network: a second call would subtract the same architectures from the counts again.
        """
        if len(word) > len(self.blocks) or any(name not in self.costs for name in word):
            return
        identities = len(self.blocks) - len(word)
        cost = sum(self.costs[name] for name in word) + identities * self.costs.get(IDENTITY, 0)
        if not self.low <= cost <= self.high:
            return
        # ways[t]: how many ways the blocks from the t-th on have to spell word[length:] with identity in between. A
        # block either is identity and the next blocks spell the same, or takes the first layer of the rest.
        ways: list[int] = []
        for length in range(len(word), -1, -1):
            ways_of_shorter, ways = ways, [0] * len(self.blocks) + [int(length == len(word))]
            for t, block in reversed(list(enumerate(self.blocks))):
                ways[t] = ways[t + 1] if IDENTITY in block else 0
                if length < len(word) and word[length] in block:
                    ways[t] += ways_of_shorter[t + 1]
            removed = self.removed.setdefault(word[:length], [0] * len(ways))
            self.removed[word[:length]] = list(map(add, removed, ways))

    def _count_completions(self, blocks: int, spent: int) -> int:
        """Return how many choices for the other blocks give a cost in the band, if the first `blocks` cost `spent`."""
        if blocks < self.middle:
            return sum(self.completions(blocks + 1, spent + self.costs[name]) for name in self.blocks[blocks])
        sums, fewer = self.tails[blocks - self.middle]
        return fewer[bisect_right(sums, self.high - spent)] - fewer[bisect_left(sums, self.low - spent)]

    def _count_tails(self) -> list[tuple[list[int], list[int]]]:
        """Return for each t, from `middle` to the number of blocks, the possible sums of costs of the blocks from t on.

        Each entry is the sorted sums and, for each sum, the number of choices of layers that cost less; a last number
        counts all choices. So two binary searches give the number of choices in a band of costs.
        """
        ways, tails = Counter({0: 1}), [([0], [0, 1])]
        for block in reversed(self.blocks[self.middle :]):
            longer: Counter[int] = Counter()
            for name in block:
                for cost, number in ways.items():
                    longer[cost + self.costs[name]] += number
            ways = longer
            sums = sorted(ways)
            tails.append((sums, list(accumulate((ways[cost] for cost in sums), initial=0))))
        return tails[::-1]
