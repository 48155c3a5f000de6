"""Costs of architectures: the sum of their layers' multiply-adds, parameters, memory or measured latency.

Cost targets are relative to the cost of a reference: the interleaved network of the same depth or, in a search in a
trained network, this parent. A target of 0.5 is half its cost. Embedding and softmax, which all architectures share,
are not part of a cost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from parnas.architecture import ATTENTION, FEED_FORWARD, IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.model.layers import Block, make_layer
from parnas.model.memory import count_numbers
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.latency_table import cached_profile, read_profile
from parnas.runs.files import read_json, write_json
from parnas.runs.run import COSTS, Run
from parnas.training.loaded_run import run_architecture
from parnas.training.progress import Reporter

__all__ = ["Costs", "Metric", "costs_of_run", "find_costs"]

Metric = Literal["latency", "macs", "parameters", "cache"]
UNITS: dict[Metric, str] = {
    "latency": "ms per batch",
    "macs": "multiply-adds per token",
    "parameters": "parameters",
    "cache": "numbers per text",
}


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Costs:
    """The cost of each layer, and of the networks that targets are relative to, in the unit of the metric."""

    metric: Metric  # its unit is in `UNITS`
    per_layer: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]  # by layer name; identity is always there
    interleaved: _Positive  # of the interleaved network with as many blocks as the SuperNet
    parent: _Positive | None = None  # of the parent of a search in a trained network

    def __post_init__(self) -> None:
        # Layers may be left out of any network, also where identity is no candidate and so has no cost of its own.
        identity = self.per_layer.get(IDENTITY, 0.0)
        object.__setattr__(self, "per_layer", {**self.per_layer, IDENTITY: identity})  # as the class is frozen

    @property
    def reference(self) -> float:
        """Return the cost that targets and shares are relative to: the parent's, else the interleaved network's."""
        return self.interleaved if self.parent is None else self.parent

    @property
    def reference_name(self) -> str:
        """Return what targets and shares are relative to in words, such as `the parent's latency`."""
        return f"the {'interleaved network' if self.parent is None else 'parent'}'s {self.metric}"

    def cost(self, layers: Iterable[str]) -> float:
        """Return the sum of the costs of `layers`, in the unit of the metric (`UNITS`)."""
        return sum(self.per_layer[name] for name in layers)

    def share(self, layers: Iterable[str]) -> float:
        """Return the sum of the costs of `layers` as a share of the reference's cost."""
        return self.cost(layers) / self.reference

    def relative(self, candidates: Sequence[str]) -> Tensor:
        """Return the cost of each candidate as a share of the reference's cost, [candidates]."""
        return torch.tensor([self.per_layer[name] / self.reference for name in candidates])


def make_costs(
    metric: Metric, per_layer: Mapping[str, float], blocks: int, parent: Iterable[str] | None = None
) -> Costs:
    """Return `Costs` of layers, with those of the interleaved network of `blocks` blocks and of a parent's layers.

    `per_layer` gives the cost of each layer by name, and must include attention `s` and feed-forward `f`.
    """
    interleaved = sum(per_layer[name] for name in Architecture.parse(f"interleaved-{blocks}"))
    return Costs(
        metric, dict(per_layer), interleaved, None if parent is None else sum(per_layer[name] for name in parent)
    )


def _costs_for(config: Config, metric: Metric, per_layer: Mapping[str, float]) -> Costs:
    """Return `Costs` for a search, given the cost of each layer in `_names_to_cost`."""
    parent = _parent_layers(config)
    if parent is not None and not sum(per_layer[name] for name in parent):
        raise ParnasError(f"The layers of {config.search.parent}, the parent, have no {metric}; give another metric.")
    return make_costs(metric, per_layer, config.search.blocks, parent)


def _parent_layers(config: Config) -> tuple[str, ...] | None:
    """Return the layers of the parent, read from its run folder; `None` if the search is in no trained network."""
    folder = config.search.parent
    return None if folder is None else drop_identity(run_architecture(Run(Path(folder)).config()))


