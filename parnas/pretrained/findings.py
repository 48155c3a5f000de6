"""Findings of a probe: the layers that a model needs, its speed without the others, the best network within a budget.

The networks are chosen by the sum of KL divergences of their replaced layers, exactly (`parnas/nas/knapsack.py`); then
the loss of each whole network is measured. Times are measured too: each layer and each replacement runs on the text of
the probe, in turns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parnas.architecture import ATTENTION, IDENTITY, Architecture
from parnas.errors import OverBudget, ParnasError
from parnas.figures.probe import draw_probe
from parnas.figures.report.page import write_report
from parnas.nas.budget import Budget
from parnas.nas.cost import Costs
from parnas.nas.knapsack import is_limited, probabilities
from parnas.pretrained.parent import Parent
from parnas.pretrained.probe import Probe, mean_loss, measure_networks, probe
from parnas.runs.files import write_json
from parnas.runs.records import ProbeConditions
from parnas.runs.run import PROBE
from parnas.training.device import Device
from parnas.training.latency import time_in_turns

__all__ = ["Findings", "check_folder", "write_findings"]

TARGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
_TEMPERATURE = 0.2  # nats; it scales log pi, and so does not change which network is the best
_MOST_NATS = 30.0
_TOLERANCE = 0.02  # rise of the perplexity up to which a layer is not needed


class Times(NamedTuple):
    """Milliseconds of the parts of a model for the text of the probe."""

    fixed: float  # softmax
    layers: dict[str, float]  # by the name of a layer or of a replacement

    def total(self, names: Sequence[str]) -> float:
        """Return the milliseconds of a network of some layers."""
        return self.fixed + sum(self.layers[name] for name in names)


@dataclass(frozen=True)
class Finding:
    """A network with some layers replaced, without training."""

    layers: tuple[str, ...]
    kl: float  # nats per token, measured
    rise: float  # of the loss, nats per token, measured
    predicted_kl: float  # sums over the replaced layers
    predicted_rise: float
    latency: float  # of the layers, as a share of the model's
    speed: float  # of the whole model, relative to the unchanged one

    @property
    def perplexity(self) -> float:
        """Perplexity relative to the unchanged model's, minus 1."""
        return math.expm1(min(self.rise, _MOST_NATS))

    def to_dict(self) -> dict[str, Any]:
        """Return the values, for `probe.json`."""
        return {**vars(self), "layers": str(Architecture(self.layers)), "perplexity": self.perplexity}


@dataclass(frozen=True)
class Findings:
    """The results of a probe and what follows from them."""

    probe: Probe
    times: Times
    attention: tuple[Finding, ...]  # networks with ever fewer attention layers, all other layers kept
    front: tuple[Finding, ...]  # the best network within each share of the latency
    conditions: ProbeConditions | None = None  # text and machine

    @property
    def enough(self) -> Finding | None:
        """The network of the fewest attention layers that predicts about as well as the model; `None` without one."""
        enough = [each for each in self.attention if each.perplexity <= _TOLERANCE]
        return min(enough, key=lambda each: sum(is_limited(name, ATTENTION) for name in each.layers), default=None)

    @property
    def fastest(self) -> Finding | None:
        """The fastest network that predicts about as well as the model; `None` without one."""
        about_equal = [each for each in (*self.attention, *self.front) if each.perplexity <= _TOLERANCE]
        return max(about_equal, key=lambda each: each.speed, default=None)

    @property
    def answer(self) -> str:
        """Which attention layers the model needs, and how fast it is with cheaper layers too, in a sentence each."""
        return " ".join(filter(None, [self._describe_attention(), self._describe_cheaper()]))

    def _describe_attention(self) -> str:
        """Return which attention layers the model needs, in a sentence."""
        blocks = [number for number, name in enumerate(self.probe.layers, 1) if is_limited(name, ATTENTION)]
        fewest = self.enough
        if not blocks:
            return "The model has no attention layer."
        if fewest is None:
            least = self.attention[0]
            needed_all = f"All {len(blocks)} attention layers are needed: without the least important one"
            one = "The attention layer is needed: without it"
            return f"{needed_all if len(blocks) > 1 else one}, perplexity is {least.perplexity:.1%} higher."
        needed = [number for number in blocks if fewest.layers[number - 1] != IDENTITY]
        gone = len(blocks) - len(needed)
        needs = f"Layers {list_numbers(needed)} need attention" if needed else "No layer needs attention"
        if len(needed) == 1:
            needs = f"Layer {needed[0]} needs attention"
        others = f"all {gone}" if not needed else f"the other {gone}" if gone > 1 else "the other"
        without = f"without it in {others}" if len(blocks) > 1 else "without it"
        return f"{needs}; {without} the model is {describe_speed(fewest)}."

    def _describe_cheaper(self) -> str:
        """Return how fast the model is with cheaper layers in a sentence, or nothing if the first sentence says it."""
        fastest, named = self.fastest, 1.0 if self.enough is None else self.enough.speed
        if fastest is None or round(fastest.speed, 1) <= round(named, 1):
            return ""
        replaced = [name for name, own in zip(fastest.layers, self.probe.layers, strict=True) if name != own]
        counts = {"left out": replaced.count(IDENTITY), "cut down": len(replaced) - replaced.count(IDENTITY)}
        (verb, count), *others = ((verb, count) for verb, count in counts.items() if count)
        layers = f"{count} of its {len(self.probe.layers)} layers {verb}"
        layers += "".join(f" and {count} {verb}" for verb, count in others)
        return f"With {layers} it is {describe_speed(fastest)}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for `probe.json`."""
        found = self.probe
        return {
            "answer": self.answer,
            "network": str(Architecture(self.enough.layers if self.enough else found.layers)),
            "loss": found.loss,
            "tokens": found.tokens,
            "layers": list(found.layers),
            "changes": [{name: change._asdict() for name, change in each.items()} for each in found.changes],
            "pairs": [
                {
                    "layers": [pair.first + 1, pair.second + 1],
                    "both": pair.both._asdict(),
                    "predicted": pair.predicted._asdict(),
                }
                for pair in found.pairs
            ],
            "milliseconds": {"softmax": self.times.fixed, **self.times.layers},
            "attention": [each.to_dict() for each in self.attention],
            "front": [each.to_dict() for each in self.front],
            **({} if self.conditions is None else {"conditions": self.conditions.to_dict()}),
        }


