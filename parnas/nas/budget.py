"""The constraints on a derived architecture: cost targets, and limits of the number of blocks with a layer."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parnas.errors import OverBudget, ParnasError
from parnas.nas.cost import Costs
from parnas.nas.knapsack import TOLERANCE, LayerString, is_limited, most_probable, with_tolerance

__all__ = ["Budget"]


class Budget(NamedTuple):
    """The constraints; the default is none."""

    costs: Costs | None = None  # None: no cost target
    target: float | None = None  # largest cost, as a share of the reference's; None: no cost target
    limits: Mapping[str, int] = {}  # for each layer name, the largest number of blocks that may have this layer
    further: Sequence[tuple[Costs, float]] = ()  # further costs, each with its target
    least: Mapping[str, int] = {}  # for each layer name, the least number of blocks that must have this layer
    floor: float = 0.0  # least cost, as a share of the reference's

    def most_probable(self, pi: Sequence[Mapping[str, float]], count: int = 1) -> list[LayerString]:
        """Return the `count` most probable architectures within the budget, best first; fewer if no more exist.

        `pi` holds for each block the probability of each candidate, by name.

        Raises:
            OverBudget: no architecture is within the cost target.
            ParnasError: no architecture keeps to the limits, to the further targets or to the floor.
        """
        costs, target = self.costs, self.target
        further = [(each.per_layer, most * each.reference) for each, most in self.further]
        if costs is not None and self.floor:
            # A least sum of costs is a largest sum of what each layer costs less than the dearest.
            dearest = max(costs.per_layer[name] for block in pi for name in block)
            saved = {name: dearest - cost for name, cost in costs.per_layer.items() if cost <= dearest}
            further.append((saved, len(pi) * dearest - self.floor * costs.reference))
        # A target is a share of the reference's cost; the knapsack's budget is in the metric's own unit.
        per_layer = dict.fromkeys((name for block in pi for name in block), 0.0) if costs is None else costs.per_layer
        budget = math.inf if target is None or costs is None else target * costs.reference
        try:
            return most_probable(pi, per_layer, budget, self.limits, count, further, self.least)
        except OverBudget as error:
            assert costs is not None
            within = " within the other limits" if self.limits or further else ""
            within += "".join(f" with at least {number} of {key}" for key, number in self.least.items())
            # Rounded up, so that the target given in the message is met.
            least = math.ceil(1000 * error.cheapest / costs.reference) / 1000
            without = ", or search.least_attention to 0" if self.least else ""
            raise OverBudget(
                f"No network{within} costs at most {target:g} of {costs.reference_name}; set the cost target, "
                f"search.cost.target or cost_target (--cost-target, --within), to {least:g} or more{without}.",
                error.cheapest,
            ) from error
        except ParnasError as error:
            if not self.further:
                raise
            targets = ", ".join(f"{each.metric}={most:g}" for each, most in self.further)
            raise ParnasError(f"{error} The further targets are {targets} (--within).") from error

    def spend(self, share: float, pi: Sequence[Mapping[str, float]]) -> "Budget":
        """Return the budget with a least cost, as a share of the target; this budget if no network has such a cost.

        `pi` holds for each block the probability of each candidate, by name.
        """
        if self.costs is None or self.target is None or not share or self.target == math.inf:
            return self
        budget = self._replace(floor=share * self.target)
        try:
            budget.most_probable(pi)
        except ParnasError:
            return self
        return budget

    def allows(self, layers: Sequence[str]) -> bool:
        """Return whether an architecture, one layer name per block, is within the budget."""
        targets = [*self.further, (self.costs, math.inf if self.target is None else self.target)]
        for costs, target in targets:
            if costs is not None and costs.share(layers) > with_tolerance(target):  # as in the knapsack
                return False

        if self.costs is not None and self.costs.share(layers) < self.floor * (1 - float(TOLERANCE)):
            return False

        def count(key: str) -> int:
            return sum(is_limited(name, key) for name in layers)

        return all(count(key) <= most for key, most in self.limits.items()) and all(
            count(key) >= number for key, number in self.least.items()
        )

    def describe(self, layers: tuple[str, ...], pi: Sequence[Mapping[str, float]]) -> LayerString:
        """Return an architecture with its log probability by `pi` and its cost; without costs, the cost is 0."""
        log_probability = sum(math.log(block[name]) for name, block in zip(layers, pi, strict=True))
        return LayerString(layers, log_probability, 0.0 if self.costs is None else self.costs.cost(layers))
