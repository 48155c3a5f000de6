"""The k most probable networks within a cost budget, computed exactly.

The problem. Choose one candidate per block to maximise the sum of log pi, with the sum of costs at most the budget and
at most so many blocks of some layers: a multiple-choice knapsack (Kellerer, Pferschy & Pisinger 2004, chapter 11).

The algorithm. A *label* is a choice for the first t blocks: its loss (minus log pi), cost and limited counts.

1. Extend every label by every candidate of the next block, if the cheapest completion still fits.
2. Drop labels that cannot lead to one of the k best networks (below).
3. After the last block, the k best labels are the result.

Costs are real numbers, and rounding them to a grid would make the result approximate. So there is no table indexed by
cost; what keeps the number of labels small is step 2:

Dominance. A label is dropped if k labels of other networks rank before it and use no more of any resource that can
still run out: any completion of it completes them too, to k different networks that rank before. (The label of identity
alone does not count among the k, since it may end without a layer.) Of labels that differ only in the positions of
identity, the best is kept: cost and counts are equal, so its completions are the same networks and rank first.

Bound. A Lagrangian relaxation gives every label a lower bound on the loss of its completions; labels whose bound is
worse than k known networks are dropped (`_Knapsack.solve`).

Ranking: higher probability, then lower cost, then the order in which the first differing block lists its candidates.
Probabilities and costs are added as integers that represent the given floats exactly, so that no order of summation
makes or breaks a tie.
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

__all__ = ["TOLERANCE", "LayerString", "is_limited"]

TOLERANCE = Fraction(1, 10**9)  # relative: a budget computed as a sum of floats may differ from the exact sum
_HEURISTIC_WIDTH = 20  # labels per block and network in the heuristic search that bounds the exact one


@dataclass(frozen=True)
class LayerString:
    """An architecture as one layer per block, with its log probability and cost."""

    layers: tuple[str, ...]
    log_probability: float  # nats, summed over the blocks, identity included
    cost: float  # in the unit of the given costs, identity included


def most_probable(
    pi: Sequence[Mapping[str, float]],
    costs: Mapping[str, float],
    budget: float = math.inf,
    limits: Mapping[str, int] | None = None,
    k: int = 1,
) -> list[LayerString]:
    """Return the k most probable different networks within `budget`, best first; fewer where fewer exist.

    Architectures that differ only in the positions of identity are one network, represented by the most probable of
    them; identity alone is no network. Ties are broken as the module describes.

    Args:
        pi: for each block the probability of each candidate; probability 0 makes it unavailable.
        costs: cost of each layer by name, 0 or more, in any unit.
        budget: largest sum of costs, in the same unit; a relative excess of 1e-9 is allowed.
        limits: the largest number of blocks with a layer, by name; a single letter covers its variants (`s` covers
            `s:heads=2`).
        k: number of networks.

    Raises:
        OverBudget: no network fits the budget.
        ParnasError: no network keeps the limits, or an argument is not valid.
    """
    # 1. Check the arguments.
    blocks = [{name: chance for name, chance in block.items() if chance > 0} for block in pi]
    for number, block in enumerate(blocks, 1):
        if not block:
            raise ParnasError(f"Block {number} has no candidate with a probability above 0; give it at least one.")
    if all(set(block) == {IDENTITY} for block in blocks):
        raise ParnasError(f"Every block offers {IDENTITY!r} (identity) alone, so there is no network to choose.")
    limits = limits or {}
    _check_limits(limits, sorted({name for block in pi for name in block}))
    # 2. Turn costs and log probabilities into exact integers.
    cost_of, unit = exact_costs(dict.fromkeys(name for block in blocks for name in block), costs)
    chances = list(dict.fromkeys(chance for block in blocks for chance in block.values()))
    logs, nat = _integers([math.log(chance) for chance in chances])
    loss_of = {chance: -log for chance, log in zip(chances, logs, strict=True)}
    losses = [{name: loss_of[chance] for name, chance in block.items()} for block in blocks]
    most = None if budget == math.inf else math.floor(Fraction(max(budget, -1)) * (1 + TOLERANCE) * unit)
    # 3. Solve.
    if labels := _make_knapsack(losses, cost_of, most, limits).solve(k):
        names = [list(block) for block in blocks]
        return [
            LayerString(tuple(map(getitem, names, label.order)), -label.loss / nat, label.cost / unit)
            for label in labels
        ]
    # 4. Nothing fits: find the cheapest network, by the same algorithm with costs as losses, for the message.
    by_cost = [{name: cost_of[name] for name in block} for block in blocks]
    cheapest = _make_knapsack(by_cost, cost_of, None, limits).solve(1)
    if not cheapest:
        raise ParnasError(f"No network of these candidates keeps to the limits {dict(limits)}; raise a limit.")
    within = f" within the limits {dict(limits)}" if limits else ""
    cost = cheapest[0].cost / unit
    raise OverBudget(
        f"No network fits the budget of {budget}: the cheapest{within} costs {cost}. Raise it to that at least.", cost
    )


def is_limited(name: str, key: str) -> bool:
    """Return whether the limit of `key` counts the layer `name`: `key` itself or, if it is a letter, its variants."""
    return name == key or (len(key) == 1 and name.partition(":")[0] == key)


def exact_costs(names: Iterable[str], costs: Mapping[str, float]) -> tuple[dict[str, int], int]:
    """Return the costs of `names` as integers of a common unit, and how many of these units are 1; nothing is rounded.

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


