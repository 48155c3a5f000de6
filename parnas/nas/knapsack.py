"""The k most probable networks within a cost budget, computed exactly.

Choosing a candidate for each block is a multiple-choice knapsack (Kellerer, Pferschy & Pisinger 2004, chapter 11): one
item of each class, maximal sum of log pi, total cost within the budget. It is solved block by block over labels. A
label is the beginning of a layer string with its log probability, cost and limited counts. Costs are real numbers,
which no grid rounds; so labels form no table, but are thinned by dominance.

Dominance. A label is dropped only if k labels of other networks rank before it and use no more of any resource that can
still run out: any completion of it completes them too, to k different networks that rank before. (The beginning of
identity alone does not count among the k, since it may end without a layer.) Of labels that differ only in the
positions of identity, the first in the ranking is kept: cost and counts are equal, so its completions are the same
networks and rank first.

Ranking: higher probability, then lower cost, then the order in which the first differing block lists its candidates.
Probabilities and costs are compared as exact sums of the given floats, so no order of summation makes or breaks a tie.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import nsmallest
from itertools import accumulate
from operator import add, getitem, le, mul
from typing import NamedTuple

from parnas.architecture import IDENTITY
from parnas.errors import OverBudget, ParnasError

TOLERANCE = Fraction(1, 10**9)  # relative: a budget computed as a sum of floats may differ from the exact sum
HEURISTIC_WIDTH = 20  # labels per block and network in the heuristic search that bounds the exact one


@dataclass(frozen=True)
class LayerString:
    """A layer for each block, with the string's log probability and cost."""

    layers: tuple[str, ...]
    log_probability: float  # nats, summed over the blocks, identity included
    cost: float  # in the unit of the given costs, identity included


def most_probable(
    pi: Sequence[Mapping[str, float]],
    costs: Mapping[str, float],
    budget: float = math.inf,
    limits: Mapping[str, int] | None = None,
    k: int = 1,
    identity: str = IDENTITY,
) -> list[LayerString]:
    """Return the k most probable different networks within `budget`, best first; fewer where fewer exist.

    Strings that differ only in the positions of `identity` are one network, represented by its most probable string;
    identity alone is no network. Ties are broken as the module describes.

    Args:
        pi: for each block the probability of each candidate; probability 0 makes it unavailable.
        costs: for each layer name, 0 or more, in any unit.
        budget: in the same unit; a relative excess of 1e-9 is allowed.
        limits: the largest number of blocks with a layer, by name; a single letter covers its variants (`s` covers
            `s:heads=2`).
        k: number of networks.
        identity: name of the layer that does nothing.

    Raises:
        OverBudget: no network fits the budget.
        ParnasError: no network keeps the limits, or an argument is not valid.
    """
    if k < 1:
        raise ParnasError(f"k is {k}; ask for at least 1 network.")
    if math.isnan(budget):
        raise ParnasError("The budget is not a number; give a cost, or inf for no budget.")
    blocks = [_available(block, number) for number, block in enumerate(pi, 1)]
    if not blocks:
        raise ParnasError("pi has no blocks; give the probabilities of at least one.")
    if all(set(block) == {identity} for block in blocks):
        raise ParnasError(f"Every block offers {identity!r} (identity) alone, so there is no network to choose.")
    limits = dict(limits or {})
    _check_limits(limits, {name for block in pi for name in block})
    cost_of, unit = exact_costs(dict.fromkeys(name for block in blocks for name in block), costs)
    chances = list(dict.fromkeys(chance for block in blocks for chance in block.values()))
    logs, nat = _integers([math.log(chance) for chance in chances])
    loss_of = {chance: -log for chance, log in zip(chances, logs, strict=True)}
    losses = [{name: loss_of[chance] for name, chance in block.items()} for block in blocks]
    most = None if budget == math.inf else math.floor(Fraction(max(budget, -1)) * (1 + TOLERANCE) * unit)
    if labels := _knapsack(losses, cost_of, most, limits, identity).solve(k):
        names = [list(block) for block in blocks]
        return [
            LayerString(tuple(map(getitem, names, label.order)), -label.loss / nat, label.cost / unit)
            for label in labels
        ]
    by_cost = [{name: cost_of[name] for name in block} for block in blocks]
    cheapest = _knapsack(by_cost, cost_of, None, limits, identity).solve(1)
    if not cheapest:
        raise ParnasError(
            f"No network keeps to the limits {limits} with the candidates of these blocks; raise a limit."
        )
    within = f" within the limits {limits}" if limits else ""
    cost = cheapest[0].cost / unit
    raise OverBudget(
        f"No network fits the budget of {budget}: the cheapest{within} costs {cost}. Raise it to that at least.", cost
    )


