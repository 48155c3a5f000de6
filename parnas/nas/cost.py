"""What architectures cost: the sum over their blocks, in multiply-adds, parameters or measured latency.

The unit in which targets are given is the cost of the interleaved network of the same depth. Embedding and softmax,
which every architecture has alike, are left out.
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
from parnas.config import Config
from parnas.errors import ParnasError
from parnas.files import read_json, write_json
from parnas.model.layers import make_layer
from parnas.nas.profile import keep_profile, read_profile
from parnas.training.reporter import Reporter

Metric = Literal["latency", "macs", "parameters"]
UNITS: dict[Metric, str] = {"latency": "ms per batch", "macs": "multiply-adds per token", "parameters": "parameters"}
COSTS = "costs.json"


@dataclass(frozen=True)
class Costs:
    """What each layer costs, and the interleaved network of the searched depth."""

    metric: Metric
    of: Mapping[str, float]  # by layer name
    interleaved: float

    def cost(self, layers: Iterable[str]) -> float:
        """Of the blocks of an architecture, in the metric's unit."""
        return sum(self.of[name] for name in layers)

    def share(self, layers: Iterable[str]) -> float:
        """Cost of the blocks over that of the interleaved network's."""
        return self.cost(layers) / self.interleaved

    def relative(self, candidates: Sequence[str]) -> Tensor:
        """Costs of candidates as shares of the interleaved network's, [candidates]."""
        return torch.tensor([self.of[name] / self.interleaved for name in candidates])


def make_costs(metric: Metric, of: Mapping[str, float], blocks: int) -> Costs:
    """Costs from those of the layers, which include attention and feed-forward."""
    return Costs(metric, dict(of), sum(of[name] for name in Architecture.parse(f"interleaved-{blocks}")))


def find_costs(config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """Costs of the candidates in a metric: counted, read from the profile in `search.cost.table`, or measured.

    Raises `ParnasError` for a profile of other shapes or without a candidate.
    """
    if metric != "latency":
        return count_costs(config, metric)
    table = config.search.cost.table
    profile = keep_profile(config, reporter) if table is None else read_profile(Path(table))
    profile.refuse_other_shapes(config)
    of = {name: max(0.0, profile.latency(name, "inference")) for name in names_to_cost(config)}  # noise may be below
    return make_costs(metric, of, config.search.blocks)


def read_costs(folder: Path) -> Costs | None:
    """What `write_costs` wrote into a run folder; none where there is nothing."""
    path = folder / COSTS
    if not path.is_file():
        return None
    try:
        costs = TypeAdapter(Costs).validate_python(read_json(path))
    except ValidationError as error:
        raise ParnasError(f"{path} holds no costs of layers ({error.errors()[0]['msg']}); restore it.") from error
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs.of.values()):
        raise ParnasError(f"{path} holds costs of layers that are no numbers of 0 or more; restore it.")
    if not (math.isfinite(costs.interleaved) and costs.interleaved > 0):
        raise ParnasError(f"{path} holds no cost above 0 of the interleaved network; restore it.")
    return costs


def costs_of_run(folder: Path, config: Config, metric: Metric, reporter: Reporter) -> Costs:
    """The costs that a run folder holds, or new ones where it holds none of that metric."""
    costs = read_costs(folder)
    if costs is None or costs.metric != metric:
        return find_costs(config, metric, reporter)
    if missing := [name for name in names_to_cost(config) if name not in costs.of]:
        raise ParnasError(f"{folder / COSTS} has no cost of {', '.join(missing)}; restore it, or delete it.")
    return costs


def write_costs(costs: Costs, folder: Path) -> None:
    """Keep the costs of a search in its run folder."""
    write_json(folder / COSTS, asdict(costs))


def names_to_cost(config: Config) -> list[str]:
    """The candidates of a search, and what the interleaved network is made of."""
    return list(dict.fromkeys([*config.search.candidates, ATTENTION, FEED_FORWARD]))


def count_costs(config: Config, metric: Literal["macs", "parameters"]) -> Costs:
    """Costs that follow from the shapes alone."""
    of = {}
    for name in names_to_cost(config):
        with torch.device("meta"):
            layer = make_layer(name, config.model)
        if metric == "parameters":
            of[name] = float(sum(parameter.numel() for parameter in layer.parameters()))
        else:
            of[name] = layer.multiply_adds(config.data.tgt_len, config.model.reach)
    return make_costs(metric, of, config.search.blocks)


def penalty(pi: Tensor, costs: Tensor, target: float) -> Tensor:
    """Square of the share by which the expected cost exceeds the target, zero below it: a scalar, differentiable in pi.

    max(0, sum of pi · costs / target − 1)², with pi [blocks, candidates] and costs [candidates] as shares of the
    interleaved network's (FBNet, Wu et al. 2019, equation 5, for the expectation; PLANER, arXiv 2208.14580, section 3,
    for its end at the target). Squared, so that it fades out there: by Adam's steps the hinge itself, which pushes with
    full force at every crossing, ends far below.
    """
    return (pi @ costs).sum().div(target).sub(1).clamp(min=0).square()
