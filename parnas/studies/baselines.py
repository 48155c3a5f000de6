"""The baselines of a derived network: interleaved and sandwich networks, and random networks of the same cost.

Costs are predicted as in the search that derived the network. `baseline_comparison.py` trains the networks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from parnas.architecture import COMPRESSIVE, IDENTITY, Architecture
from parnas.errors import ParnasError
from parnas.nas.cost import Costs, costs_of_run
from parnas.nas.derive import derive
from parnas.nas.knapsack import TOLERANCE
from parnas.nas.random_sampling import draw_networks
from parnas.runs.run import Run
from parnas.training.progress import Reporter

__all__ = ["Baselines", "find_baselines"]

DERIVED, INTERLEAVED, SANDWICH, SHALLOWER, RANDOM = "derived", "interleaved", "sandwich", "shallower", "random"
_WIDTHS = (
    0.03,
    0.06,
    0.12,
    0.24,
    0.48,
    math.inf,
)  # half widths of the cost bands from which random networks are drawn, as fractions of the derived network's cost


class Baseline(NamedTuple):
    """A network to train for the comparison (the derived network or a baseline) and its name in tables."""

    name: str
    architecture: Architecture  # without identity, so that a network has a single layer string
    share: float  # predicted cost of the blocks as a fraction of the interleaved network's
    random: bool = False


@dataclass(frozen=True)
class Baselines:
    """The derived network and its baselines, with notes on their choice."""

    networks: tuple[Baseline, ...]
    notes: tuple[str, ...]
    metric: str  # cost metric of `Baseline.share`

    def to_dict(self) -> dict[str, Any]:
        """Return the cost metric, the networks (name, architecture, cost share) and the notes as plain values."""
        networks = [{"name": name, "arch": str(arch), "cost_share": share} for name, arch, share, _ in self.networks]
        return {"metric": self.metric, "networks": networks, "notes": list(self.notes)}


def find_baselines(run: Run, count: int, seed: int, reporter: Reporter) -> Baselines:
    """Return the derived network of a finished search and its baselines, `count` of which are random.

    The derived network is read from `arch.yaml` in the run folder; without that file it is derived now. `seed` decides
    which random networks are drawn. Raises `ParnasError` if `run` is no search or is not finished.
    """
    if run.kind() != "search":
        raise ParnasError(f"{run.folder} is a {run.kind()}; give the folder of a search.")
    if not run.finished():
        raise ParnasError(
            f"The search in {run.folder} is not finished; resume it with 'parnas search --run {run.folder} --resume'."
        )
    config = run.config()
    costs = costs_of_run(run.folder, config, config.search.cost.metric, reporter)
    if (run.folder / "arch.yaml").is_file():
        derived = Architecture.parse(run.derivation().arch)
    else:
        derived = derive(run, reporter=reporter).architecture
    return choose_baselines(derived, costs, config.search.block_spaces, count, seed)


def choose_baselines(
    derived: Architecture, costs: Costs, spaces: Sequence[Sequence[str]], count: int, seed: int
) -> Baselines:
    """Return the derived network with fixed baselines and `count` random networks of its cost.

    The fixed baselines, with as many blocks as the search has unless noted, are:

    * the interleaved network
    * the sandwich (Press et al. 2020, arXiv 1911.03864) with a third of its pairs of layers at the ends, one block less
      if the number of blocks is odd
    * the interleaved network of as many blocks as cost no more than the derived network
    * if the search may choose compressive memory, the interleaved network with compressive memory in all attention
      layers

    Args:
        derived: the derived network.
        costs: the costs of all candidates.
        spaces: the candidates of each block.
        count: the number of random networks.
        seed: decides which random networks are drawn.

    Raises:
        ParnasError: `count` is negative, or a layer of `derived` has no cost.
    """
    if count < 0:
        raise ParnasError(f"The number of random networks (--random) is {count}; give 0 or more.")
    if unknown := sorted({name for name in derived if name not in costs.per_layer and name != IDENTITY}):
        raise ParnasError(
            f"The search has no cost for layer {', '.join(unknown)} of {derived}; give a network of its candidates."
        )
    blocks, notes = len(spaces), list[str]()
    derived = derived.canonical()
    chosen = {DERIVED: derived, INTERLEAVED: Architecture.parse(f"interleaved-{blocks}")}
    if COMPRESSIVE in costs.per_layer:
        chosen["compressive"] = Architecture.parse(f"compressive-{blocks}")
    if pairs := blocks // 2:
        name = f"{SANDWICH}-{2 * pairs}-{max(1, round(pairs / 3))}"
        chosen[name] = Architecture.parse(name)
        if blocks % 2:
            notes.append(f"{name} has one block less than the others may have, since a sandwich needs an even number")
    chosen[SHALLOWER] = deepest_interleaved(costs, costs.cost(derived), blocks)
    if costs.cost(chosen[SHALLOWER]) > _with_tolerance(costs.cost(derived)):
        notes.append("even one block of the interleaved network costs more than the derived network")
    drawn, more = _draw_of_equal_cost(derived, costs, spaces, count, seed, [derived, chosen[INTERLEAVED]])
    networks = [Baseline(name, architecture, costs.share(architecture)) for name, architecture in chosen.items()]
    networks += [
        Baseline(f"{RANDOM}-{number}", layers, costs.share(layers), random=True)
        for number, layers in enumerate(drawn, 1)
    ]
    return Baselines(tuple(networks), tuple(notes + more), costs.metric)


def deepest_interleaved(costs: Costs, max_cost: float, blocks: int) -> Architecture:
    """Return the deepest interleaved network with at most `blocks` blocks that costs at most `max_cost`.

    If all cost more, it is the network of one block.
    """
    networks = [Architecture.parse(f"interleaved-{depth}") for depth in range(blocks, 0, -1)]
    return next((each for each in networks if costs.cost(each) <= _with_tolerance(max_cost)), networks[-1])


def _with_tolerance(cost: float) -> float:
    """Return a cost raised by the rounding error of adding layer costs in another order."""
    return cost * (1 + float(TOLERANCE))


def _draw_of_equal_cost(
    derived: Architecture,
    costs: Costs,
    spaces: Sequence[Sequence[str]],
    count: int,
    seed: int,
    without: Sequence[Architecture],
) -> tuple[list[Architecture], list[str]]:
    """Return up to `count` different random networks of about the derived network's cost, and notes on them.

    Networks within ± 3 % of its cost are drawn first. Where there are too few, the band of costs is doubled repeatedly.
    A smaller `count` returns the beginning of the same list. Networks in `without` are not drawn. `spaces` holds the
    candidates of each block.
    """
    cost = costs.cost(derived)
    layer_costs = {
        **costs.per_layer,
        IDENTITY: 0.0,
    }  # networks are trained without identity
    networks, width = list[Architecture](), _WIDTHS[0]
    for width in _WIDTHS:
        low, high = max(0.0, cost * (1 - width)), cost * (1 + width) if width < math.inf else math.inf
        excluded = [each.layers for each in (*without, *networks)]
        drawn = draw_networks(spaces, layer_costs, low, high, seed, without=excluded)
        networks += [Architecture(layers).canonical() for layers in islice(drawn, count - len(networks))]
        if len(networks) == count:
            break
    notes = []
    if width > _WIDTHS[0]:
        reach = f"within ± {width:.0%} of its cost" if width < math.inf else "of any cost"
        notes.append(f"the random networks are {reach}, since fewer than {count} are within ± {_WIDTHS[0]:.0%}")
    if len(networks) < count:
        notes.append(f"there are only {len(networks)} other networks in the whole space, not {count}")
    return networks, notes
