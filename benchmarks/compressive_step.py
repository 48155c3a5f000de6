"""Cost of compressive memory: a training step beside plain memory of the same attention span.

    python benchmarks/compressive_step.py [--short | --tiny]

All networks of a size take turns. A step is forward, backward and the update of all weights, with memory carried on.
The span is what attention sees besides the segment: mem_len + cmem_len positions, or mem_len alone where memory is
plain. Beside it stands plain memory that reaches as far back in tokens: mem_len + ratio · cmem_len. The goal is 1.35.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

import harness
import numpy as np
import torch

from parnas.architecture import Architecture
from parnas.config.schema import MemoryConfig, ModelConfig
from parnas.model.blocks import Block
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.latency import time_in_turns
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped

GOAL = 1.35
FUNCTIONS: tuple[str, ...] = get_args(MemoryConfig.model_fields["function"].annotation)
LOSSES: tuple[str, ...] = get_args(MemoryConfig.model_fields["loss"].annotation)
DISTANCES: tuple[str, ...] = get_args(MemoryConfig.model_fields["distance"].annotation)
TRAINED = "conv", "dilated_conv"
PLAIN, FAR = "plain, same span", "plain, same reach"


@dataclass(frozen=True)
class Size:
    """Shapes of one comparison."""

    layers: int
    model: dict[str, Any]
    vocab_size: int
    batch_size: int
    tgt_len: int
    mem_len: int
    memory: dict[str, Any]


SMALL = Size(
    3, {"d_model": 128, "n_heads": 4, "d_inner": 512}, 1000, 32, 16, 16, {"cmem_len": 16, "ratio": 3}
)  # of benchmarks/compressive.yaml
LARGE = Size(3, {"d_model": 256, "n_heads": 8, "d_inner": 1024}, 8000, 8, 128, 128, {"cmem_len": 128, "ratio": 4})
TINY = Size(1, {"d_model": 16, "n_heads": 2, "d_inner": 32}, 50, 2, 4, 4, {"cmem_len": 4, "ratio": 2})


def variants(size: Size) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the networks by name: the letter of their attention, and the changes of their configuration."""
    slots, ratio = size.memory["cmem_len"], size.memory["ratio"]
    found: dict[str, tuple[str, dict[str, Any]]] = {
        PLAIN: ("s", {"mem_len": size.mem_len + slots}),
        FAR: ("s", {"mem_len": size.mem_len + ratio * slots}),
    }
    for function in FUNCTIONS:
        for loss in LOSSES if function in TRAINED else LOSSES[:1]:
            for distance in DISTANCES:
                told = ", ".join([function, *([loss] if function in TRAINED else []), distance])
                found[told] = "c", {"memory": {**size.memory, "function": function, "loss": loss, "distance": distance}}
    return found


def make_step(size: Size, letter: str, changes: dict[str, Any], device: Device) -> Callable[[], None]:
    """Return a call that trains a network on the next segment."""
    torch.manual_seed(1)
    config = ModelConfig.model_validate({**size.model, "mem_len": size.mem_len, **changes})
    network = TransformerXL.build(config, Architecture.parse(f"({letter}f)*{size.layers}"), size.vocab_size)
    network.to(device.device).train()
    compressing = network.compression_names()
    named = dict(network.named_parameters())
    groups = [{name: of for name, of in named.items() if (name in compressing) == wanted} for wanted in (False, True)]
    optimizers = [(make_adamw(group, 1e-4, 0.01), list(group.values())) for group in groups if group]
    ids = harness.draw_ids(size.vocab_size, (size.batch_size, size.tgt_len + 1))
    segment, targets = (torch.from_numpy(part).to(device.device) for part in (ids[:, :-1], ids[:, 1:]))
    memory: list[Memory | None] = [None]

    def step() -> None:
        with device.autocast():
            output = network(segment, memory[0])
            loss = network.score(output, targets).mean()
        memory[0] = output.memory
        (loss if output.loss is None else loss + output.loss).backward()
        for optimizer, parameters in optimizers:
            step_clipped(optimizer, gradient_norm(parameters), 1.0)

    needed = cast(Block, network.blocks[0]).memory_tokens(config.reach)
    for _ in range(2 + needed // size.tgt_len):
        step()
    return step


def describe(size: Size) -> str:
    """Return the shapes in words."""
    lengths = f"segment {size.tgt_len}, memory {size.mem_len} + {size.memory['cmem_len']}"
    return f"{lengths}, d_model {size.model['d_model']}, {2 * size.layers} blocks"


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    sizes = {"tiny": {"tiny": TINY}, "short": {"small": SMALL}}.get(parsed.size, {"small": SMALL, "large": LARGE})
    rounds = {"tiny": {"tiny": 1}, "short": {"small": 40}}.get(parsed.size, {"small": 60, "large": 20})
    results = []
    for name, size in sizes.items():
        for precision in ("bf16",) if parsed.size == "short" else ("bf16", "fp32"):
            device = harness.choose(parsed.device, precision)
            calls = {key: make_step(size, *of, device) for key, of in variants(size).items()}
            times = time_in_turns(calls, device, rounds[name])
            rows = [
                {
                    "memory": key,
                    "ms": float(np.median(of)),
                    "of plain, same span": float(np.median(of / times[PLAIN])),
                }
                for key, of in times.items()
            ]
            harness.print_table(f"A training step, {precision}: {describe(size)}", rows)
            times_ms = {key: of.tolist() for key, of in times.items()}
            results.append({"size": name, "precision": precision, "rounds": rounds[name], "ms": times_ms, "rows": rows})
    slowest = max(
        row["of plain, same span"]
        for result in results
        for row in result["rows"]
        if row["memory"] != FAR and not row["memory"].startswith("most_used")
    )
    print(f"slowest but for most_used: {slowest:.2f} of plain memory with the same span (goal {GOAL})")
    payload = {
        "precisions": sorted({of["precision"] for of in results}),
        "slowest": slowest,
        "goal": GOAL,
        "results": results,
    }
    harness.write_result("compressive_step", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
