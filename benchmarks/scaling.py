"""Measure how time and memory of a training step grow with each shape: `python benchmarks/scaling.py`.

Starting from a base point, one shape at a time is changed: number of blocks, width (with inner width and heads),
segment length, memory length and batch size. A line is fitted to the logarithms by least squares; with slope p, twice
the shape costs 2^p times as much. A step is that of `train_step.py`, with full memory.

Each point is measured in a new process. Its memory is the peak minus the peak after a step of a tiny network: of the
resident set on a CPU, of torch's allocator on CUDA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from networks import Parnas, Size
from train_step import WARM_UP, TrainStep, draw_segments

from parnas.config.schema import ModelConfig
from parnas.training.device import Device

VOCABULARY = 1000  # so small that blocks, not the softmax, decide
HEAD_WIDTH = 32


@dataclass(frozen=True)
class Point:
    """The shapes of a training step."""

    blocks: int
    width: int
    segment: int
    memory: int
    batch: int

    def size(self) -> Size:
        """Return a network of alternating attention and feed-forward layers."""
        heads = max(1, self.width // HEAD_WIDTH)
        shapes = {"d_model": self.width, "n_heads": heads, "d_inner": 4 * self.width, "mem_len": self.memory}
        model = ModelConfig.model_validate({**shapes, "dropout": 0.0})
        return Size(str(self), model, self.blocks // 2, VOCABULARY, self.batch, self.segment)


class Plan(NamedTuple):
    """Shapes to vary, and number of measurements."""

    axes: tuple[str, ...]
    factors: tuple[float, ...]
    passes: int  # over all points, so that a slow minute does not hit one of them alone
    rounds: int  # steps in each pass


AXES = ("blocks", "width", "segment", "memory", "batch")
PLANS = {
    "tiny": Plan(("blocks",), (1, 2), passes=1, rounds=2),
    "short": Plan(AXES, (0.5, 1, 2, 4), passes=1, rounds=4),
    "full": Plan(AXES, (0.5, 1, 2, 4), passes=3, rounds=8),
}
TINY = Point(blocks=2, width=32, segment=4, memory=4, batch=2)
BASES = {
    "cpu": Point(blocks=8, width=128, segment=32, memory=32, batch=8),
    "cuda": Point(blocks=8, width=512, segment=128, memory=128, batch=16),
}


def measure(point: Point, device: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of each step at a point, and its peak memory in bytes; meant for a new process."""
    chosen = harness.choose(device, "auto")
    make_step(TINY, chosen, rounds=1)()
    before = peak_memory(chosen)
    # The memory is full once as many segments are read as it holds.
    warm_up = WARM_UP + point.memory // point.segment
    step = make_step(point, chosen, warm_up + rounds)
    seconds = harness.take_turns({"step": step}, rounds, warm_up, chosen.device)["step"]
    return {"seconds": seconds, "peak_bytes": peak_memory(chosen) - before}


def make_step(point: Point, device: Device, rounds: int) -> TrainStep:
    """Return the training step of a new network on random tokens."""
    torch.manual_seed(1)
    size = point.size()
    network = Parnas(size).to(device.device).train()
    return TrainStep(network, draw_segments(size, rounds, device.device), device)


def peak_memory(device: Device) -> int:
    """Return the peak memory of this process so far, in bytes: of torch's allocator on CUDA, else resident."""
    if device.device.type == "cuda":
        return torch.cuda.max_memory_allocated(device.device)
    return harness.peak_memory()


def sweep(base: Point, plan: Plan) -> dict[str, list[Point]]:
    """Return the points of each axis: the base point with that shape multiplied by each factor."""
    return {
        axis: [replace(base, **{axis: int(getattr(base, axis) * factor)}) for factor in plan.factors]
        for axis in plan.axes
    }


def measure_all(points: Sequence[Point], device: str, plan: Plan) -> dict[Point, dict[str, Any]]:
    """Measure every point in every pass; return the seconds of all steps and the largest memory peak of each point."""
    found: dict[Point, dict[str, Any]] = {point: {"seconds": [], "peak_bytes": 0} for point in points}
    with harness.processes(calls=1) as pool:
        for _ in range(plan.passes):
            for point, record in found.items():
                measured = pool.submit(measure, point, device, plan.rounds).result()
                record["seconds"] += measured["seconds"]
                record["peak_bytes"] = max(record["peak_bytes"], measured["peak_bytes"])
    return found


def fit_exponent(shapes: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line through the logarithms; `None` if a value is not positive."""
    if min(measured) <= 0:
        return None
    return float(np.polyfit(np.log(shapes), np.log(measured), 1)[0])


def fit_all(points: Mapping[str, Sequence[Point]], records: Mapping[Point, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the exponents of seconds per step and of bytes, for each axis."""
    fits = []
    for axis, along in points.items():
        shapes = [getattr(point, axis) for point in along]
        seconds, peaks = ([records[point][key] for point in along] for key in ("median_seconds", "peak_bytes"))
        exponents = {"seconds_exponent": fit_exponent(shapes, seconds), "memory_exponent": fit_exponent(shapes, peaks)}
        fits.append({"axis": axis, "from": shapes[0], "to": shapes[-1], **exponents})
    return fits


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    plan, device = PLANS[parsed.size], harness.choose(parsed.device, "auto")
    base = TINY if parsed.size == "tiny" else BASES[device.device.type]
    points = sweep(base, plan)
    measured = measure_all([point for along in points.values() for point in along], str(device.device), plan)
    records = {}
    for point, found in measured.items():
        seconds = harness.describe_seconds(found["seconds"])
        speed = point.size().tokens / seconds["median_seconds"]
        records[point] = {**asdict(point), **seconds, "tokens_per_second": speed, "peak_bytes": found["peak_bytes"]}
    fits = fit_all(points, records)
    harness.print_table(f"Training steps, {device.precision}", [describe(record) for record in records.values()])
    harness.print_table("Twice the shape costs 2^exponent times as much", fits)
    payload = {
        "precisions": [device.precision],
        "base": asdict(base),
        "records": list(records.values()),
        "fits": fits,
    }
    harness.write_result("scaling", device, payload, parsed)


def describe(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    shapes = {axis: record[axis] for axis in AXES}
    speed = {"ms": 1000 * record["median_seconds"], "tokens/s": record["tokens_per_second"]}
    return {**shapes, **speed, "peak MB": record["peak_bytes"] / 1e6}


if __name__ == "__main__":
    harness.run(main)
