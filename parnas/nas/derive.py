"""From pi to an architecture: the most probable one within the cost target, re-ranked if configured (arXiv 2009.04534).

`derive` is the algorithm. 1. Read the last pi of a search, [N, C] for N blocks and C candidates. 2. Find the k networks
of greatest probability, prod over blocks of pi[b, c_b], within the cost target and limits (`knapsack.py`). 3. Evaluate
them and similar networks with the SuperNet's weights and rank them by loss and pi (`rerank.py`). Without a target,
limits and re-ranking, the result is the most probable candidate of each block.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch

from parnas.architecture import IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.config.schema import SearchConfig
from parnas.config.yaml_file import to_yaml
from parnas.data.streams import StreamHeader
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.budget import Budget
from parnas.nas.cost import UNITS, Costs, Metric, costs_of_run
from parnas.nas.diagnostics import describe_collapse
from parnas.nas.rerank import (
    NetworkLosses,
    ScoredNetwork,
    losses_of_run,
    rank,
    read_rerank,
    score_network,
    sort_by_score,
)
from parnas.runs.files import write_text
from parnas.runs.records import BlockRecord, CostRecord, DerivationRecord, RankedRecord
from parnas.runs.run import PI, RERANK, STREAMS, Run
from parnas.training.progress import Reporter, Silent

__all__ = [
    "BlockChoice",
    "Constraints",
    "Derivation",
    "derive",
    "read_constraints",
    "read_limits",
    "read_within",
    "write_derivation",
]

_SMALL_MARGIN = 0.1


@dataclass(frozen=True)
class Constraints:
    """Constraints of a derived architecture; a field that is `None` is taken from the search's configuration."""

    cost_target: float | None = None  # share of the reference's cost (`Costs`); inf: no target
    metric: Metric | None = None
    limits: Mapping[str, int] = field(default_factory=dict)  # by layer name: how many blocks may have the layer
    top_k: int | None = None  # length of the ranking; None: the number of networks that are re-ranked, at least one
    rerank_top_k: int | None = None  # as `search.rerank_top_k`; 0: by pi alone
    within: Mapping[Metric, float] = field(default_factory=dict)  # targets by metric, in place of the first two fields

    def are_those_of(self, search: SearchConfig) -> bool:
        """Return whether these constraints are those by which the search itself selects an architecture."""
        given = {metric: share for metric, share in self.targets(search).items() if share not in (None, math.inf)}
        own = {} if search.cost.target is None else {search.cost.metric: search.cost.target}
        return not self.limits and self.rerank_top_k in (None, search.rerank_count) and given == own

    def targets(self, search: SearchConfig) -> dict[Metric, float | None]:
        """Return the cost targets by metric, as shares of the reference's cost, for a search.

        A target `None` means that the cost is only reported. Without any target or metric, the result is empty.
        """
        if self.within:
            return dict(self.within)
        target = search.cost.target if self.cost_target is None else self.cost_target
        return {} if target is None and self.metric is None else {self.metric or search.cost.metric: target}

    def to_dict(self) -> dict[str, Any]:
        """Return the constraints that are given, under the names of the options of `parnas derive`."""
        given = {**vars(self), "within": dict(self.within), "max": dict(self.limits)}
        return {name: value for name, value in given.items() if name != "limits" and value not in (None, {})}


@dataclass(frozen=True)
class BlockChoice:
    """The layer chosen for a block, and the probabilities of the block's candidates."""

    layer: str
    pi: dict[str, float]  # probability of each candidate, by name
    entropy: float  # of pi, in nats
    margin: float  # pi of the layer minus pi of the best other candidate; negative if the layer is not the argmax

    @classmethod
    def from_pi(cls, layer: str, pi: dict[str, float]) -> "BlockChoice":
        """Return the choice of `layer` for a block, given the probabilities `pi` of all its candidates."""
        others = [p for name, p in pi.items() if name != layer]
        entropy = -sum(p * math.log(p) for p in pi.values() if p > 0)
        return cls(layer, pi, entropy, pi[layer] - max(others, default=0.0))


@dataclass(frozen=True)
class Ranked:
    """An architecture in the ranking; `loss` and `score` are `None` for an architecture that was not re-ranked."""

    architecture: Architecture
    probability: float
    behind: float  # log probability of the most probable architecture minus that of this one, in nats
    cost: float | None  # share of the reference's cost
    loss: float | None = None  # held-out loss with the SuperNet's weights, nats per token
    score: float | None = None  # of re-ranking (parnas/nas/rerank.py)

    def to_record(self) -> RankedRecord:
        """Return this architecture's entry in the ranking of `arch.yaml`."""
        figures = {name: value for name, value in vars(self).items() if name != "architecture" and value is not None}
        return RankedRecord(arch=str(self.architecture), **figures)


