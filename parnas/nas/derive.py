"""From pi to an architecture: the most probable one within the cost target, re-ranked if configured (arXiv 2009.04534).

`derive` is the algorithm. 1. Read the last pi of a search, [N, C] for N blocks and C candidates. 2. Find the k networks
of greatest probability, prod over blocks of pi[b, c_b], within the cost target and limits (`knapsack.py`). 3. Evaluate
them with the SuperNet's weights and rank them by loss and pi (`rerank.py`). Without a target, limits and re-ranking,
the result is the most probable candidate of each block.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config
from parnas.config.yaml_file import to_yaml
from parnas.data.streams import StreamHeader
from parnas.errors import OverBudget, ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import UNITS, Costs, Metric, costs_of_run
from parnas.nas.diagnostics import describe_collapse
from parnas.nas.knapsack import LayerString, most_probable
from parnas.nas.rerank import read_rerank, rerank, rescorer
from parnas.runs.files import write_text
from parnas.runs.records import BlockRecord, CostRecord, DerivationRecord, RankedRecord
from parnas.runs.run import PI, STREAMS, Run
from parnas.training.progress import Reporter, Silent

__all__ = ["BlockChoice", "Derivation", "choose", "derive", "read_constraints", "write_derivation"]

_SMALL_MARGIN = 0.1


@dataclass(frozen=True)
class Constraints:
    """Constraints of a derived architecture; a field that is `None` is taken from the search's configuration."""

    cost_target: float | None = None  # share of the interleaved network's cost; inf: no target
    metric: Metric | None = None
    limits: Mapping[str, int] = field(default_factory=dict)  # by layer name: how many blocks may have the layer
    top_k: int | None = None  # length of the ranking; None: the number of networks that are re-ranked, at least one
    rerank_top_k: int | None = None  # number of networks to re-rank; 0: none

    def to_dict(self) -> dict[str, Any]:
        """Return the constraints that are given, under the names of the options of `parnas derive`."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "limits"}
        return given | ({"max": dict(self.limits)} if self.limits else {})


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
    """An architecture in the ranking; `loss` and `estimate` are `None` for an architecture that was not re-ranked."""

    architecture: Architecture
    probability: float
    behind: float  # log probability of the most probable architecture minus that of this one, in nats
    cost: float | None  # share of the interleaved network's cost
    loss: float | None = None  # held-out loss with the SuperNet's weights, nats per token
    estimate: float | None = None  # re-ranking score (parnas/nas/rerank.py)

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
    target: float | None  # share of the interleaved network's cost
    constraints: Constraints
    finalists: tuple[str, ...] = ()  # architectures compared by short trainings, `architecture` first

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
            blocks=[BlockRecord(**asdict(block)) for block in self.blocks],
            ranking=[ranked.to_record() for ranked in self.ranking],
            warnings=list(self.warnings),
            **({"finalists": list(self.finalists)} if self.finalists else {}),
        )

    def cost_record(self) -> CostRecord | None:
        """Return the predicted cost of the blocks; `None` if neither a cost target nor a metric is given."""
        if self.costs is None:
            return None
        return CostRecord(
            metric=self.costs.metric,
            unit=UNITS[self.costs.metric],
            blocks=self.costs.cost(self.architecture),
            interleaved=self.costs.interleaved,
            share=self.costs.share(self.architecture),
            target=self.target,
        )


def read_constraints(
    cost_target: float | None,
    metric: str | None,
    most: Sequence[str],
    top_k: int | None = None,
    rerank_top_k: int | None = None,
) -> Constraints:
    """Return constraints from the options of the command line or the Python API, after checking the values.

    `most` holds the values of the option `--max`, such as `s=4` for at most four blocks with layer `s`.

    Raises:
        ParnasError: a value is not valid.
    """
    if cost_target is not None and not cost_target > 0:
        raise ParnasError(
            f"cost_target (--cost-target) is {cost_target}; give a number above 0: the largest allowed cost "
            "relative to the interleaved network, such as 0.65."
        )
    known = get_args(Metric)
    if metric is not None and metric not in known:
        raise ParnasError(f"metric (--metric) is {metric!r}; give one of {', '.join(known)}.")
    limits = {}
    for text in most:
        name, equals, count = text.rpartition("=")
        if not equals or not name or not count.isdecimal():
            raise ParnasError(f"A limit (--max) is {text!r}; give a layer and a number of blocks, such as s=4.")
        limits[name] = int(count)
    for option, given, least in (("top_k (--top-k)", top_k, 1), ("rerank_top_k (--rerank-top-k)", rerank_top_k, 0)):
        if given is not None and given < least:
            raise ParnasError(f"{option} is {given}; give {least} or more networks.")
    return Constraints(cost_target, cast(Metric | None, metric), limits, top_k, rerank_top_k)


def derive(run: Run, constraints: Constraints | None = None, reporter: Reporter | None = None) -> Derivation:
    """Derive an architecture from the last pi of a search: the most probable one within the constraints.

    With re-ranking, derive the one with the best re-ranking score among the most probable. Fields of `constraints` that
    are `None` come from the configuration of the search.

    Raises:
        ParnasError: the run is not a search, or no architecture meets the constraints.
    """
    constraints, config, reporter = constraints or Constraints(), run.config(), reporter or Silent()
    # 1. Read pi, the cost target and the costs of layers.
    step, pi = read_pi(run, config)
    target, costs = _resolve_target(run, config, constraints, reporter)
    # 2. Find the most probable networks within the constraints.
    rerank_count = constraints.rerank_top_k
    if rerank_count is None:  # as in the search, which re-ranks when alpha is frozen
        rerank_count = config.search.rerank_count if step >= config.search.alpha_end_step else 0
    chosen = choose(pi, costs, target, constraints.limits, max(constraints.top_k or 1, rerank_count))
    rerank_count = min(rerank_count, len(chosen))
    # 3. Re-rank the first of them by their held-out loss, which the search has stored unless constraints differ.
    losses = read_rerank(run, step) if rerank_count else {}
    if any(choice.layers not in losses for choice in chosen[:rerank_count]):
        reporter.note(f"re-ranking the {rerank_count} most probable networks; set rerank_top_k to 0 to skip it")
        loss_of = rescorer(run, reporter)
        losses = {choice.layers: loss_of(Architecture(choice.layers)) for choice in chosen[:rerank_count]}
    ranking = _rank(chosen, rerank_count, losses, config.search.rerank_pi_weight, costs)[: constraints.top_k]
    # 4. Describe the first.
    architecture = ranking[0].architecture
    blocks = tuple(BlockChoice.from_pi(layer, block) for layer, block in zip(architecture, pi, strict=True))
    return Derivation(
        architecture,
        blocks,
        step,
        _count_parameters(run, config, architecture),
        tuple(_find_warnings(run, config, blocks, step)),
        _describe_method(costs, target, constraints, rerank_count),
        tuple(ranking),
        costs,
        target,
        constraints,
    )


def choose(
    pi: Sequence[Mapping[str, float]],
    costs: Costs | None,
    target: float | None,
    limits: Mapping[str, int] | None = None,
    count: int = 1,
) -> list[LayerString]:
    """Return the `count` most probable architectures within the cost target and limits, best first.

    Args:
        pi: for each block the probability of each candidate, by name.
        costs: cost of each layer; `None` for no cost target.
        target: largest cost, as a share of the interleaved network's cost; `None` for no target.
        limits: for each layer name, the largest number of blocks that may have this layer.
        count: number of architectures; the list is shorter if fewer exist.

    Raises:
        ParnasError: no architecture meets the target and the limits.
    """
    # A target is a share of the interleaved network's cost; the knapsack's budget is in the metric's own unit.
    if target is None or costs is None:
        free = dict.fromkeys((name for block in pi for name in block), 0.0)
        return most_probable(pi, free if costs is None else costs.per_layer, math.inf, limits, count)
    try:
        return most_probable(pi, costs.per_layer, target * costs.interleaved, limits, count)
    except OverBudget as error:
        within = " within the limits" if limits else ""
        # Rounded up, so that the target given in the message is met.
        least = math.ceil(1000 * error.cheapest / costs.interleaved) / 1000
        raise ParnasError(
            f"No network{within} costs at most {target:g} of the interleaved network's {costs.metric}; set the "
            f"cost target, search.cost.target or cost_target (--cost-target), to {least:g} or more."
        ) from error


def _rank(
    chosen: Sequence[LayerString],
    rerank_count: int,
    losses: Mapping[tuple[str, ...], float],
    rerank_pi_weight: float,
    costs: Costs | None,
) -> list[Ranked]:
    """Return the ranking of the architectures `chosen`, which are sorted by probability.

    The first `rerank_count` are sorted by re-ranking score, computed from their `losses`; the rest follow as given.
    """
    first = chosen[:rerank_count]
    reranked = rerank(first, [losses[choice.layers] for choice in first], rerank_pi_weight)
    others = [(choice, None, None) for choice in chosen[rerank_count:]]
    return [
        Ranked(
            Architecture(choice.layers),
            math.exp(choice.log_probability),
            chosen[0].log_probability - choice.log_probability,
            None if costs is None else costs.share(choice.layers),
            loss,
            estimate,
        )
        for choice, loss, estimate in [*reranked, *others]
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


def _resolve_target(
    run: Run, config: Config, constraints: Constraints, reporter: Reporter
) -> tuple[float | None, Costs | None]:
    """Return the cost target and the costs of layers, by target and metric of the constraints or else of the search.

    Return `None` for target and costs if there is no target, and no metric in the constraints. Costs in another metric
    than the search's are counted or measured now.
    """
    target = config.search.cost.target if constraints.cost_target is None else constraints.cost_target
    metric = constraints.metric or config.search.cost.metric
    if target is None and constraints.metric is None:
        return None, None
    return target, costs_of_run(run.folder, config, metric, reporter)


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


def _describe_method(costs: Costs | None, target: float | None, constraints: Constraints, rerank_count: int) -> str:
    """Describe in a phrase how the architecture was chosen, for `arch.yaml` and the terminal."""
    bounds = [f"at most {count} of {name}" for name, count in constraints.limits.items()]
    if costs is not None and target is not None and target < math.inf:
        bounds.append(f"{target:g} of the interleaved network's {costs.metric}")
    within = " within " + ", ".join(bounds) if bounds else ""
    if rerank_count:
        return f"best by pi and by the SuperNet's weights of the {rerank_count} most probable{within}"
    return "argmax of pi" if not bounds else "most probable by pi" + within


def _count_parameters(run: Run, config: Config, architecture: Architecture) -> int:
    """Return the number of parameters of an architecture's network, embedding and softmax of the run included."""
    vocab_size = StreamHeader.read(run.folder / STREAMS).vocab_size
    with torch.device("meta"):
        network = TransformerXL.build(config.model, architecture, vocab_size)
    return sum(parameter.numel() for parameter in network.parameters())


def write_derivation(derivation: Derivation, run: Run, path: Path) -> None:
    """Write a derivation from the search `run` to `path` as `arch.yaml`."""
    write_text(path, to_yaml(derivation.to_record(run).to_dict()))
