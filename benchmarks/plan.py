"""Compare the memory that `parnas plan` counts with the memory that training uses: `python benchmarks/plan.py`.

Each network is trained for some steps in a new process, with the functions that `Trainer` uses: forward with full
memory, backward, update. The measured memory is the peak of the resident set minus its peak after steps of a tiny
network, which load libraries and kernels. The planned memory is the sum of parameters, both moments of AdamW, memory of
segments and the peak of a step, without the margin and the amount reserved for CUDA.

Each network is measured twice. First, each larger tensor has its own memory mapping, so the resident set is the size of
the tensors and of oneDNN's workspace; the plan must be close to it. Second, freed memory stays in one heap, which makes
training on a CPU faster (`keep_freed_memory`); then fragmentation is added, which the plan does not count.
"""

import ctypes
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import harness
import numpy as np
import torch

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.batching import Batch
from parnas.model.estimators import gumbel_softmax
from parnas.model.gates import DetachedGates, Gates
from parnas.model.memory import Memory
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import Kind
from parnas.training.device import Device, keep_freed_memory
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped
from parnas.training.planning.resource_plan import estimate_step, memory_by_use
from parnas.training.weight_optimizer import GradientAccumulator

GOAL = 0.15  # largest allowed relative error of the plan


class Case(NamedTuple):
    """A network to train: a phase of a configuration."""

    phase: Kind
    vocabulary: int
    changes: Mapping[str, Any]  # of the default configuration, as `Config.replace` takes them

    def config(self, precision: str) -> Config:
        """Return the whole configuration."""
        return Config().replace(runtime__precision=precision, **self.changes)

    def counts(self) -> list[int]:
        """Return the frequencies of the ids of `harness.draw_ids`, up to a factor."""
        return [-(-self.vocabulary * 1000 // (rank + 1)) for rank in range(self.vocabulary)]


def shapes(width: int, batch_size: int, length: int, **more: Any) -> dict[str, Any]:
    """Return settings for a width, a batch size and an equal length of segment and memory."""
    model = {"model__d_model": width, "model__n_heads": width // 32, "model__d_inner": 4 * width}
    return {**model, "data__batch_size": batch_size, "data__tgt_len": length, "model__mem_len": length, **more}


TINY = {"tiny network": Case("retrain", 50, shapes(32, 2, 4, model__arch="sf"))}
CASES = {
    "attention and feed-forward": Case("retrain", 8000, shapes(512, 16, 128, model__arch="(sf)*6")),
    "adaptive softmax": Case(
        "retrain", 80_000, shapes(384, 16, 128, model__arch="(sf)*4", model__cutoffs=(10_000, 30_000))
    ),
    "search, all candidates": Case(
        "search", 8000, shapes(384, 16, 96, search__estimator="soft", search__cost__target=None)
    ),
}
STEPS = {"tiny": 2, "short": 2, "full": 4}
M_MMAP_THRESHOLD = -3  # from malloc.h; once set explicitly, malloc does not adapt it
MAPPED_BYTES = 1 << 16  # and more


def train(case: Case, device: Device, steps: int) -> None:
    """Run a training step without memory, then `steps` with memory."""
    config = case.config(device.precision)
    search = config.search
    if case.phase == "search":
        network: TransformerXL = SuperNet.from_config(config.model, search, case.vocabulary)
    else:
        network = TransformerXL.build(config.model, Architecture.parse(config.model.arch or ""), case.vocabulary)
    weights = network.weights() if isinstance(network, SuperNet) else dict(network.named_parameters())
    optimizer = make_adamw(weights, 1e-4, 0.01)
    passes = GradientAccumulator(network.train(), weights.values(), device, config.train.accumulate)
    memory: Memory | None = None
    for step in range(1 + steps):  # the first fills the memory
        ids = harness.draw_ids(case.vocabulary, (2, config.data.batch_size, config.data.tgt_len), seed=step)
        gates: Gates | None = None
        if isinstance(network, SuperNet):
            gates = DetachedGates(gumbel_softmax(network.alpha(), 1.0)).gates
        memory = passes.backward(Batch(*ids, starts_epoch=False), memory, [gates]).memory
        step_clipped(optimizer, gradient_norm(list(weights.values())), 1.0)


def measure(case: Case, precision: str, steps: int, mapped: bool) -> int:
    """Return the bytes by which training raises the peak of the resident set; meant for a new process."""
    torch.manual_seed(1)
    if mapped:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    else:
        keep_freed_memory()
    device = Device(torch.device("cpu"), precision)
    train(TINY["tiny network"], device, steps=1)
    before = harness.peak_memory()
    train(case, device, steps)
    return harness.peak_memory() - before


def compare(name: str, case: Case, precision: str, steps: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Return the predicted and the measured memory of a network in bytes, and their ratios."""
    config = case.config(precision)
    footprint = estimate_step(config, case.phase, case.counts(), config.data.batch_size)
    predicted = memory_by_use(footprint, gpus=1)
    measured, kept = (pool.submit(measure, case, precision, steps, mapped).result() for mapped in (True, False))
    total = sum(predicted.values())
    return {
        "network": name,
        "precision": precision,
        "parameters": footprint.parameters // 4,
        "predicted_bytes": predicted,
        "predicted_sum": total,
        "measured_bytes": measured,
        "measured_over_predicted": measured / total,
        "kept_heap_bytes": kept,
        "kept_heap_over_predicted": kept / total,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    device = harness.choose("cpu", "auto")
    cases = TINY if parsed.size == "tiny" else CASES
    precisions = list(dict.fromkeys(["fp32", device.precision]))
    records = []
    with harness.processes(calls=1) as pool:
        for name, case in cases.items():
            records += [compare(name, case, each, STEPS[parsed.size], pool) for each in precisions]
    rows = [
        {
            "network": f"{record['network']}, {record['precision']}",
            "parameters": record["parameters"],
            "predicted MB": record["predicted_sum"] / 1e6,
            "measured MB": record["measured_bytes"] / 1e6,
            "measured / predicted": record["measured_over_predicted"],
            "with a kept heap": record["kept_heap_over_predicted"],
        }
        for record in records
    ]
    harness.print_table("Memory of training, counted and measured", rows)
    worst = float(np.max([abs(record["measured_over_predicted"] - 1) for record in records]))
    print(f"Largest deviation: {worst:.1%} (goal: at most {GOAL:.0%})")
    harness.write_result(
        "plan", device, {"precisions": precisions, "goal": GOAL, "worst": worst, "records": records}, parsed
    )


if __name__ == "__main__":
    harness.run(main)
