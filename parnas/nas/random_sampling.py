"""Random networks with a cost in a band: the baseline for a searched network of the same cost.

Strings are sampled exactly uniformly by backward counting: a candidate is drawn in proportion to the number of strings
within the band that can follow it (rejection would fail where the band is narrow). Counts are stored by cost: from the
middle of the stack on, for the sorted sums that the remaining blocks can reach; before it, for the sums reached so far.
Both tables stay small although real-valued costs rarely coincide.
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
    """Yield strings of different networks with a cost in [low, high], until there are no more.

    Every string in the band that is of no network drawn before is equally likely to be the next. Strings that differ
    only in the positions of identity are one network; identity alone is none.

    Args:
        spaces: the candidates of each block.
        costs: for each layer name, 0 or more.
        low: lower end of the band, in the unit of the costs; a relative tolerance of 1e-9 applies to both ends.
        high: upper end of the band.
        seed: equal seeds give equal networks.
        without: networks to leave out.

    Raises:
        ParnasError: the band is empty, a block has no candidates, or a layer has no cost.
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
    """The strings of a band, without those of removed networks."""

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
        """Count the strings not yet removed whose first `blocks` blocks cost `spent` and have the layers `word`."""
        removed = self.removed.get(word)
        return self._completions(blocks, spent) - (removed[blocks] if removed else 0)

    def draw(self, rng: random.Random) -> tuple[str, ...]:
        """Return a uniformly random string: the one at a random place in lexicographic order of the candidates."""
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
        """Remove every string of a network; call it once per network."""
        if len(word) > len(self.blocks) or any(name not in self.costs for name in word):
            return
        identities = len(self.blocks) - len(word)
        cost = sum(self.costs[name] for name in word) + identities * self.costs.get(IDENTITY, 0)
        if not self.low <= cost <= self.high:
            return
        spellings: list[int] = []  # for each t the number of ways in which the blocks from the t-th on spell the rest
        for length in range(len(word), -1, -1):
            longer, spellings = spellings, [0] * len(self.blocks) + [int(length == len(word))]
            for t, block in reversed(list(enumerate(self.blocks))):
                spellings[t] = spellings[t + 1] if IDENTITY in block else 0
                if length < len(word) and word[length] in block:
                    spellings[t] += longer[t + 1]
            removed = self.removed.setdefault(word[:length], [0] * len(spellings))
            self.removed[word[:length]] = list(map(add, removed, spellings))

    def _completions(self, blocks: int, spent: int) -> int:
        """Return the number of ways in which the remaining blocks bring the cost from `spent` into the band."""
        if blocks < self.middle:
            return self.heads[blocks][spent]
        sums, fewer = self.tails[blocks - self.middle]
        return fewer[bisect_right(sums, self.high - spent)] - fewer[bisect_left(sums, self.low - spent)]

    def _count_tails(self) -> list[tuple[list[int], list[int]]]:
        """Return, from block `middle` on, the sorted costs of the remaining blocks and how many strings cost less."""
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
        """Return, for each number of leading blocks below `middle`, the completions by their cost so far."""
        reached = [{0}]
        for block in self.blocks[: self.middle]:
            reached.append({spent + self.costs[name] for spent in reached[-1] for name in block})
        follow = {spent: self._completions(self.middle, spent) for spent in reached[-1]}
        heads = []
        for block, sums in zip(reversed(self.blocks[: self.middle]), reversed(reached[:-1]), strict=True):
            follow = {spent: sum(follow[spent + self.costs[name]] for name in block) for spent in sums}
            heads.append(follow)
        return heads[::-1]
