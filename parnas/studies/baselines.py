"""The baselines of a derived network: hand-designed networks, and random networks of the same cost.

Costs are predicted as in the search that derived the network. `baseline_comparison.py` trains the baselines of
`find_baselines`, `pipeline.py` those of `hand_designed`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from itertools import islice
from typing import Any, NamedTuple

from parnas.architecture import COMPRESSIVE, CONVOLUTION, IDENTITY, LETTERS, Architecture, is_preset
from parnas.errors import ParnasError
from parnas.nas.cost import Costs, costs_of_run
from parnas.nas.derive import derive
from parnas.nas.knapsack import with_tolerance
from parnas.nas.random_sampling import draw_networks
from parnas.runs.run import ARCH_FILE, Run
from parnas.training.progress import Reporter

__all__ = ["ALTERNATING", "DERIVED", "EQUAL_COST", "INTERLEAVED", "Baselines", "find_baselines", "read_baselines"]

DERIVED, INTERLEAVED, SANDWICH, SHALLOWER, RANDOM = "derived", "interleaved", "sandwich", "shallower", "random"
EQUAL_COST, ALL_F, ALTERNATING = "equal-cost", "all-f", "alternating"
_WIDTHS = (0.03, 0.06, 0.12, 0.24, 0.48, math.inf)
"""Half widths of the cost bands from which random networks are drawn, as fractions of the derived network's cost."""


class Baseline(NamedTuple):
    """A network to train for the comparison (the derived network or a baseline) and its name in tables."""

    name: str
    architecture: Architecture  # without identity, so that a network has a single layer string
    share: float  # predicted cost of the blocks as a share of the reference's (`Costs`)
    random: bool = False


@dataclass(frozen=True)
class Baselines:
    """The derived network and its baselines, with notes on the choice of the baselines."""

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
    which random networks are drawn. Raises `ParnasError` if `run` is not a search or not finished.
    """
    if run.kind() != "search":
        raise ParnasError(f"{run.folder} is a {run.kind()} run; give the folder of a search.")
    if not run.finished():
        raise ParnasError(
            f"The search in {run.folder} is not finished; resume it with 'parnas search --run {run.folder} --resume'."
        )
    config = run.config()
    costs = costs_of_run(run.folder, config, config.search.cost.metric, reporter)
    if (run.folder / ARCH_FILE).is_file():
        derived = Architecture.parse(run.derivation().arch)
    else:
        derived = derive(run, reporter=reporter).architecture
    return choose_baselines(derived, costs, config.search.block_spaces, count, seed)


def choose_baselines(
    derived: Architecture, costs: Costs, spaces: Sequence[Sequence[str]], count: int, seed: int
) -> Baselines:
    """Return the derived network, its hand-designed baselines and `count` random networks of equal cost.

    The hand-designed baselines have as many blocks as the search, unless another number is given:

    * the interleaved network
    * if the search has the candidate `c`, the interleaved network with `c` for all attention layers
    * the sandwich (Press et al. 2020, arXiv 1911.03864) with a third of its attention layers first and as many
      feed-forward layers last; one block less if the search has an odd number of blocks
    * the deepest interleaved network that costs no more than the derived network
    * if the search has the candidate `k`, the shortest network that costs at least as much as the derived network and
      in which convolution and attention take turns as token mixers

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
    if unknown := sorted({name for name in derived if name not in costs.per_layer}):
        raise ParnasError(
            f"The search has no cost for layer {', '.join(unknown)} of {derived}; use the candidates of the search."
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
            notes.append(f"{name} has one block less than the search, since a sandwich needs an even number of blocks")
    chosen[SHALLOWER] = deepest_interleaved(costs, costs.cost(derived), blocks)
    if CONVOLUTION in costs.per_layer:
        chosen[ALTERNATING] = shortest(ALTERNATING, costs, costs.cost(derived))
    if costs.cost(chosen[SHALLOWER]) > with_tolerance(costs.cost(derived)):
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

    If even the network of one block costs more, return that network.
    """
    networks = [Architecture.parse(f"interleaved-{depth}") for depth in range(blocks, 0, -1)]
    return next((each for each in networks if costs.cost(each) <= with_tolerance(max_cost)), networks[-1])


def read_baselines(names: str | Iterable[str]) -> list[str]:
    """Return the distinct names of baselines in a list or in a comma-separated text such as `equal-cost,all-f`.

    Raises `ParnasError` for a name that `hand_designed` does not know, and for an invalid preset.
    """
    known = EQUAL_COST, ALTERNATING, INTERLEAVED, ALL_F
    listed = names.split(",") if isinstance(names, str) else names
    distinct = list(dict.fromkeys(name.strip() for name in listed if name.strip()))
    for name in distinct:
        if is_preset(name):
            Architecture.parse(name)  # raises an error if its numbers are not valid
        elif name not in known and not set(name) <= LETTERS.keys():
            raise ParnasError(
                f"There is no baseline {name!r} (--baselines); give some of {', '.join(known)}, presets of "
                "docs/layers.md such as lfm2-12, or letters of layers such as kkskk."
            )
    return distinct


def hand_designed(names: Sequence[str], derived: Architecture, costs: Costs, blocks: int) -> Mapping[str, str]:
    """Return the layer strings of the named baselines for a derived network, by name.

    * `equal-cost`: the shortest interleaved network that costs at least as much as the derived network
    * `alternating`: the shortest such network in which convolution and attention take turns as token mixers; left out
      if `costs` has no convolution
    * `interleaved`: the interleaved network of `blocks` blocks, the number of blocks of the search
    * `all-f`: `blocks` feed-forward layers
    * a preset such as `lfm2-12`, or layers such as `kkskk`, whose name is the text itself
    """
    strings = {INTERLEAVED: f"interleaved-{blocks}", ALL_F: f"all-f-{blocks}"}
    if EQUAL_COST in names:
        strings[EQUAL_COST] = str(shortest(INTERLEAVED, costs, costs.cost(derived)))
    if CONVOLUTION not in costs.per_layer:
        names = [name for name in names if name != ALTERNATING]
    elif ALTERNATING in names:
        strings[ALTERNATING] = str(shortest(ALTERNATING, costs, costs.cost(derived)))
    return {name: strings.get(name, name) for name in names}


def shortest(preset: str, costs: Costs, min_cost: float) -> Architecture:
    """Return the network of a preset such as `interleaved` with the fewest blocks that costs at least `min_cost`."""
    networks = (Architecture.parse(f"{preset}-{depth}") for depth in count_from(1))
    return next(each for each in networks if with_tolerance(costs.cost(each)) >= min_cost)


def _draw_of_equal_cost(
    derived: Architecture,
    costs: Costs,
    spaces: Sequence[Sequence[str]],
    count: int,
    seed: int,
    without: Sequence[Architecture],
) -> tuple[list[Architecture], list[str]]:
    """Return up to `count` different random networks of about the derived network's cost, and notes on their choice.

    Networks within ± 3 % of the derived network's cost are drawn first; while there are fewer than `count`, the band is
    made twice as wide. A smaller `count` returns the beginning of the same list. Networks in `without` are not drawn.
    `spaces` holds the candidates of each block.
    """
    cost = costs.cost(derived)
    layer_costs = {**costs.per_layer, IDENTITY: 0.0}  # networks are trained without identity layers
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
        band = f"within ± {width:.0%} of the derived network's cost" if width < math.inf else "of any cost"
        notes.append(f"the random networks are {band}, since fewer than {count} are within ± {_WIDTHS[0]:.0%}")
    if len(networks) < count:
        notes.append(f"the search space has only {len(networks)} other networks, not {count}")
    return networks, notes