def find_costs(config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Return the costs of the candidates: counted from shapes or, for the metric `latency`, read from a profile.

    The profile is the file `search.cost.table`. If that is not set, it is the cached profile, or a new measurement.

    Raises:
        ParnasError: the profile was measured with other shapes, or does not contain a candidate.
    """
    if metric != "latency":
        return count_costs(config, metric)
    table = config.search.cost.table
    profile = cached_profile(config, reporter) if table is None else read_profile(Path(table))
    profile.refuse_other_shapes(config)
    # A latency is a difference of measurements, so noise can make the one of a cheap layer negative.
    per_layer = {name: max(0.0, profile.latency(name)) for name in _names_to_cost(config)}
    return _costs_for(config, metric, per_layer)


def read_costs(folder: Path) -> Costs | None:
    """Return the costs that `write_costs` stored in a run folder; `None` if it stored none.

    Raises:
        ParnasError: the file is damaged.
    """
    path = folder / COSTS
    if not path.is_file():
        return None
    try:
        return TypeAdapter(Costs).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ParnasError(
            f"{path} holds no valid costs of layers ({key}: {first['msg']}); restore or delete it."
        ) from error


def costs_of_run(folder: Path, config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Return the costs that a run folder stores; if it stores none in `metric`, return those of `find_costs`.

    Costs of a search in a trained network without the parent's are not used.

    Raises:
        ParnasError: the stored costs are damaged or lack a candidate, or `find_costs` fails.
    """
    costs = read_costs(folder)
    if costs is None or costs.metric != metric or (costs.parent is None) != (config.search.parent is None):
        return find_costs(config, metric, reporter)
    if missing := [name for name in _names_to_cost(config) if name not in costs.per_layer]:
        raise ParnasError(
            f"{folder / COSTS} has no cost of {', '.join(missing)}; restore it, or delete it to find the costs again."
        )
    return costs


def write_costs(costs: Costs, folder: Path) -> None:
    """Write the costs of layers to `costs.json` in a run folder."""
    write_json(folder / COSTS, asdict(costs))


def _names_to_cost(config: Config) -> list[str]:
    """Return the names of the layers whose costs are needed: the candidates and the layers of all references."""
    return list(dict.fromkeys([*config.search.candidates, ATTENTION, FEED_FORWARD, *(_parent_layers(config) or ())]))


def count_costs(config: Config, metric: Literal["macs", "parameters", "cache"]) -> Costs:
    """Return the costs of the candidates, counted from their shapes, in the unit `UNITS[metric]`.

    Raises:
        ParnasError: the metric is `cache`, but with `model.mem_len` 0 the interleaved network keeps no memory.
    """
    per_layer = {}
    for name in _names_to_cost(config):
        if metric == "cache":
            with torch.random.fork_rng(devices=[]):
                layer = make_layer(name, config.model)
            per_layer[name] = float(cache_size(layer, config))
            continue
        with torch.device("meta"):  # shapes without memory
            layer = make_layer(name, config.model)
        if metric == "parameters":
            per_layer[name] = float(sum(parameter.numel() for parameter in layer.parameters()))
        else:
            per_layer[name] = layer.multiply_adds(config.data.tgt_len, config.model.reach)
    if metric == "cache" and not per_layer[ATTENTION]:
        raise ParnasError("The metric cache compares with the memory of attention, which is 0; raise model.mem_len.")
    return _costs_for(config, metric, per_layer)


def cache_size(layer: Block, config: Config) -> int:
    """Return how many numbers a layer keeps from one segment to the next in generation, when its memory is full."""
    plain, tgt_len, memory = config.model.without_clusters(), config.data.tgt_len, None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # its random weights must not change a training
        network = TransformerXL(plain, [layer], vocab_size=2).eval()
        for _ in range(1 + math.ceil(layer.memory_tokens(plain.reach) / tgt_len)):
            memory = network(torch.zeros(1, tgt_len, dtype=torch.long), memory, inference=True).memory
    return count_numbers(memory)


def penalty(pi: Tensor, costs: Tensor, target: float) -> Tensor:
    """Return max(0, expected cost / target - 1)², a scalar that is 0 if the expected cost is within the target.

    The expected cost is the sum of pi · costs over all blocks and candidates, differentiable in pi [N, C] (N blocks, C
    candidates). `costs` [C] and `target` are shares of the reference's cost.
    """
    # The cost of an architecture is a sum over blocks, so its expectation is linear in pi (FBNet, Wu et al. 2019,
    # equation 5). The hinge leaves alpha alone below the target (PLANER, arXiv 2208.14580, section 3). Squared, it
    # vanishes smoothly: Adam normalises gradients, so the plain hinge would push with full force at every crossing of
    # the target, and end far below it.
    return (pi @ costs).sum().div(target).sub(1).clamp(min=0).square()