def is_limited(name: str, key: str) -> bool:
    """Return whether a limit of `key` counts the layer `name`: itself or, for a single letter, its variants."""
    return name == key or (len(key) == 1 and name.partition(":")[0] == key)


def exact_costs(names: Iterable[str], costs: Mapping[str, float]) -> tuple[dict[str, int], int]:
    """Return the costs of `names` as integers without rounding, and the integer that equals 1.

    Raises:
        ParnasError: a cost is missing, negative or not finite.
    """
    names = list(names)
    if missing := [name for name in names if name not in costs]:
        raise ParnasError(f"No cost is given for {', '.join(map(repr, missing))}; give each layer a cost of 0 or more.")
    for name in names:
        if not 0 <= costs[name] < math.inf:
            raise ParnasError(f"The cost of {name!r} is {costs[name]}; give a finite number of 0 or more.")
    integers, unit = _integers([costs[name] for name in names])
    return dict(zip(names, integers, strict=True)), unit


def _available(block: Mapping[str, float], number: int) -> dict[str, float]:
    for name, chance in block.items():
        if not 0 <= chance <= 1 + 1e-6:  # a softmax of single precision may lie just above 1
            raise ParnasError(f"Block {number} gives {name!r} the probability {chance}; give numbers from 0 to 1.")
    available = {name: chance for name, chance in block.items() if chance > 0}
    if not available:
        raise ParnasError(f"Block {number} has no candidate with a probability above 0; give it at least one.")
    return available


def _check_limits(limits: Mapping[str, int], names: Iterable[str]) -> None:
    names = sorted(names)
    for key, limit in limits.items():
        if limit < 0:
            raise ParnasError(f"The limit of {key!r} is {limit}; give a number of blocks, 0 or more.")
        if not any(is_limited(name, key) for name in names):
            raise ParnasError(f"The limit of {key!r} limits nothing: the candidates are {', '.join(names)}. Remove it.")


def _integers(values: Sequence[float]) -> tuple[list[int], int]:
    """Return floats as integers of a common unit: value = integer / unit, without rounding."""
    ratios = [Fraction(float(value)) for value in values]
    unit = math.lcm(*(ratio.denominator for ratio in ratios))
    return [int(ratio * unit) for ratio in ratios], unit


class _Item(NamedTuple):
    """A candidate of a block."""

    name: str
    loss: int  # minus log pi
    uses: tuple[int, ...]  # of each resource: first the cost, then what the limits count


class _Label(NamedTuple):
    """The beginning of a layer string; labels compare as networks rank."""

    loss: int
    cost: int  # the first of `uses`
    order: tuple[int, ...]  # of each block the number of its candidate
    uses: tuple[int, ...]
    word: tuple[str, ...]  # the layers without identity


def _knapsack(
    losses: Sequence[Mapping[str, int]],
    costs: Mapping[str, int],
    budget: int | None,
    limits: Mapping[str, int],
    identity: str,
) -> "_Knapsack":
    """Return the problem whose resources are the cost, at most `budget`, and what `limits` counts."""
    uses = {name: (cost, *(int(is_limited(name, key)) for key in limits)) for name, cost in costs.items()}
    blocks = [[_Item(name, loss, uses[name]) for name, loss in block.items()] for block in losses]
    dearest = sum(max(item.uses[0] for item in block) for block in blocks)
    return _Knapsack(blocks, (dearest if budget is None else budget, *limits.values()), identity)