def _check_limits(limits: Mapping[str, int], names: Sequence[str]) -> None:
    for key, limit in limits.items():
        if limit < 0:
            raise ParnasError(f"The limit of {key!r} is {limit}; give a number of blocks, 0 or more.")
        if not any(is_limited(name, key) for name in names):
            raise ParnasError(f"The limit of {key!r} limits nothing: the candidates are {', '.join(names)}. Remove it.")


def _integers(values: Sequence[float]) -> tuple[list[int], int]:
    """Return floats as integers of a common unit: value = integer / unit, without rounding."""
    # Every float is a fraction of a power of two, so the largest denominator is a common one.
    ratios = [Fraction(float(value)) for value in values]
    unit = math.lcm(*(ratio.denominator for ratio in ratios))
    return [int(ratio * unit) for ratio in ratios], unit


class _Item(NamedTuple):
    """A candidate of a block."""

    name: str
    loss: int  # minus log pi
    uses: tuple[int, ...]  # of each resource: the cost, then 0 or 1 for each limit


class _Label(NamedTuple):
    """A choice for the first blocks. Tuples compare field by field: the order of labels is the ranking of networks."""

    loss: int  # minus log pi
    cost: int  # the first of `uses`
    order: tuple[int, ...]  # for each block the index of its candidate
    uses: tuple[int, ...]  # of each resource so far
    word: tuple[str, ...]  # the layers without identity: the network


def _make_knapsack(
    losses: Sequence[Mapping[str, int]], costs: Mapping[str, int], budget: int | None, limits: Mapping[str, int]
) -> "_Knapsack":
    """Return the problem whose resources are the cost, at most `budget`, and the counts of `limits`."""
    uses = {name: (cost, *(int(is_limited(name, key)) for key in limits)) for name, cost in costs.items()}
    blocks = [[_Item(name, loss, uses[name]) for name, loss in block.items()] for block in losses]
    dearest = sum(max(item.uses[0] for item in block) for block in blocks)
    return _Knapsack(blocks, (dearest if budget is None else budget, *limits.values()))