@dataclass(frozen=True)
class Derivation:
    """The derived architecture, how it was derived, and the ranking of architectures, in which it is the first."""

    architecture: Architecture
    blocks: tuple[BlockChoice, ...]
    step: int  # of the search, at which pi was logged
    parameters: int  # of the whole network
    warnings: tuple[str, ...]
    method: str  # in words
    ranking: tuple[Ranked, ...]  # best first, that is, `architecture` first
    costs: Costs | None
    target: float | None  # share of the reference's cost
    constraints: Constraints
    finalists: tuple[str, ...] = ()  # architectures compared by short trainings, `architecture` first
    further: tuple[tuple[Costs, float], ...] = ()  # costs in further metrics, each with its target

    def to_record(self, run: Run) -> DerivationRecord:
        """Return the content of `arch.yaml`, given the search `run`."""
        return DerivationRecord(
            arch=str(self.architecture),
            method=self.method,
            constraints=self.constraints.to_dict(),
            run=run.name,
            step=self.step,
            counts=self.architecture.counts(),
            parameters=self.parameters,
            cost=self.cost_record(),
            blocks=[self._describe_block(block) for block in self.blocks],
            ranking=[ranked.to_record() for ranked in self.ranking],
            warnings=list(self.warnings),
            **({"finalists": list(self.finalists)} if self.finalists else {}),
            **({"further_costs": [self._describe_cost(*each) for each in self.further]} if self.further else {}),
        )

    def cost_record(self) -> CostRecord | None:
        """Return the predicted cost of the blocks; `None` if neither a cost target nor a metric is given."""
        return None if self.costs is None else self._describe_cost(self.costs, self.target)

    def _describe_block(self, block: BlockChoice) -> BlockRecord:
        cost = {} if self.costs is None else {"cost": self.costs.per_layer[block.layer]}
        return BlockRecord(**asdict(block), **cost)

    def _describe_cost(self, costs: Costs, target: float | None) -> CostRecord:
        return CostRecord(
            metric=costs.metric,
            unit=UNITS[costs.metric],
            blocks=costs.cost(self.architecture),
            interleaved=costs.interleaved,
            parent=costs.parent,
            share=costs.share(self.architecture),
            target=target,
        )


def read_constraints(
    cost_target: float | None,
    metric: str | None,
    limits: Mapping[str, int] | None = None,
    top_k: int | None = None,
    rerank_top_k: int | None = None,
    within: Mapping[str, float] | None = None,
) -> Constraints:
    """Return constraints from the options of the command line or the Python API, after checking the values.

    Args:
        cost_target: largest cost, as a share of the reference's; `None`: that of the search.
        metric: the measure of cost; `None`: that of the search.
        limits: largest number of blocks by layer, such as {"s": 4}.
        top_k: see `Constraints`.
        rerank_top_k: see `Constraints`.
        within: several cost targets by metric, in place of `cost_target` and `metric`.

    Raises:
        ParnasError: a value is not valid.
    """
    within = within or {}
    if within and (cost_target is not None or metric is not None):
        raise ParnasError(
            "within (--within) names cost targets and their metrics; leave out cost_target and metric "
            "(--cost-target, --metric)."
        )
    if cost_target is not None and not cost_target > 0:
        raise ParnasError(
            f"cost_target (--cost-target) is {cost_target}; give a number above 0: the largest allowed cost "
            "relative to that of the interleaved network, or of the parent after search --from, such as 0.65."
        )
    known = get_args(Metric)
    for name in [*([] if metric is None else [metric]), *within]:
        if name not in known:
            raise ParnasError(f"metric (--metric, --within) is {name!r}; give one of {', '.join(known)}.")
    if wrong := [name for name, share in within.items() if not 0 < share < math.inf]:
        raise ParnasError(f"The target of {wrong[0]} (--within) is {within[wrong[0]]}; give a finite number above 0.")
    limits = dict(limits or {})
    if wrong := [name for name, count in limits.items() if not name or count < 0]:
        raise ParnasError(f"The limit of {wrong[0]} (--max) is {limits[wrong[0]]}; give a number of blocks.")
    for option, given, least in (("top_k (--top-k)", top_k, 1), ("rerank_top_k (--rerank-top-k)", rerank_top_k, 0)):
        if given is not None and given < least:
            raise ParnasError(f"{option} is {given}; give {least} or more networks.")
    targets = cast(Mapping[Metric, float], within)
    return Constraints(cost_target, cast(Metric | None, metric), limits, top_k, rerank_top_k, targets)


