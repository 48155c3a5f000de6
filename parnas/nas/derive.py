"""From pi to an architecture."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parnas.architecture import Architecture
from parnas.data.streams import StreamHeader
from parnas.errors import ParnasError
from parnas.files import write_text
from parnas.model.transformer_xl import TransformerXL
from parnas.run import PI, Run
from parnas.training.phases import STREAMS
from parnas.yaml_text import to_yaml

SMALL_MARGIN = 0.1


@dataclass(frozen=True)
class BlockChoice:
    """What a block's probabilities say."""

    layer: str
    pi: dict[str, float]
    entropy: float  # nats
    margin: float  # probability of the likeliest candidate above the next


@dataclass(frozen=True)
class Derivation:
    """An architecture and the probabilities that it was derived from."""

    architecture: Architecture
    blocks: tuple[BlockChoice, ...]
    step: int
    parameters: int
    warnings: tuple[str, ...]

    def to_dict(self, run: Run) -> dict[str, Any]:
        """The content of `arch.yaml`."""
        return {
            "arch": str(self.architecture),
            "method": "argmax of pi",
            "run": run.name,
            "step": self.step,
            "counts": self.architecture.counts(),
            "parameters": self.parameters,
            "blocks": [
                {"layer": block.layer, "pi": block.pi, "entropy": block.entropy, "margin": block.margin}
                for block in self.blocks
            ],
            "warnings": list(self.warnings),
        }


def choose(pi: dict[str, float]) -> BlockChoice:
    """The likeliest candidate of one block; the first in the space where two are equal."""
    ranked = sorted(pi.values(), reverse=True)
    entropy = -sum(p * math.log(p) for p in ranked if p > 0)
    margin = ranked[0] - ranked[1] if len(ranked) > 1 else 1.0
    return BlockChoice(max(pi, key=lambda name: pi[name]), pi, entropy, margin)


def derive(run: Run) -> Derivation:
    """The argmax of the last pi of a search (PAR, §3); raises `ParnasError` where the run is no search."""
    config = run.config()
    records = run.records(PI)
    if not records:
        raise ParnasError(f"{run.folder / PI} holds no pi yet; let the search run to its first log line.")
    last, space = records[-1], config.search.candidates
    if any(len(probabilities) != len(space) for probabilities in last["pi"]):
        raise ParnasError(f"{run.folder / PI} does not fit search.space {list(space)}; restore it.")
    blocks = tuple(choose(dict(zip(space, probabilities, strict=True))) for probabilities in last["pi"])
    architecture = Architecture([block.layer for block in blocks])
    warnings = [
        f"block {number} is undecided: {block.layer} leads by {block.margin:.3f} only"
        for number, block in enumerate(blocks, 1)
        if block.margin < SMALL_MARGIN
    ]
    if not run.finished():
        warnings.append(f"the search has not ended; this is pi after step {last['step']} of {config.search.steps}")
    architecture.canonical()  # refuses identity alone
    vocab_size = StreamHeader.read(run.folder / STREAMS).vocab_size
    with torch.device("meta"):
        network = TransformerXL.build(config.model, architecture, vocab_size)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Derivation(architecture, blocks, last["step"], parameters, tuple(warnings))


def write_derivation(derivation: Derivation, run: Run, path: Path) -> None:
    """Write `arch.yaml`."""
    write_text(path, to_yaml(derivation.to_dict(run)))
