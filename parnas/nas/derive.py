"""From pi to an architecture: the most probable one, within what it may cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch

from parnas.architecture import IDENTITY, Architecture
from parnas.config import Config
from parnas.data.streams import StreamHeader
from parnas.errors import OverBudget, ParnasError
from parnas.files import write_text
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import UNITS, Costs, Metric, costs_of_run
from parnas.nas.inherited import rank_again, read_second_look, rescorer
from parnas.nas.knapsack import Choice, most_probable
from parnas.nas.monitor import describe_collapse
from parnas.run import PI, STREAMS, Run
from parnas.training.reporter import Reporter, Silent
from parnas.yaml_text import to_yaml

SMALL_MARGIN = 0.1


@dataclass(frozen=True)
class Demands:
    """What a derived architecture has to keep to; none: as the search was configured."""

    within: float | None = None  # largest cost as a share of the interleaved network's; inf: any
    metric: Metric | None = None
    limits: Mapping[str, int] = field(default_factory=dict)  # most blocks with a layer
    top_k: int | None = None  # how many to rank; none: those of the second look, or one
    rescore: int | None = None  # so many of the most probable get a second look; none: as many as in the search

    def to_dict(self) -> dict[str, Any]:
        """What was given, by the names of the options of `parnas derive`."""
        values = {name: getattr(self, name) for name in ("within", "metric", "top_k", "rescore")}
        given = {name: value for name, value in values.items() if value is not None}
        return given | ({"max": dict(self.limits)} if self.limits else {})


@dataclass(frozen=True)
class BlockChoice:
    """What a block's probabilities say of the layer that was chosen for it."""

    layer: str
    pi: dict[str, float]
    entropy: float  # nats
    margin: float  # probability above that of the likeliest other candidate; below 0 where that was not taken

    @classmethod
    def of(cls, layer: str, pi: dict[str, float]) -> "BlockChoice":
        """The choice of a candidate, given the probabilities of all."""
        others = [p for name, p in pi.items() if name != layer]
        entropy = -sum(p * math.log(p) for p in pi.values() if p > 0)
        return cls(layer, pi, entropy, pi[layer] - max(others, default=0.0))


@dataclass(frozen=True)
class Ranked:
    """One of the most probable networks; without `loss` and `estimate` where it was not given a second look."""

    architecture: Architecture
    probability: float
    behind: float  # nats of log probability behind the most probable
    cost: float | None  # share of the interleaved network's
    loss: float | None = None  # with the SuperNet's weights, nats per token of held-out text
    estimate: float | None = None  # the same with what pi says of it (parnas/nas/inherited.py)


@dataclass(frozen=True)
class Derivation:
    """An architecture, the probabilities that it was derived from, and those that came next."""

    architecture: Architecture
    blocks: tuple[BlockChoice, ...]
    step: int
    parameters: int
    warnings: tuple[str, ...]
    method: str
    ranking: tuple[Ranked, ...]  # the architecture first
    costs: Costs | None
    target: float | None  # share of the interleaved network's cost
    demands: Demands
    finalists: tuple[str, ...] = ()  # the strings, this one first, among which short trainings chose

    def to_dict(self, run: Run) -> dict[str, Any]:
        """The content of `arch.yaml`."""
        return {
            "arch": str(self.architecture),
            "method": self.method,
            "demands": self.demands.to_dict(),
            "run": run.name,
            "step": self.step,
            "counts": self.architecture.counts(),
            "parameters": self.parameters,
            "cost": self.describe_cost(),
            "blocks": [
                {"layer": block.layer, "pi": block.pi, "entropy": block.entropy, "margin": block.margin}
                for block in self.blocks
            ],
            "ranking": [
                {"arch": str(each.architecture), "probability": each.probability, "behind": each.behind}
                | {key: value for key in ("cost", "loss", "estimate") if (value := getattr(each, key)) is not None}
                for each in self.ranking
            ],
            "warnings": list(self.warnings),
        } | ({"finalists": list(self.finalists)} if self.finalists else {})

    def describe_cost(self) -> dict[str, Any] | None:
        """The predicted cost of the blocks; none where nothing was asked of it."""
        if self.costs is None:
            return None
        return {
            "metric": self.costs.metric,
            "unit": UNITS[self.costs.metric],
            "blocks": self.costs.cost(self.architecture),
            "interleaved": self.costs.interleaved,
            "share": self.costs.share(self.architecture),
            "target": self.target,
        }