def read_limits(texts: Sequence[str]) -> dict[str, int]:
    """Return the largest number of blocks by layer from texts such as `s=4`, the values of the option `--max`.

    Raises:
        ParnasError: a text is not valid.
    """
    limits = {}
    for text in texts:
        name, equals, count = text.rpartition("=")
        if not equals or not name or not count.isdecimal():
            raise ParnasError(f"A limit (--max) is {text!r}; give a layer and a number of blocks, such as s=4.")
        if name in limits:
            raise ParnasError(f"Two limits (--max) are for {name}; leave out one of them.")
        limits[name] = int(count)
    return limits


def read_within(text: str) -> dict[str, float]:
    """Return cost targets by metric from a text such as `latency=0.5,parameters=0.8`.

    Raises:
        ParnasError: the text is not valid.
    """
    targets = {}
    for part in text.split(","):
        metric, _, share = (each.strip() for each in part.partition("="))
        if metric in targets:
            raise ParnasError(f"Two cost targets (--within) are for {metric}; leave out one of them.")
        try:
            targets[metric] = float(share)
        except ValueError:
            raise ParnasError(
                f"A cost target (--within) is {part!r}; give a metric and a share, such as latency=0.5."
            ) from None
    return targets


def derive(
    run: Run,
    constraints: Constraints | None = None,
    reporter: Reporter | None = None,
    losses: Callable[[], NetworkLosses] | None = None,
    known_good: Sequence[tuple[str, ...]] = (),
) -> Derivation:
    """Derive an architecture from the last pi of a search: the most probable one within the constraints.

    With re-ranking, derive the network of the best score among the most probable ones and those that an evolutionary
    search makes from them.

    Args:
        run: the search.
        constraints: fields that are `None` come from the configuration of the search.
        reporter: receives notes.
        losses: returns the held-out losses with the shared weights; by default they are loaded from the run.
        known_good: networks from which the evolutionary search starts as well, where they are within the constraints.
            With them, networks are re-ranked again where the search has stored its ranking.

    Raises:
        ParnasError: the run is not a search, or no architecture meets the constraints.
    """
    constraints, config, reporter = constraints or Constraints(), run.config(), reporter or Silent()
    # 1. Read pi, the cost targets and the costs of layers. Costs in another metric than the search's are counted or
    #    measured now.
    step, pi = read_pi(run, config)
    targets = constraints.targets(config.search)
    priced = [(costs_of_run(run.folder, config, metric, reporter), share) for metric, share in targets.items()]
    costs, target = priced[0] if priced else (None, None)
    further = tuple((each, share) for each, share in priced[1:] if share is not None)
    # A limit below the least number replaces it.
    limits = constraints.limits
    lowered = {name: min(count, limits.get(name, count)) for name, count in config.search.least_layers.items()}
    least = {name: count for name, count in lowered.items() if count}
    budget = Budget(costs, target, limits, further, least).spend(config.search.cost.spend, pi)
    known_good = [layers for layers in known_good if budget.allows(layers)]
    # 2. Re-rank by held-out loss, as the search does when alpha is frozen; the search has stored its result.
    scored: list[ScoredNetwork] = []
    rerank_count = config.search.rerank_count if constraints.rerank_top_k is None else constraints.rerank_top_k
    if rerank_count and (constraints.rerank_top_k is not None or step >= config.search.alpha_end_step):
        known = constraints.are_those_of(config.search) and not known_good
        scored = _stored_ranking(run, config, step, pi, budget) if known else []
        if not scored:
            reporter.note("evaluating networks with the shared weights; set rerank_top_k to 0 to skip this")
            settings = config.replace(search__rerank_top_k=rerank_count)
            measured = losses_of_run(run, reporter) if losses is None else losses()
            scored = rank(pi, budget, settings, measured, known_good, config.search.parent is not None)
    # 3. List the most probable networks within the constraints after them.
    ranking = _list_networks(scored, budget, pi, constraints.top_k)
    # 4. Describe the first.
    architecture = ranking[0].architecture
    blocks = tuple(BlockChoice.from_pi(layer, block) for layer, block in zip(architecture, pi, strict=True))
    return Derivation(
        architecture,
        blocks,
        step,
        _count_parameters(run, config, architecture),
        tuple(_find_warnings(run, config, blocks, step)),
        _describe_method(budget, len(scored), config.search),
        tuple(ranking),
        costs,
        target,
        constraints,
        further=further,
    )