class _Knapsack:
    """One item of each block, minimal loss, and at most `limits[r]` of each resource r."""

    def __init__(self, blocks: list[list[_Item]], limits: tuple[int, ...]) -> None:
        self.blocks, self.limits = blocks, limits
        # The least and the most that the blocks from the t-th on use of each resource, [blocks + 1][resources].
        self.least = _uses_from(blocks, min)
        self.most = _uses_from(blocks, max)
        # Prices are integers in units of 1 / scale, fine enough for a price per unit of cost.
        self.scale = 1 << (20 + max(x.uses[0] for block in blocks for x in block).bit_length())
        self.prices = [0] * len(limits)

    def solve(self, k: int) -> list[_Label]:
        """Return the k best labels of different networks, best first.

        The Lagrangian bound. Put a price on each resource, and let every block pay for its use: the blocks then
        minimise loss + prices · uses separately, which is trivial. Any solution within the limits has

            loss >= loss so far + prices · uses so far + sum of the remaining blocks' minima - prices · limits,

        because prices · (uses - limits) <= 0. If k networks with a loss of at most `ceiling` are known, every label
        with a bound above that can be dropped: this keeps deep networks fast.
        """
        if any(least > limit for least, limit in zip(self.least[0], self.limits, strict=True)):
            return []
        # 1. Find prices that make the bound tight. 2. Find k good networks, by a search that keeps few labels.
        # 3. Search exactly, with their worst loss as the ceiling.
        self._set_prices()
        heuristic = self._sweep(k, width=_HEURISTIC_WIDTH * k)
        return self._sweep(k, ceiling=heuristic[-1].loss) if len(heuristic) == k else self._sweep(k)

    def _sweep(self, k: int, width: int | None = None, ceiling: int | None = None) -> list[_Label]:
        """Extend the labels block by block and thin them.

        Args:
            k: number of networks.
            width: keep at most this many labels (the heuristic search).
            ceiling: a loss that k known networks do not exceed.
        """
        labels = [_Label(0, 0, (), (0,) * len(self.limits), ())]
        bounds = _sums_from([min(map(self._priced, block)) for block in self.blocks])
        for t in range(len(self.blocks)):
            extended = self._extended(labels, t)
            if ceiling is not None:
                # The bound from `solve`, with everything that is the same for all labels on the other side.
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
                    word = label.word if item.name == IDENTITY else (*label.word, item.name)
                    yield _Label(label.loss + item.loss, uses[0], (*label.order, number), uses, word)

    def _undominated(self, ranked: list[_Label], t: int, k: int) -> list[_Label]:
        """Return the labels before block t that are not dominated (see the module's docstring), given them best first.

        Because they come best first, a label can only be dominated by labels before it: count those that use no more.
        """
        # A resource of which the remaining blocks cannot use up what is left is as good as unused: raise every use to
        # the level from which on it matters, so that more labels count as equal.
        enough = [limit - most for limit, most in zip(self.limits, self.most[t], strict=True)]
        words: set[tuple[str, ...]] = set()
        lowest: dict[tuple[int, ...], list[int]] = {}  # by counts: the k lowest costs of labels so far, sorted
        undominated = []
        for label in ranked:
            if label.word in words:  # the same network with identity elsewhere, and better
                continue
            words.add(label.word)
            cost, *counts = map(max, label.uses, enough)
            dominating = sum(
                bisect_right(other_costs, cost)  # the number of other costs up to `cost`
                for other_counts, other_costs in lowest.items()
                if all(map(le, other_counts, counts))
            )
            if dominating >= k:
                continue
            undominated.append(label)
            if label.word:
                group = lowest.setdefault(tuple(counts), [])
                insort(group, cost)
                del group[k:]
        return undominated

    def _priced(self, part: _Item | _Label) -> int:
        """Return loss plus prices · uses, in units of 1 / `scale` of the loss."""
        paid: int = sum(map(mul, self.prices, part.uses))
        return part.loss * self.scale + paid

    def _set_prices(self) -> None:
        """Set prices that approximately maximise the Lagrangian bound; any prices of 0 or more give a valid one.

        Coordinate ascent: one pass is exact for a single resource, three are close for several.
        """
        for _ in range(1 if len(self.limits) == 1 else 3):
            for resource, limit in enumerate(self.limits):
                # The use of a resource falls as its price rises. The best price is the lowest at which the blocks keep
                # to the limit: double it until they do, then bisect.
                low, high = 0, 0
                while self._use(resource, high) > limit:
                    low, high = high, max(1, 2 * high)
                while high - low > max(1, high >> 12):
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._use(resource, middle) <= limit else (middle, high)
                self.prices[resource] = high

    def _use(self, resource: int, price: int) -> int:
        """Return the use of a resource at a price, with each block's item of least loss plus prices · uses."""
        self.prices[resource] = price
        return sum(min((self._priced(item), item.uses[resource]) for item in block)[1] for block in self.blocks)


def _uses_from(blocks: list[list[_Item]], extreme: Callable[[Iterable[int]], int]) -> list[tuple[int, ...]]:
    resources = [[[item.uses[r] for item in block] for block in blocks] for r in range(len(blocks[0][0].uses))]
    return list(zip(*(_sums_from([extreme(uses) for uses in by_block]) for by_block in resources), strict=True))


def _sums_from(values: Sequence[int]) -> list[int]:
    """Return for each t the sum of the values from the t-th on; 0 after the last."""
    return list(accumulate(reversed(values), initial=0))[::-1]