class _Knapsack:
    """One item of each block, minimal loss, and at most `limits[r]` of each resource r."""

    def __init__(self, blocks: list[list[_Item]], limits: tuple[int, ...], identity: str) -> None:
        self.blocks, self.limits, self.identity = blocks, limits, identity
        # The least and the most that the blocks from the t-th on use of each resource.
        self.least = _uses_from(blocks, min)
        self.most = _uses_from(blocks, max)
        self.scale = 1 << (20 + max(x.uses[0] for block in blocks for x in block).bit_length())
        self.prices = [0] * len(limits)

    def solve(self, k: int) -> list[_Label]:
        """Return the k best labels of different networks, best first.

        A Lagrangian bound keeps deep networks fast: with a price on each resource, every block minimises separately. A
        label whose loss plus the sum of the remaining minima exceeds the k-th best of a narrow heuristic search cannot
        be among the k best.
        """
        if any(least > limit for least, limit in zip(self.least[0], self.limits, strict=True)):
            return []
        self._set_prices()
        heuristic = self._sweep(k, width=HEURISTIC_WIDTH * k)
        return self._sweep(k, ceiling=heuristic[-1].loss) if len(heuristic) == k else self._sweep(k)

    def _sweep(self, k: int, width: int | None = None, ceiling: int | None = None) -> list[_Label]:
        """Extend the labels block by block and thin them.

        Args:
            k: number of networks.
            width: keep at most this many labels (the heuristic search).
            ceiling: a loss that k networks are known to reach.
        """
        labels = [_Label(0, 0, (), (0,) * len(self.limits), ())]
        bounds = _sums_from([min(map(self._priced, block)) for block in self.blocks])
        for t in range(len(self.blocks)):
            extended = self._extended(labels, t)
            if ceiling is not None:
                most = ceiling * self.scale + sum(map(mul, self.prices, self.limits)) - bounds[t + 1]
                extended = (label for label in extended if self._priced(label) <= most)
            labels = self._undominated(sorted(extended), t + 1, k)
            if width is not None and len(labels) > width:
                labels = nsmallest(width, labels, key=self._priced)
        return sorted(label for label in labels if label.word)[:k]

    def _extended(self, labels: list[_Label], t: int) -> Iterator[_Label]:
        """Yield every label with every candidate of block t after which the cheapest completion still fits."""
        left = [limit - least for limit, least in zip(self.limits, self.least[t + 1], strict=True)]
        for label in labels:
            for number, item in enumerate(self.blocks[t]):
                uses = tuple(map(add, label.uses, item.uses))
                if all(map(le, uses, left)):
                    word = label.word if item.name == self.identity else (*label.word, item.name)
                    yield _Label(label.loss + item.loss, uses[0], (*label.order, number), uses, word)

    def _undominated(self, ranked: list[_Label], t: int, k: int) -> list[_Label]:
        """Return the labels before block t that dominance does not exclude (see the module's docstring).

        Resources that the remaining blocks cannot exhaust do not count as used. Labels are grouped by their counts;
        each group stores its k lowest costs, since more never matter.
        """
        enough = [limit - most for limit, most in zip(self.limits, self.most[t], strict=True)]
        words: set[tuple[str, ...]] = set()
        lowest: dict[tuple[int, ...], list[int]] = {}
        undominated = []
        for label in ranked:
            if label.word in words:
                continue
            words.add(label.word)
            cost, *counts = map(max, label.uses, enough)
            better = 0
            for others, their_costs in lowest.items():
                if all(map(le, others, counts)):
                    better += bisect_right(their_costs, cost)
            if better >= k:
                continue
            undominated.append(label)
            if label.word:
                group = lowest.setdefault(tuple(counts), [])
                insort(group, cost)
                del group[k:]
        return undominated

    def _priced(self, part: _Item | _Label) -> int:
        """Return loss plus prices times uses, in units of 1 / scale of the loss's unit."""
        paid: int = sum(map(mul, self.prices, part.uses))
        return part.loss * self.scale + paid

    def _set_prices(self) -> None:
        """Set prices that approximately maximise the Lagrangian bound; any price ≥ 0 gives a valid bound."""
        for _ in range(1 if len(self.limits) == 1 else 3):
            for resource, limit in enumerate(self.limits):
                # Use falls as its price rises; the best price is the lowest at which the limit is kept to.
                low, high = 0, 0
                while self._use(resource, high) > limit:
                    low, high = high, max(1, 2 * high)
                while high - low > max(1, high >> 12):
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._use(resource, middle) <= limit else (middle, high)
                self.prices[resource] = high

    def _use(self, resource: int, price: int) -> int:
        """Return the use of a resource at a price, when each block takes its cheapest item by all prices."""
        self.prices[resource] = price
        return sum(min((self._priced(item), item.uses[resource]) for item in block)[1] for block in self.blocks)


def _uses_from(blocks: list[list[_Item]], extreme: Callable[[Iterable[int]], int]) -> list[tuple[int, ...]]:
    resources = [[[item.uses[r] for item in block] for block in blocks] for r in range(len(blocks[0][0].uses))]
    return list(zip(*(_sums_from([extreme(uses) for uses in by_block]) for by_block in resources), strict=True))


def _sums_from(values: Sequence[int]) -> list[int]:
    """Return for each t the sum of the values from the t-th on; 0 after the last."""
    return list(accumulate(reversed(values), initial=0))[::-1]