def _stored_ranking(
    run: Run, config: Config, step: int, pi: Sequence[Mapping[str, float]], budget: Budget
) -> list[ScoredNetwork]:
    """Return the networks that the search has re-ranked, best first; empty if it has stored none until `step`.

    Empty also if one of them is outside the budget: then the costs have been measured again since the search.
    """
    stored = read_rerank(run, step)
    if any(
        len(layers) != len(pi) or any(not block.get(name) for name, block in zip(layers, pi, strict=True))
        for layers in stored
    ):
        raise ParnasError(
            f"{run.folder / RERANK} has a network that is not in the search space; restore the file or delete it."
        )
    if not all(map(budget.allows, stored)):
        return []
    return sort_by_score(
        score_network(budget.describe(layers, pi), loss, config.search) for layers, loss in stored.items()
    )


def _list_networks(
    scored: Sequence[ScoredNetwork], budget: Budget, pi: Sequence[Mapping[str, float]], top_k: int | None
) -> list[Ranked]:
    """Return the ranking: the re-ranked networks, then the most probable others, up to `top_k` in all.

    By default, return the re-ranked networks, or the most probable one if there are none.
    """
    count = max(1, len(scored)) if top_k is None else top_k
    probable = budget.most_probable(pi, count)
    known = {drop_identity(each.choice.layers) for each in scored}
    others = [(choice, None, None) for choice in probable if drop_identity(choice.layers) not in known]
    best = probable[0].log_probability
    return [
        Ranked(
            Architecture(choice.layers),
            math.exp(choice.log_probability),
            max(0.0, best - choice.log_probability),  # sums of logarithms are rounded
            None if budget.costs is None else budget.costs.share(choice.layers),
            loss,
            score,
        )
        for choice, loss, score in [*scored, *others][:count]
    ]


def read_pi(run: Run, config: Config) -> tuple[int, list[dict[str, float]]]:
    """Return the last logged step of a search and, for each block, the probability of each candidate at that step.

    Raises:
        ParnasError: the search has not logged pi yet, or pi does not fit the configuration.
    """
    records = run.pi_records()
    if not records:
        raise ParnasError(
            f"{run.folder / PI} has no line of probabilities yet; let the search run until it writes one."
        )
    last, space, blocks = records[-1], config.search.candidates, config.search.blocks
    if len(last.pi) != blocks or any(len(row) != len(space) for row in last.pi):
        raise ParnasError(
            f"{run.folder / PI} does not fit {blocks} blocks with candidates {list(space)}; restore the file."
        )
    return last.step, [dict(zip(space, row, strict=True)) for row in last.pi]


def _find_warnings(run: Run, config: Config, blocks: Sequence[BlockChoice], step: int) -> list[str]:
    """Return warnings about blocks with nearly equal candidates, a collapsed search and an unfinished search."""
    warnings = [
        f"block {number} is undecided: the probability of {block.layer} leads by only {block.margin:.3f}"
        for number, block in enumerate(blocks, 1)
        if 0 <= block.margin < _SMALL_MARGIN
    ]
    if IDENTITY in config.search.candidates:
        warning = describe_collapse(sum(block.pi[IDENTITY] for block in blocks) / len(blocks), config.search.estimator)
        warnings += [warning] if warning else []
    if not run.finished():
        warnings.append(f"the search has not ended; this is pi after step {step} of {config.search.steps}")
    return warnings


def _describe_method(budget: Budget, reranked: int, search: SearchConfig) -> str:
    """Describe in a phrase how the architecture was chosen, for `arch.yaml` and the terminal."""
    most = [f"at most {count} of {name}" for name, count in budget.limits.items()]
    targets = [(budget.costs, budget.target), *budget.further]
    most += [
        f"{share:g} of {costs.reference_name}"
        for costs, share in targets
        if costs is not None and share is not None and share < math.inf
    ]
    least = [f"at least {count} of {name}" for name, count in budget.least.items()]
    if budget.floor and budget.costs is not None:
        least.append(f"at least {budget.floor:g} of {budget.costs.reference_name}")
    bounds = " within " + ", ".join(most) if most else ""
    bounds += " with " + ", ".join(least) if least else ""
    if reranked:
        by_pi = "" if search.parent is not None else "by pi and "
        return f"best {by_pi}by the SuperNet's weights of {reranked} networks{bounds}"
    return "most probable by pi" + bounds if bounds else "argmax of pi"


def _count_parameters(run: Run, config: Config, architecture: Architecture) -> int:
    """Return the number of parameters of an architecture's network, embedding and softmax of the run included."""
    vocab_size = StreamHeader.read(run.folder / STREAMS).vocab_size
    with torch.device("meta"):
        network = TransformerXL.build(config.model, architecture, vocab_size)
    return sum(parameter.numel() for parameter in network.parameters())


def write_derivation(derivation: Derivation, run: Run, path: Path) -> None:
    """Write a derivation from the search `run` to `path` as `arch.yaml`."""
    write_text(path, to_yaml(derivation.to_record(run).to_dict()))