def check_folder(folder: Path) -> None:
    """Raise `ParnasError` if a folder for results cannot be made since there is a file in its place."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise ParnasError(f"{existing} is not a folder; choose another one for the results (--out).")


def write_findings(findings: Findings, folder: Path) -> list[Path]:
    """Write `probe.json`, `probe.png`, `attention.png` and `report.html` to a folder; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PROBE, findings.to_dict())
    return [folder / PROBE, *draw_probe(folder), write_report([folder], folder)]


def describe_speed(network: Finding) -> str:
    """Return speed and perplexity of a network relative to the unchanged model, in words."""
    direction = "higher" if network.perplexity >= 0 else "lower"
    return f"{network.speed:.1f} times as fast at {abs(network.perplexity):.1%} {direction} perplexity"


def list_numbers(numbers: Sequence[int]) -> str:
    """Return numbers as in a sentence: 1, 4 and 9."""
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def investigate(
    parent: Parent, ids: Tensor, device: Device, pairs: int, rounds: int, seed: int, note: Callable[[str], None]
) -> Findings:
    """Probe a model, measure the times of its layers, and choose and measure networks.

    Args:
        parent: the model.
        ids: held-out text, [R, L + 1].
        device: where the model is, and the precision of its products.
        pairs: number of pairs of layers that are left out together.
        rounds: how often the time of each layer is measured.
        seed: of the pairs.
        note: receives the progress.
    """
    with device.autocast():
        found = probe(parent, ids, note, pairs, seed)
        times = measure_times(parent, ids, device, rounds)
        own = Costs("latency", times.layers, sum(times.layers[name] for name in parent.layers))
        pi = scores_to_pi(found)
        # 1. Networks with one attention layer less each, all other layers kept.
        attention = [number for number, name in enumerate(parent.layers) if is_limited(name, ATTENTION)]
        keep = [
            {name: chance for name, chance in block.items() if name in (own_name, IDENTITY)}
            if number in attention
            else {own_name: 1.0}
            for number, (own_name, block) in enumerate(zip(parent.layers, pi, strict=True))
        ]
        limits = range(len(attention) - 1, -1 if len(attention) < len(parent.layers) else 0, -1)  # one layer is left
        fewer = [Budget(limits={ATTENTION: most}).most_probable(keep)[0].layers for most in limits]
        # 2. The best network within each share of the latency.
        front = []
        for target in TARGETS:
            try:
                front.append(Budget(own, target).most_probable(pi)[0].layers)
            except OverBudget:
                break
        # 3. Measure all of them as whole networks.
        networks = list(dict.fromkeys([*fewer, *front]))
        note(f"measuring {len(networks)} networks with several layers replaced")
        changes = dict(zip(networks, measure_networks(parent, ids, networks), strict=True))
    whole = times.total(parent.layers)

    def describe(layers: tuple[str, ...]) -> Finding:
        replaced = [(number, name) for number, name in enumerate(layers) if name != parent.layers[number]]
        predicted = [found.changes[number][name] for number, name in replaced]
        change = changes[layers]
        return Finding(
            layers,
            change.kl,
            change.loss,
            sum(each.kl for each in predicted),
            sum(each.loss for each in predicted),
            own.share(layers),
            whole / times.total(layers),
        )

    return Findings(found, times, tuple(map(describe, fewer)), tuple(map(describe, dict.fromkeys(front))))


def scores_to_pi(found: Probe) -> list[dict[str, float]]:
    """Return pi of each layer: the softmax of -KL / e over the layer and its replacements, with a constant e."""
    result = []
    for own, changes in zip(found.layers, found.changes, strict=True):
        scores = {own: 0.0} | {name: each.kl for name, each in changes.items()}
        result.append(probabilities(scores, _TEMPERATURE))
    return result


@torch.no_grad()
def measure_times(parent: Parent, ids: Tensor, device: Device, rounds: int) -> Times:
    """Return the times of the first layer of each name, and of each of its replacements, measured in turns."""
    x = parent.embed(ids[:, :-1])
    calls: dict[str, Callable[[], object]] = {}
    calls["softmax"] = partial(mean_loss, parent, parent.finish(x), ids[:, 1:])
    for number, (own, names) in enumerate(zip(parent.layers, parent.alternatives, strict=True)):
        calls.setdefault(own, partial(parent.run, number, x))
        for name in names:
            if name != IDENTITY:
                calls.setdefault(name, partial(parent.run, number, x, name))
    medians: Mapping[str, float] = {
        name: float(np.median(ms)) for name, ms in time_in_turns(calls, device, rounds, warm_up=1).items()
    }
    return Times(medians["softmax"], {name: medians[name] for name in calls if name != "softmax"} | {IDENTITY: 0.0})
