"""Costs of architectures: the sum over the blocks, in multiply-adds, parameters or measured latency.

The unit of cost targets is the cost of the interleaved network of the same depth. Embedding and softmax, which all
architectures share, are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from parnas.architecture import ATTENTION, FEED_FORWARD, Architecture
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.model.layers import make_layer
from parnas.nas.latency_table import cached_profile, read_profile
from parnas.runs.files import read_json, write_json
from parnas.training.progress import Reporter

__all__ = ["Costs", "Metric", "costs_of_run", "find_costs"]

Metric = Literal["latency", "macs", "parameters"]
UNITS: dict[Metric, str] = {"latency": "ms per batch", "macs": "multiply-adds per token", "parameters": "parameters"}
_COSTS = "costs.json"


@dataclass(frozen=True)
class Costs:
    """The cost of each layer, and of the interleaved network of the searched depth."""

    metric: Metric
    per_layer: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]  # by layer name
    interleaved: Annotated[float, Field(gt=0, allow_inf_nan=False)]

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
    """Return the costs of layers, which must include attention and feed-forward, with their interleaved network's."""
    return Costs(metric, dict(per_layer), sum(per_layer[name] for name in Architecture.parse(f"interleaved-{blocks}")))


def find_costs(config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Return the costs of the candidates: counted, read from the profile in `search.cost.table`, or measured.

    Raises:
        ParnasError: the profile was measured with other shapes, or lacks a candidate.
    """
    if metric != "latency":
        return count_costs(config, metric)
    table = config.search.cost.table
    profile = cached_profile(config, reporter) if table is None else read_profile(Path(table))
    profile.refuse_other_shapes(config)
    # A latency is a difference of measurements, so noise can make the one of a cheap layer negative.
    per_layer = {name: max(0.0, profile.latency(name)) for name in _names_to_cost(config)}
    return make_costs(metric, per_layer, config.search.blocks)


def read_costs(folder: Path) -> Costs | None:
    """Return the costs that `write_costs` wrote into a run folder; `None` where there are none."""
    path = folder / _COSTS
    if not path.is_file():
        return None
    try:
        return TypeAdapter(Costs).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ParnasError(f"{path} holds no valid costs of layers ({key}: {first['msg']}); restore it.") from error


def costs_of_run(folder: Path, config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Return the costs stored in a run folder, or new ones where it has none of this metric."""
    costs = read_costs(folder)
    if costs is None or costs.metric != metric:
        return find_costs(config, metric, reporter)
    if missing := [name for name in _names_to_cost(config) if name not in costs.per_layer]:
        raise ParnasError(f"{folder / _COSTS} has no cost of {', '.join(missing)}; restore it, or delete it.")
    return costs


def write_costs(costs: Costs, folder: Path) -> None:
    """Write the costs of a search into its run folder."""
    write_json(folder / _COSTS, asdict(costs))


def _names_to_cost(config: Config) -> list[str]:
    """Return the candidates of a search and the layers of the interleaved network."""
    return list(dict.fromkeys([*config.search.candidates, ATTENTION, FEED_FORWARD]))


def count_costs(config: Config, metric: Literal["macs", "parameters"]) -> Costs:
    """Return the costs of the candidates in multiply-adds per token or in parameters, counted from their shapes."""
    per_layer = {}
    for name in _names_to_cost(config):
        with torch.device("meta"):  # shapes without memory
            layer = make_layer(name, config.model)
        if metric == "parameters":
            per_layer[name] = float(sum(parameter.numel() for parameter in layer.parameters()))
        else:
            per_layer[name] = layer.multiply_adds(config.data.tgt_len, config.model.reach)
    return make_costs(metric, per_layer, config.search.blocks)


def penalty(pi: Tensor, costs: Tensor, target: float) -> Tensor:
    """Return the squared relative excess of the expected cost over the target, a scalar; zero below the target.

    max(0, sum of pi · costs / target - 1)², differentiable in pi [N, C] (blocks, candidates), with costs [C] and target
    as shares of the interleaved network's cost.
    """
    # The cost of an architecture is a sum over blocks, so its expectation is linear in pi (FBNet, Wu et al. 2019,
    # equation 5). The hinge leaves alpha alone below the target (PLANER, arXiv 2208.14580, section 3). Squared, it
    # vanishes smoothly: Adam normalises gradients, so the plain hinge would push with full force at every crossing of
    # the target, and end far below it.
    return (pi @ costs).sum().div(target).sub(1).clamp(min=0).square()
