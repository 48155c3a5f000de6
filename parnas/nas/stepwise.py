"""Reach a small budget in steps, with the layers scored again in the network of each step.

The scores of a search in a trained network are changes of the loss with one layer replaced and all others the parent's.
They add up while few layers are replaced, but not where a small budget replaces most of them. So the budget is reached
in steps: from the network within a larger budget, each layer is replaced alone, and the changes of its loss choose the
network within the next budget, as progressive pruning measures importance again after each round (Molchanov et al.
2017, arXiv 1611.06440, section 2).
"""

from collections.abc import Callable, Mapping, Sequence

from parnas.nas.budget import Budget
from parnas.nas.knapsack import probabilities

_STEPS = 3


def reach_in_steps(
    pi: Sequence[Mapping[str, float]],
    budget: Budget,
    loss: Callable[[tuple[str, ...]], float],
    count: int = 1,
) -> list[tuple[str, ...]]:
    """Return up to `count` networks within a budget, best first by the scores in the network of the step before.

    The first step starts from the most probable network of all, the parent. The result is empty if the parent is within
    all cost targets.

    Args:
        pi: for each block the probability of each candidate, by name.
        budget: the constraints; all its cost targets are reached in equal steps.
        loss: returns the held-out loss of a network, nats per token.
        count: number of networks.

    Raises:
        ParnasError: no network is within the budget.
    """
    parent = Budget().most_probable(pi)[0].layers
    if budget.costs is None or budget.target is None:
        return []
    targets = [(budget.costs, budget.target), *budget.further]
    shares = [costs.share(parent) for costs, _ in targets]
    if all(share <= target for share, (_, target) in zip(shares, targets, strict=True)):
        return []
    for step in range(1, _STEPS):
        first, *others = [
            max(target, share - (share - target) * step / _STEPS)
            for share, (_, target) in zip(shares, targets, strict=True)
        ]
        further = [(costs, share) for (costs, _), share in zip(budget.further, others, strict=True)]
        larger = budget._replace(target=first, further=further, floor=0.0)
        pi = score_in(larger.most_probable(pi)[0].layers, pi, loss)
    return [each.layers for each in budget.most_probable(pi, count)]


def score_in(
    network: tuple[str, ...], pi: Sequence[Mapping[str, float]], loss: Callable[[tuple[str, ...]], float]
) -> list[dict[str, float]]:
    """Return probabilities in proportion to exp(-loss) of `network` with one layer replaced, for each block by name.

    Candidates that have no probability in `pi` are left out.
    """
    result = []
    for block, row in enumerate(pi):
        names = [name for name, chance in row.items() if chance > 0]
        result.append(probabilities({name: loss((*network[:block], name, *network[block + 1 :])) for name in names}))
    return result