def read_demands(
    within: float | None, metric: str | None, most: Sequence[str], top_k: int | None = None, rescore: int | None = None
) -> Demands:
    """Demands as the command line and Python give them, `most` like `s=4`; raises `ParnasError` for what is wrong."""
    if within is not None and not within > 0:
        raise ParnasError(
            f"within (--within) is {within}; give a share above 0 of the interleaved network's cost, such as 0.65."
        )
    known = get_args(Metric)
    if metric is not None and metric not in known:
        raise ParnasError(f"metric (--metric) is {metric!r}; give {', '.join(known)}.")
    limits = {}
    for text in most:
        name, equals, count = text.rpartition("=")
        if not equals or not name or not count.isdecimal():
            raise ParnasError(f"A limit (--max) is {text!r}; give a layer and a number of blocks, such as s=4.")
        limits[name] = int(count)
    for option, given, least in (("top_k (--top-k)", top_k, 1), ("rescore (--rescore)", rescore, 0)):
        if given is not None and given < least:
            raise ParnasError(f"{option} is {given}; give {least} or more.")
    return Demands(within, cast(Metric | None, metric), limits, top_k, rescore)


def derive(run: Run, demands: Demands | None = None, reporter: Reporter | None = None) -> Derivation:
    """The architecture by the last pi of a search (PAR, §3), within its target of cost.

    That is the best of the most probable ones by a second look where the search has taken one, or the demands ask for
    one, and the most probable one where not: without a target and limits, the argmax of each block. Raises
    `ParnasError` where the run is no search, or nothing meets the demands.
    """
    demands, config, reporter = demands or Demands(), run.config(), reporter or Silent()
    step, pi = read_pi(run, config)
    target, costs = settle_demands(run, config, demands, reporter)
    looked_at = config.search.looked_at if step >= config.search.alpha_end_step else 0  # as in the search
    looked_at = looked_at if demands.rescore is None else demands.rescore
    chosen = choose(pi, costs, target, demands.limits, max(demands.top_k or 1, looked_at))
    losses = read_second_look(run, step) if looked_at else {}
    if any(choice.layers not in losses for choice in chosen[:looked_at]):  # of another target, or asked for by hand
        reporter.note(
            f"reading text with the {len(chosen[:looked_at])} most probable networks; a rescore of 0 does not"
        )
        loss_of = rescorer(run, reporter)
        losses = {choice.layers: loss_of(Architecture(choice.layers)) for choice in chosen[:looked_at]}
    ranking = rank(chosen, looked_at, losses, config.search.weight_of_pi, costs)[: demands.top_k]
    architecture = ranking[0].architecture
    blocks = tuple(BlockChoice.of(layer, block) for layer, block in zip(architecture, pi, strict=True))
    return Derivation(
        architecture,
        blocks,
        step,
        count_parameters(run, config, architecture),
        tuple(find_warnings(run, config, blocks, step)),
        describe_method(costs, target, demands, len(chosen[:looked_at])),
        tuple(ranking),
        costs,
        target,
        demands,
    )


def choose(
    pi: Sequence[Mapping[str, float]],
    costs: Costs | None,
    target: float | None,
    limits: Mapping[str, int] | None = None,
    count: int = 1,
) -> list[Choice]:
    """The most probable networks, given the probabilities of each block's candidates, whose cost is within the target.

    target: share of the interleaved network's cost; none, like no costs, for any.
    """
    free = dict.fromkeys((name for block in pi for name in block), 0.0)
    if target is None or costs is None:
        return most_probable(pi, free if costs is None else costs.of, math.inf, limits, count)
    try:
        return most_probable(pi, costs.of, target * costs.interleaved, limits, count)
    except OverBudget as error:
        within = " within the limits" if limits else ""
        least = math.ceil(1000 * error.cheapest / costs.interleaved) / 1000
        raise ParnasError(
            f"No network{within} costs {target:g} of the interleaved network's {costs.metric} or less; set the target, "
            f"search.cost.target or within (--within), to {least:g} at least."
        ) from error


