"""The k most probable networks within a cost budget, computed exactly.

The problem. Choose one candidate per block to maximise the sum of log pi. The sum of costs must be at most the budget,
sums of further costs at most their budgets, and the number of blocks with a layer at most the limit of this layer, if
it has one. This is a multiple-choice knapsack (Kellerer, Pferschy & Pisinger 2004, chapter 11). The costs and the
limited numbers of blocks are called resources. A least number of blocks with a layer is a limit of the others.

The algorithm. A *label* is a choice for the first t blocks, with its loss (minus log pi) and its use of each resource.

1. Extend every label by every candidate of the next block, if the cheapest completion still fits.
2. Drop labels that cannot lead to one of the k best networks (below).
3. After the last block, the k best labels are the result.

Costs are real numbers, and rounding them to a grid would make the result approximate. So there is no table indexed by
cost; the number of labels stays small because of step 2, which has two rules:

Dominance. A label is dropped if k labels of other networks rank before it and use no more than it does of each resource
that can still run out: any completion of the label also completes these k, to k different networks that rank before
it. (A label of identity alone does not count among the k, since its completion may have no layer.) Of labels that
differ only in the positions of identity, the best is kept: their uses are equal, so they have the same completions.

Bound. A Lagrangian relaxation gives every label a lower bound on the loss of its completions; a label is dropped if its
bound is above the losses of k known networks (`_Knapsack.solve`).

Ranking. A network ranks before another if its probability is higher; if they are equal, if its cost is lower; if these
are equal too, if its candidate comes first in the first block in which they differ. Probabilities and costs are added
as integers that represent the given floats exactly, so that ties do not depend on the order of summation.
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

__all__ = ["is_limited", "log_weights", "probabilities", "with_tolerance"]

TOLERANCE = Fraction(1, 10**9)  # relative: a budget computed as a sum of floats may differ from the exact sum
_HEURISTIC_WIDTH = 20  # labels per block and network in the heuristic search that bounds the exact one
_MOST = 80.0  # a candidate is at most e^80 times less probable than the best, which float32 can represent


def with_tolerance(cost: float) -> float:
    """Return a cost increased by the largest rounding error that adding layer costs in another order can cause."""
    return cost * (1 + float(TOLERANCE))


def log_weights(losses: Mapping[str, float], temperature: float = 1.0) -> dict[str, float]:
    """Return -(loss - least loss) / temperature for each candidate of a block, by name, but at least -80.

    A loss that is not finite counts as the highest. So no candidate is excluded, since a small budget may need it.
    Losses and temperature are in the same unit, such as nats per token.
    """
    least = min(filter(math.isfinite, losses.values()), default=0.0)
    rises = {name: (loss - least) / temperature if math.isfinite(loss) else _MOST for name, loss in losses.items()}
    return {name: -min(rise, _MOST) for name, rise in rises.items()}


def probabilities(losses: Mapping[str, float], temperature: float = 1.0) -> dict[str, float]:
    """Return pi of a block for losses of its candidates, by name: in proportion to exp(-loss / temperature).

    So log pi is a sum of losses over the blocks, up to a factor and a constant; see `log_weights` for high losses.
    """
    weights = {name: math.exp(weight) for name, weight in log_weights(losses, temperature).items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


@dataclass(frozen=True)
class LayerString:
    """An architecture as one layer per block, with its log probability and cost."""

    layers: tuple[str, ...]
    log_probability: float  # nats, summed over the blocks, identity included
    cost: float  # sum over the blocks, identity included, in the unit of the given costs


def most_probable(
    pi: Sequence[Mapping[str, float]],
    costs: Mapping[str, float],
    budget: float = math.inf,
    limits: Mapping[str, int] | None = None,
    k: int = 1,
    further: Sequence[tuple[Mapping[str, float], float]] = (),
    least: Mapping[str, int] | None = None,
) -> list[LayerString]:
    """Return the k most probable different networks within `budget`, best first; fewer than k if no more exist.

    Architectures that differ only in the positions of identity are one network, represented by the most probable of
    them; identity in every block is not a network. Networks of equal probability rank by cost, then by the order of the
    candidates.

    Args:
        pi: for each block the probability of each candidate; a candidate of probability 0 is never chosen.
        costs: cost of each layer by name, 0 or more, in any unit.
        budget: largest sum of costs, in the unit of `costs`; a relative excess of 1e-9 is allowed.
        limits: for each layer name, the largest number of blocks that may have this layer; the limit of a single
            letter also counts its variants (`s` counts `s:heads=2`).
        k: number of networks.
        further: further costs of each layer, by name, each with its budget.
        least: for each layer name, the least number of blocks that must have this layer; counted as for `limits`.

    Raises:
        OverBudget: every network costs more than the budget.
        ParnasError: no network keeps to the limits or to the further budgets, or an argument is not valid.
    """
    # 1. Check the arguments.
    blocks = [{name: chance for name, chance in block.items() if chance > 0} for block in pi]
    for number, block in enumerate(blocks, 1):
        if not block:
            raise ParnasError(f"Block {number} has no candidate with a probability above 0; give it at least one.")
    if all(set(block) == {IDENTITY} for block in blocks):
        raise ParnasError(
            f"Every block offers {IDENTITY!r} (identity) alone, so there is no network to choose; "
            "give a block another candidate."
        )
    limits, least = limits or {}, least or {}
    _check_limits(limits, sorted({name for block in pi for name in block}))
    # 2. Turn costs and log probabilities into exact integers.
    names = list(dict.fromkeys(name for block in blocks for name in block))
    cost_of, unit = exact_costs(names, costs)
    others = [_Resource.of_costs(*exact_costs(names, each), most) for each, most in further]
    others += [_Resource({name: int(is_limited(name, key)) for name in names}, most) for key, most in limits.items()]
    # At least n blocks with a layer are at most N - n with any other.
    others += [
        _Resource({name: int(not is_limited(name, key)) for name in names}, len(blocks) - count)
        for key, count in least.items()
    ]
    chances = list(dict.fromkeys(chance for block in blocks for chance in block.values()))
    logs, nat = _integers([math.log(chance) for chance in chances])
    loss_of = {chance: -log for chance, log in zip(chances, logs, strict=True)}
    losses = [{name: loss_of[chance] for name, chance in block.items()} for block in blocks]
    # 3. Solve.
    if labels := _make_knapsack(losses, [_Resource.of_costs(cost_of, unit, budget), *others]).solve(k):
        candidates = [list(block) for block in blocks]
        return [
            LayerString(tuple(map(getitem, candidates, label.order)), -label.loss / nat, label.cost / unit)
            for label in labels
        ]
    # 4. Nothing fits: find the cheapest network, by the same algorithm with costs as losses, for the message.
    by_cost = [{name: cost_of[name] for name in block} for block in blocks]
    cheapest = _make_knapsack(by_cost, [_Resource(cost_of, None), *others]).solve(1)
    if not cheapest:
        bounds = [f"at most {count} of {key!r}" for key, count in limits.items()]
        bounds += [f"at least {count} of {key!r}" for key, count in least.items()]
        bounds += [f"{len(further)} further budget(s)"] if further else []
        raise ParnasError(f"No network of these candidates keeps to {', '.join(bounds)}; change one of them.")
    within = f" within the limits {dict(limits)}" if limits else ""
    within += "".join(f" with at least {count} of {key!r}" for key, count in least.items())
    within += f"{' and' if limits else ' within'} the further budgets" if further else ""
    cost = cheapest[0].cost / unit
    raise OverBudget(
        f"No network fits the budget of {budget}: the cheapest{within} costs {cost}. Raise the budget to that or more.",
        cost,
    )


def is_limited(name: str, key: str) -> bool:
    """Return whether the limit of `key` counts the layer `name`: the limit of `s` counts `s` and `s:heads=2`."""
    return name == key or (len(key) == 1 and name.partition(":")[0] == key)


def exact_costs(names: Iterable[str], costs: Mapping[str, float]) -> tuple[dict[str, int], int]:
    """Return the costs of `names` as integer multiples of a common unit, and the number of units in a cost of 1.0.

    The integers represent the given floats exactly.

    Raises:
        ParnasError: a cost is missing, negative or not finite.
    """
    names = list(names)
    if missing := [name for name in names if name not in costs]:
        raise ParnasError(
            f"No cost is given for {', '.join(map(repr, missing))}; give every layer a cost of 0 or more."
        )
    for name in names:
        if not 0 <= costs[name] < math.inf:
            raise ParnasError(f"The cost of {name!r} is {costs[name]}; give a finite number of 0 or more.")
    integers, unit = _integers([costs[name] for name in names])
    return dict(zip(names, integers, strict=True)), unit


def _check_limits(limits: Mapping[str, int], names: Sequence[str]) -> None:
    """Raise `ParnasError` if a limit is negative, or applies to none of the candidates `names`."""
    for key, limit in limits.items():
        if limit < 0:
            raise ParnasError(f"The limit of {key!r} is {limit}; give a number of blocks, 0 or more.")
        if not any(is_limited(name, key) for name in names):
            raise ParnasError(f"The limit of {key!r} applies to none of the candidates {', '.join(names)}; remove it.")


def _integers(values: Sequence[float]) -> tuple[list[int], int]:
    """Return an integer for each value, and one `unit`, such that each value is exactly integer / unit."""
    # Every float is a fraction of a power of two, so the largest denominator is a common one.
    ratios = [Fraction(float(value)) for value in values]
    unit = math.lcm(*(ratio.denominator for ratio in ratios))
    return [int(ratio * unit) for ratio in ratios], unit


class _Item(NamedTuple):
    """A candidate of a block: its loss, -log pi, and its use of each resource."""

    name: str
    loss: int  # minus log pi, as an exact integer
    uses: tuple[int, ...]  # the cost, the further costs, then 1 for each limit that counts this layer, else 0


class _Label(NamedTuple):
    """A choice of candidates for the first t blocks. The order of the fields makes `sorted` rank labels, best first."""

    loss: int  # sum over the blocks of minus log pi, as an exact integer
    cost: int  # the first of `uses`
    order: tuple[int, ...]  # for each block the index of the chosen candidate
    uses: tuple[int, ...]  # of each resource, summed over the blocks
    word: tuple[str, ...]  # the layers without identity: the network


class _Resource(NamedTuple):
    """The use of a resource by each layer, by name, and the most of it that a network may use; `None`: no limit."""

    use: Mapping[str, int]
    most: int | None

    @classmethod
    def of_costs(cls, costs: Mapping[str, int], unit: int, budget: float) -> "_Resource":
        """Return the resource of costs in integer multiples of 1 / `unit`, with a budget in the unit 1."""
        most = None if budget == math.inf else math.floor(Fraction(max(budget, -1)) * (1 + TOLERANCE) * unit)
        return cls(costs, most)


def _make_knapsack(losses: Sequence[Mapping[str, int]], resources: Sequence[_Resource]) -> "_Knapsack":
    """Return the knapsack problem of minimising the sum of losses within the limits of the resources.

    Args:
        losses: for each block the loss of each candidate, by name.
        resources: the cost first.
    """
    blocks = [
        [_Item(name, loss, tuple(each.use[name] for each in resources)) for name, loss in block.items()]
        for block in losses
    ]
    most = [
        sum(max(each.use[name] for name in block) for block in losses) if each.most is None else each.most
        for each in resources
    ]
    return _Knapsack(blocks, tuple(most))


class _Knapsack:
    """The problem: choose an item of each block for the least sum of losses, with at most `limits[r]` of resource r."""

    def __init__(self, blocks: list[list[_Item]], limits: tuple[int, ...]) -> None:
        self.blocks, self.limits = blocks, limits
        # The least and the most that `blocks[t:]` can use of each resource, [blocks + 1][resources].
        self.least = _uses_from(blocks, min)
        self.most = _uses_from(blocks, max)
        # Prices are integers in units of 1 / scale, fine enough for a price per unit of any resource.
        self.scale = 1 << (20 + max(use for block in blocks for x in block for use in x.uses).bit_length())
        self.prices = [0] * len(limits)

    def solve(self, k: int) -> list[_Label]:
        """Return the k best labels of different networks, best first.

        The Lagrangian bound. Give each resource a price, and minimise loss + prices · uses for each block separately.
        Then any solution within the limits that extends a label has

            loss >= label's loss + prices · label's uses + sum of the remaining blocks' minima - prices · limits,

        because prices · (uses - limits) <= 0. If k networks with a loss of at most `ceiling` are known, every label
        whose bound is above `ceiling` can be dropped. This keeps the search fast for many blocks.
        """
        if any(least > limit for least, limit in zip(self.least[0], self.limits, strict=True)):
            return []
        # 1. Find prices that make the bound tight. 2. Find k good networks, by a search that keeps few labels.
        # 3. Search exactly, with their worst loss as the ceiling.
        self._set_prices()
        heuristic = self._sweep(k, width=_HEURISTIC_WIDTH * k)
        return self._sweep(k, ceiling=heuristic[-1].loss) if len(heuristic) == k else self._sweep(k)

    def _sweep(self, k: int, width: int | None = None, ceiling: int | None = None) -> list[_Label]:
        """Extend labels block by block, dropping those that cannot win; return the k best labels of all blocks.

        Args:
            k: number of networks.
            width: largest number of labels to keep after each block, in the heuristic search; `None` for no maximum.
            ceiling: a loss that k known networks do not exceed; labels whose bound is above it are dropped. `None` if
                no such loss is known.
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
        """Yield each label extended by each candidate of block t, if some completion keeps to the limits."""
        available = [limit - least for limit, least in zip(self.limits, self.least[t + 1], strict=True)]
        for label in labels:
            for number, item in enumerate(self.blocks[t]):
                uses = tuple(map(add, label.uses, item.uses))
                if all(map(le, uses, available)):
                    word = label.word if item.name == IDENTITY else (*label.word, item.name)
                    yield _Label(label.loss + item.loss, uses[0], (*label.order, number), uses, word)

    def _undominated(self, ranked: list[_Label], t: int, k: int) -> list[_Label]:
        """Return the labels that are not dominated, given labels `ranked` for the first t blocks, best first.

        A label is dominated if k labels before it in `ranked` use no more than it does of any resource. Of several
        labels of one network, the first is kept.
        """
        # A resource of which the remaining blocks cannot use up what is left is as good as unused: raise every use to
        # the level from which on it matters, so that more labels count as equal.
        enough = [limit - most for limit, most in zip(self.limits, self.most[t], strict=True)]
        words: set[tuple[str, ...]] = set()
        lowest: dict[tuple[int, ...], list[int]] = {}  # by other uses: the k lowest costs of labels so far, sorted
        undominated = []
        for label in ranked:
            if label.word in words:  # the same network with identity elsewhere, and better
                continue
            words.add(label.word)
            cost, *others = map(max, label.uses, enough)
            dominating = sum(
                bisect_right(other_costs, cost)  # the number of other costs up to `cost`
                for uses, other_costs in lowest.items()
                if all(map(le, uses, others))
            )
            if dominating >= k:
                continue
            undominated.append(label)
            if label.word:
                group = lowest.setdefault(tuple(others), [])
                insort(group, cost)
                del group[k:]
        return undominated

    def _priced(self, part: _Item | _Label) -> int:
        """Return (loss + prices · uses) of an item or label, multiplied by `scale`, which makes it an integer."""
        paid: int = sum(map(mul, self.prices, part.uses))
        return part.loss * self.scale + paid

    def _set_prices(self) -> None:
        """Set prices that approximately maximise the Lagrangian bound, which is valid for all prices of 0 or more.

        The method is coordinate ascent: one pass is enough for one resource, and three passes come close for several.
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
        """Set the price of a resource, and return how much of the resource all blocks together then use.

        Each block chooses its item with the least loss + prices · uses.
        """
        self.prices[resource] = price
        return sum(min((self._priced(item), item.uses[resource]) for item in block)[1] for block in self.blocks)


def _uses_from(blocks: list[list[_Item]], extreme: Callable[[Iterable[int]], int]) -> list[tuple[int, ...]]:
    """Return the least or most that `blocks[t:]` can use of each resource, [blocks + 1][resources].

    `extreme` is `min` for the least, `max` for the most. Row t is for `blocks[t:]`; the last row is 0, for no blocks.
    """
    resources = [[[item.uses[r] for item in block] for block in blocks] for r in range(len(blocks[0][0].uses))]
    return list(zip(*(_sums_from([extreme(uses) for uses in by_block]) for by_block in resources), strict=True))


def _sums_from(values: Sequence[int]) -> list[int]:
    """Return for each index t the sum of `values[t:]`; the last item is 0, the empty sum."""
    return list(accumulate(reversed(values), initial=0))[::-1]
