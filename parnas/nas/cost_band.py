"""Random networks whose cost lies in a band: what a searched network of the same cost is to be compared with.

Strings are drawn exactly uniformly by backward counting: a candidate is taken with the number of strings within the
band that can follow it as its weight. Rejection would be hopeless where the band is narrow. Numbers are counted over
the different sums of cost: behind the middle of the stack from the sums that the rest can reach, sorted, and before it
block by block over the sums reached so far, so both tables stay small although real-valued costs hardly ever meet.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import add

from parnas.architecture import IDENTITY, drop_identity
from parnas.errors import ParnasError
from parnas.nas.knapsack import TOLERANCE, exact_costs


def draw_networks(
    spaces: Sequence[Sequence[str]],
    costs: Mapping[str, float],
    low: float,
    high: float,
    seed: int,
    without: Iterable[Sequence[str]] = (),
) -> Iterator[tuple[str, ...]]:
    """Strings of different networks with a cost in [low, high], one after the other until none is left.

    spaces: the candidates of each block. costs: of each layer name, 0 or more; `low` and `high` in the same unit,
    with a relative tolerance of 1e-9. `without`: networks that are not to be drawn. The same seed gives the same ones.

    Every string in the band that names a network not yet drawn is equally likely to be the next, as if strings were
    drawn uniformly and those of known networks thrown away. Strings that differ only in where identity stands are
    one network; identity alone is none. Raises `ParnasError` for an empty band, blocks without candidates, and layers
    without a cost.
    """
    if not low <= high or low == math.inf:
        raise ParnasError(f"The band of costs from {low} to {high} is empty; give the lower end first.")
    blocks = [tuple(dict.fromkeys(block)) for block in spaces]
    if not blocks or not all(blocks):
        raise ParnasError("A block has no candidates, or there is no block; give every block at least one candidate.")
    rng = random.Random(seed)
    strings = _Strings(blocks, costs, low, high)
    for word in {(), *map(drop_identity, without)}:
        strings.remove(word)
    while strings.left():
        layers = strings.draw(rng)
        strings.remove(drop_identity(layers))
        yield layers


class _Strings:
    """The strings of a band, less those of the networks removed."""

    def __init__(self, blocks: Sequence[Sequence[str]], costs: Mapping[str, float], low: float, high: float) -> None:
        self.blocks = blocks
        self.costs, unit = exact_costs(dict.fromkeys(name for block in blocks for name in block), costs)
        dearest = sum(max(self.costs[name] for name in block) for block in blocks)
        self.low = math.ceil(Fraction(low) * (1 - TOLERANCE) * unit) if low > 0 else 0
        self.high = dearest if high == math.inf else math.floor(Fraction(high) * (1 + TOLERANCE) * unit)
        self.removed: dict[tuple[str, ...], list[int]] = {}  # by the layers so far, then by the blocks so far
        self.middle = len(blocks) // 2
        self.tails = self._count_tails()
        self.heads = self._count_heads()

    def left(self, blocks: int = 0, spent: int = 0, word: tuple[str, ...] = ()) -> int:
        """How many strings begin with so many blocks that cost `spent` and, without identity, are `word`."""
        removed = self.removed.get(word)
        return self._completions(blocks, spent) - (removed[blocks] if removed else 0)

    def draw(self, rng: random.Random) -> tuple[str, ...]:
        """A string, each equally likely: the one of a random place in the order of candidates."""
        place = rng.randrange(self.left())
        string: list[str] = []
        spent, word = 0, tuple[str, ...]()
        for number, block in enumerate(self.blocks, 1):
            for name in block:
                follow = word if name == IDENTITY else (*word, name)
                strings = self.left(number, spent + self.costs[name], follow)
                if place < strings:
                    break
                place -= strings
            string.append(name)
            spent, word = spent + self.costs[name], follow
        return tuple(string)

    def remove(self, word: tuple[str, ...]) -> None:
        """Take out every string that names the network of these layers; each is to be taken out once."""
        if len(word) > len(self.blocks) or any(name not in self.costs for name in word):
            return
        identities = len(self.blocks) - len(word)
        cost = sum(self.costs[name] for name in word) + identities * self.costs.get(IDENTITY, 0)
        if not self.low <= cost <= self.high:
            return
        ways: list[int] = []  # for each t in how many ways the blocks from the t-th on spell the rest
        for length in range(len(word), -1, -1):
            longer, ways = ways, [0] * len(self.blocks) + [int(length == len(word))]
            for t, block in reversed(list(enumerate(self.blocks))):
                ways[t] = ways[t + 1] if IDENTITY in block else 0
                if length < len(word) and word[length] in block:
                    ways[t] += longer[t + 1]
            known = self.removed.setdefault(word[:length], [0] * len(ways))
            self.removed[word[:length]] = list(map(add, known, ways))

    def _completions(self, blocks: int, spent: int) -> int:
        """In how many ways the blocks after so many bring the cost from `spent` into the band."""
        if blocks < self.middle:
            return self.heads[blocks][spent]
        sums, fewer = self.tails[blocks - self.middle]
        return fewer[bisect_right(sums, self.high - spent)] - fewer[bisect_left(sums, self.low - spent)]

    def _count_tails(self) -> list[tuple[list[int], list[int]]]:
        """From the middle on: the sums of cost of the blocks to come, rising, and how many strings lie below each."""
        strings, tails = Counter({0: 1}), [([0], [0, 1])]
        for block in reversed(self.blocks[self.middle :]):
            longer: Counter[int] = Counter()
            for name in block:
                for cost, number in strings.items():
                    longer[cost + self.costs[name]] += number
            strings = longer
            sums = sorted(strings)
            tails.append((sums, list(accumulate((strings[cost] for cost in sums), initial=0))))
        return tails[::-1]

    def _count_heads(self) -> list[dict[int, int]]:
        """Before the middle: for each cost spent so far the number of strings that go on."""
        reached = [{0}]
        for block in self.blocks[: self.middle]:
            reached.append({spent + self.costs[name] for spent in reached[-1] for name in block})
        follow = {spent: self._completions(self.middle, spent) for spent in reached[-1]}
        heads = []
        for block, sums in zip(reversed(self.blocks[: self.middle]), reversed(reached[:-1]), strict=True):
            follow = {spent: sum(follow[spent + self.costs[name]] for name in block) for spent in sums}
            heads.append(follow)
        return heads[::-1]