def rank(
    chosen: Sequence[Choice],
    looked_at: int,
    losses: Mapping[tuple[str, ...], float],
    weight_of_pi: float,
    costs: Costs | None,
) -> list[Ranked]:
    """The most probable networks: the first `looked_at` by their estimate, then the others by their probability."""
    looked = rank_again(chosen[:looked_at], [losses[choice.layers] for choice in chosen[:looked_at]], weight_of_pi)
    others = [(choice, None, None) for choice in chosen[looked_at:]]
    return [
        Ranked(
            Architecture(choice.layers),
            math.exp(choice.log_probability),
            chosen[0].log_probability - choice.log_probability,
            None if costs is None else costs.share(choice.layers),
            loss,
            estimate,
        )
        for choice, loss, estimate in [*looked, *others]
    ]


def read_pi(run: Run, config: Config) -> tuple[int, list[dict[str, float]]]:
    """The last step with a pi, and the probabilities of each block's candidates."""
    records = run.records(PI)
    if not records:
        raise ParnasError(f"{run.folder / PI} holds no pi yet; let the search run to its first log line.")
    last, space, blocks = records[-1], config.search.candidates, config.search.blocks
    rows = last.get("pi")
    if not isinstance(rows, list) or len(rows) != blocks or not all(_is_row(row, len(space)) for row in rows):
        raise ParnasError(f"{run.folder / PI} does not fit {blocks} blocks and search.space {list(space)}; restore it.")
    return last["step"], [dict(zip(space, row, strict=True)) for row in rows]


def _is_row(row: Any, candidates: int) -> bool:
    return isinstance(row, list) and len(row) == candidates and all(type(chance) in (float, int) for chance in row)


def settle_demands(run: Run, config: Config, demands: Demands, reporter: Reporter) -> tuple[float | None, Costs | None]:
    """The target, and the costs that it is about: those of the search, or new ones for another metric."""
    target = config.search.cost.target if demands.within is None else demands.within
    metric = demands.metric or config.search.cost.metric
    if target is None and demands.metric is None:
        return None, None
    return target, costs_of_run(run.folder, config, metric, reporter)


def find_warnings(run: Run, config: Config, blocks: Sequence[BlockChoice], step: int) -> list[str]:
    """What a user should know before trusting the choice."""
    warnings = [
        f"block {number} is undecided: {block.layer} leads by {block.margin:.3f} only"
        for number, block in enumerate(blocks, 1)
        if 0 <= block.margin < SMALL_MARGIN
    ]
    if IDENTITY in config.search.candidates:
        warning = describe_collapse(sum(block.pi[IDENTITY] for block in blocks) / len(blocks), config.search.estimator)
        warnings += [warning] if warning else []
    if not run.finished():
        warnings.append(f"the search has not ended; this is pi after step {step} of {config.search.steps}")
    return warnings


def describe_method(costs: Costs | None, target: float | None, demands: Demands, looked_at: int) -> str:
    """How the string was chosen."""
    bounds = [f"at most {count} of {name}" for name, count in demands.limits.items()]
    if costs is not None and target is not None and target < math.inf:
        bounds.append(f"{target:g} of the interleaved network's {costs.metric}")
    within = " within " + ", ".join(bounds) if bounds else ""
    if looked_at:
        return f"best by pi and by the SuperNet's weights of the {looked_at} most probable{within}"
    return "argmax of pi" if not bounds else "most probable by pi" + within


def count_parameters(run: Run, config: Config, architecture: Architecture) -> int:
    """Of the network of an architecture."""
    vocab_size = StreamHeader.read(run.folder / STREAMS).vocab_size
    with torch.device("meta"):
        network = TransformerXL.build(config.model, architecture, vocab_size)
    return sum(parameter.numel() for parameter in network.parameters())


def write_derivation(derivation: Derivation, run: Run, path: Path) -> None:
    """Write `arch.yaml`."""
    write_text(path, to_yaml(derivation.to_dict(run)))
