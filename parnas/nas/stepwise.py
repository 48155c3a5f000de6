"""Reach a small budget in steps, with the layers scored again in the network of each step.

The scores of a search in a trained network are changes of the loss with one layer replaced and all others the parent's.
They add up while few layers are replaced, but not where a small budget replaces most of them. So the budget is reached
in steps: from the network within a larger budget, each layer is replaced alone, and the changes of its loss choose the
network within the next budget, as progressive pruning measures importance again after each round (Molchanov et al.
2017, arXiv 1611.06440, section 2).
"""

import math
from collections.abc import Callable, Mapping, Sequence

from parnas.nas.budget import Budget

_STEPS = 3
_MOST_NATS = 100.0  # a larger change of the loss counts as this one, as does a loss that is not finite


def reach_in_steps(
    pi: Sequence[Mapping[str, float]],
    budget: Budget,
    loss: Callable[[tuple[str, ...]], float],
    count: int = 1,
) -> list[tuple[str, ...]]:
    """Return up to `count` networks within a budget, best first by the scores in the network of the step before.

    The result is empty without a cost target below the cost of the most probable network of all, the parent.

    Args:
        pi: for each block the probability of each candidate, by name.
        budget: the constraints.
        loss: returns the held-out loss of a network, nats per token.
        count: number of networks.

    Raises:
        ParnasError: no network is within the budget.
    """
    costs, target = budget.costs, budget.target
    if costs is None or target is None:
        return []
    whole = costs.share(budget._replace(target=None, floor=0.0).most_probable(pi)[0].layers)
    if target >= whole:
        return []
    for step in range(1, _STEPS):
        larger = budget._replace(target=whole - (whole - target) * step / _STEPS, floor=0.0)
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
        losses = {name: loss((*network[:block], name, *network[block + 1 :])) for name in names}
        least = min(filter(math.isfinite, losses.values()), default=0.0)
        changes = {
            name: min(value - least, _MOST_NATS) if math.isfinite(value) else _MOST_NATS
            for name, value in losses.items()
        }
        total = sum(math.exp(-change) for change in changes.values())
        result.append({name: math.exp(-change) / total for name, change in changes.items()})
    return result
