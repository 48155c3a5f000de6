"""Costs of architectures: the sum over the blocks, in multiply-adds, parameters or measured latency.

The unit of cost targets is the cost of the interleaved network of the same depth. Embedding and softmax, which all
architectures share, are left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from parnas.architecture import ATTENTION, FEED_FORWARD, Architecture
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.model.layers import make_layer
from parnas.nas.latency_table import cached_profile, read_profile
from parnas.runs.files import read_json, write_json
from parnas.training.progress import Reporter

Metric = Literal["latency", "macs", "parameters"]
UNITS: dict[Metric, str] = {"latency": "ms per batch", "macs": "multiply-adds per token", "parameters": "parameters"}
COSTS = "costs.json"


@dataclass(frozen=True)
class Costs:
    """The cost of each layer, and that of the interleaved network of the searched depth."""

    metric: Metric
    per_layer: Mapping[str, float]  # by layer name
    interleaved: float

    def cost(self, layers: Iterable[str]) -> float:
        """Return the cost of an architecture's blocks, in the metric's unit."""
        return sum(self.per_layer[name] for name in layers)

    def share(self, layers: Iterable[str]) -> float:
        """Return the cost of the blocks as a share of the interleaved network's."""
        return self.cost(layers) / self.interleaved

    def relative(self, candidates: Sequence[str]) -> Tensor:
        """Return the costs of candidates as shares of the interleaved network's, [candidates]."""
        return torch.tensor([self.per_layer[name] / self.interleaved for name in candidates])


def make_costs(metric: Metric, per_layer: Mapping[str, float], blocks: int) -> Costs:
    """Return costs from those of the layers, which must include attention and feed-forward."""
    return Costs(metric, dict(per_layer), sum(per_layer[name] for name in Architecture.parse(f"interleaved-{blocks}")))


def find_costs(config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Return the costs of the candidates: counted, read from the profile in `search.cost.table`, or measured.

    Raises:
        ParnasError: the profile is of other shapes, or lacks a candidate.
    """
    if metric != "latency":
        return count_costs(config, metric)
    table = config.search.cost.table
    profile = cached_profile(config, reporter) if table is None else read_profile(Path(table))
    profile.refuse_other_shapes(config)
    per_layer = {
        name: max(0.0, profile.latency(name, "inference")) for name in _names_to_cost(config)
    }  # noise may be below
    return make_costs(metric, per_layer, config.search.blocks)


def read_costs(folder: Path) -> Costs | None:
    """Return the costs that `write_costs` wrote into a run folder; `None` where there are none."""
    path = folder / COSTS
    if not path.is_file():
        return None
    try:
        costs = TypeAdapter(Costs).validate_python(read_json(path))
    except ValidationError as error:
        raise ParnasError(f"{path} holds no costs of layers ({error.errors()[0]['msg']}); restore it.") from error
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs.per_layer.values()):
        raise ParnasError(f"{path} holds costs of layers that are no numbers of 0 or more; restore it.")
    if not (math.isfinite(costs.interleaved) and costs.interleaved > 0):
        raise ParnasError(f"{path} holds no cost above 0 of the interleaved network; restore it.")
    return costs


def costs_of_run(folder: Path, config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Return the costs stored in a run folder, or new ones where it has none of this metric."""
    costs = read_costs(folder)
    if costs is None or costs.metric != metric:
        return find_costs(config, metric, reporter)
    if missing := [name for name in _names_to_cost(config) if name not in costs.per_layer]:
        raise ParnasError(f"{folder / COSTS} has no cost of {', '.join(missing)}; restore it, or delete it.")
    return costs


def write_costs(costs: Costs, folder: Path) -> None:
    """Write the costs of a search into its run folder."""
    write_json(folder / COSTS, asdict(costs))


def _names_to_cost(config: Config) -> list[str]:
    """Return the candidates of a search and the layers of the interleaved network."""
    return list(dict.fromkeys([*config.search.candidates, ATTENTION, FEED_FORWARD]))


def count_costs(config: Config, metric: Literal["macs", "parameters"]) -> Costs:
    """Return costs that follow from the shapes alone."""
    per_layer = {}
    for name in _names_to_cost(config):
        with torch.device("meta"):
            layer = make_layer(name, config.model)
        if metric == "parameters":
            per_layer[name] = float(sum(parameter.numel() for parameter in layer.parameters()))
        else:
            per_layer[name] = layer.multiply_adds(config.data.tgt_len, config.model.reach)
    return make_costs(metric, per_layer, config.search.blocks)


def penalty(pi: Tensor, costs: Tensor, target: float) -> Tensor:
    """Return the squared relative excess of the expected cost over the target, a scalar; zero below the target.

    max(0, sum of pi · costs / target − 1)², differentiable in pi [blocks, candidates], with costs [candidates] as
    shares of the interleaved network's. The expectation is that of FBNet (Wu et al. 2019, equation 5), the hinge at the
    target that of PLANER (arXiv 2208.14580, section 3). It is squared so that it vanishes smoothly: with Adam's
    normalised steps the plain hinge, which pushes with full force at every crossing, ends far below the target.
    """
    return (pi @ costs).sum().div(target).sub(1).clamp(min=0).square()
