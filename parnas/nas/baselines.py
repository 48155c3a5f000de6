"""Networks that a derived one is to be compared with: what one would have guessed, and chance at the same cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from parnas.architecture import COMPRESSIVE, IDENTITY, Architecture
from parnas.errors import ParnasError
from parnas.nas.cost import Costs, costs_of_run
from parnas.nas.cost_band import draw_networks
from parnas.nas.derive import derive
from parnas.nas.knapsack import TOLERANCE
from parnas.run import Run
from parnas.training.reporter import Reporter

DERIVED, INTERLEAVED, SANDWICH, SHALLOWER, RANDOM = "derived", "interleaved", "sandwich", "shallower", "random"
WIDTHS = (0.03, 0.06, 0.12, 0.24, 0.48, math.inf)  # of the bands of costs, to both sides, relative


@dataclass(frozen=True)
class Baseline:
    """A network by the name that tables give it."""

    name: str
    architecture: Architecture  # without identity, so that one network is one string
    share: float  # predicted cost of the blocks over that of the interleaved network's
    random: bool = False


@dataclass(frozen=True)
class Baselines:
    """The derived network, those it is compared with, and what must be known of their choice."""

    networks: tuple[Baseline, ...]
    notes: tuple[str, ...]
    metric: str  # that the costs are of

    def to_dict(self) -> dict[str, Any]:
        """Strings and costs, as plain values."""
        networks = [{"name": of.name, "arch": str(of.architecture), "cost_share": of.share} for of in self.networks]
        return {"metric": self.metric, "networks": networks, "notes": list(self.notes)}


def find_baselines(run: Run, count: int, seed: int, reporter: Reporter) -> Baselines:
    """The networks for a finished search, by its costs: derived as its `arch.yaml` says, or anew where it has none.

    Raises `ParnasError` for other runs.
    """
    if run.kind() != "search":
        raise ParnasError(f"{run.folder} is a {run.kind()}; give the folder of a search.")
    if not run.finished():
        raise ParnasError(
            f"{run.folder} is not finished; go on with it by 'parnas search --run {run.folder} --resume'."
        )
    config = run.config()
    costs = costs_of_run(run.folder, config, config.search.cost.metric, reporter)
    if (run.folder / "arch.yaml").is_file():
        derived = Architecture.parse(run.arch_file()["arch"])
    else:
        derived = derive(run, reporter=reporter).architecture
    return choose_baselines(derived, costs, config.search.block_spaces, count, seed)


def choose_baselines(
    derived: Architecture, costs: Costs, spaces: Sequence[Sequence[str]], count: int, seed: int
) -> Baselines:
    """The derived network, guesses, and `count` random strings of its cost, the same ones for the same seed.

    spaces: the candidates of each block, of which random strings are made. The guesses are the interleaved network of
    as many blocks; the sandwich (Press et al. 2020, arXiv 1911.03864) whose ends are a third of its pairs, one block
    less where the number is odd; the deepest interleaved network that costs no more than the derived one; and where the
    search may choose compressive memory, the interleaved network that has it everywhere. Raises `ParnasError` for
    layers without a cost.
    """
    if count < 0:
        raise ParnasError(f"The number of random networks (--random) is {count}; give 0 or more.")
    if unknown := sorted({name for name in derived if name not in costs.of and name != IDENTITY}):
        raise ParnasError(f"The search has no cost of {', '.join(unknown)} in {derived}; derive from its own space.")
    blocks, notes = len(spaces), list[str]()
    derived = derived.canonical()
    chosen = {DERIVED: derived, INTERLEAVED: Architecture.parse(f"interleaved-{blocks}")}
    if COMPRESSIVE in costs.of:
        chosen["compressive"] = Architecture.parse(f"compressive-{blocks}")
    if pairs := blocks // 2:
        name = f"{SANDWICH}-{2 * pairs}-{max(1, round(pairs / 3))}"
        chosen[name] = Architecture.parse(name)
        if blocks % 2:
            notes.append(f"{name} has one block less than the others may have, since a sandwich needs an even number")
    chosen[SHALLOWER] = deepest_interleaved(costs, costs.cost(derived), blocks)
    if costs.cost(chosen[SHALLOWER]) > within(costs.cost(derived)):
        notes.append("even one block of the interleaved network costs more than the derived network")
    drawn, more = draw_alike(derived, costs, spaces, count, seed, [derived, chosen[INTERLEAVED]])
    networks = [Baseline(name, architecture, costs.share(architecture)) for name, architecture in chosen.items()]
    networks += [
        Baseline(f"{RANDOM}-{number}", layers, costs.share(layers), random=True)
        for number, layers in enumerate(drawn, 1)
    ]
    return Baselines(tuple(networks), tuple(notes + more), costs.metric)


def deepest_interleaved(costs: Costs, most: float, blocks: int) -> Architecture:
    """The deepest interleaved network of 1 to `blocks` blocks that costs at most `most`, in the costs' unit."""
    depths = range(blocks, 0, -1)
    networks = (Architecture.parse(f"interleaved-{depth}") for depth in depths)
    return next((each for each in networks if costs.cost(each) <= within(most)), Architecture.parse("interleaved-1"))


def within(cost: float) -> float:
    """A cost with the tolerance that sums in another order need."""
    return cost * (1 + float(TOLERANCE))


def draw_alike(
    derived: Architecture,
    costs: Costs,
    spaces: Sequence[Sequence[str]],
    count: int,
    seed: int,
    without: Sequence[Architecture],
) -> tuple[list[Architecture], list[str]]:
    """Up to `count` random networks of the derived one's cost, none of `without`, and notes on them.

    They come from its cost ± 3 % and, when that is exhausted, from bands twice as wide. So those that a smaller `count`
    gives come first whatever the count.
    """
    cost = costs.cost(derived)
    of = {**costs.of, IDENTITY: 0.0}  # what a network costs, not where identity stands in its string
    found, width = list[Architecture](), WIDTHS[0]
    for width in WIDTHS:
        low, high = max(0.0, cost * (1 - width)), cost * (1 + width) if width < math.inf else math.inf
        drawn = draw_networks(spaces, of, low, high, seed, without=[each.layers for each in (*without, *found)])
        found += [Architecture(layers).canonical() for layers in islice(drawn, count - len(found))]
        if len(found) == count:
            break
    notes = []
    if width > WIDTHS[0]:
        reach = f"within ± {width:.0%} of its cost" if width < math.inf else "of any cost"
        notes.append(f"the random networks are {reach}, since fewer than {count} are within ± {WIDTHS[0]:.0%}")
    if len(found) < count:
        notes.append(f"there are only {len(found)} other networks in the whole space, not {count}")
    return found, notes
