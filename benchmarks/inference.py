"""Latency of scoring a segment, of the interleaved network and of a derived one: `python benchmarks/inference.py`.

Both have the shapes of configs/wikitext2-par.yaml and full memory, and take turns on the same token ids. Their weights
are random: latency does not depend on them. `--arch` is by default what benchmarks/results/wikitext2-par.json derived.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import harness
import torch

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.config.schema import Shape
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import read_json
from parnas.training.device import Device
from parnas.training.latency import TimedNetwork, measure_latencies

BATCHES = (1, 32)


class Plan(NamedTuple):
    """How much is measured."""

    repetitions: int  # of the whole measurement
    rounds: int  # segments timed in each


PLANS = {"tiny": Plan(2, 2), "short": Plan(3, 50), "full": Plan(5, 300)}
TINY = ("model.d_model=16", "model.n_heads=2", "model.d_inner=16", "model.cutoffs=[20, 60]")


def derived_architecture() -> str:
    """Return the architecture that the recorded search derived."""
    return str(read_json(harness.RESULTS / "wikitext2-par.json")["derivation"]["arch"])


def make_candidates(config: Config, archs: Sequence[str], tokens: int) -> dict[str, TimedNetwork]:
    """Networks of these architectures, and ids drawn by Zipf's law for them to read."""
    ids = harness.draw_ids(harness.VOCABULARY, tokens)
    torch.manual_seed(1)
    return {
        arch: TimedNetwork(TransformerXL.build(config.model, Architecture.parse(arch), harness.VOCABULARY), ids)
        for arch in dict.fromkeys(archs)
    }


def measure(config: Config, archs: Sequence[str], devices: Mapping[str, Device], plan: Plan) -> list[dict[str, Any]]:
    """One record for each network, batch size and precision: p50 and p95 in milliseconds of every repetition."""
    lengths = {"tgt_len": config.data.tgt_len, "mem_len": config.model.mem_len}
    candidates = make_candidates(config, archs, max(BATCHES) * sum(lengths.values()))
    records = []
    for precision, device in devices.items():
        for batch_size in BATCHES:
            shape = Shape(batch_size, config.data.tgt_len, config.model.reach)
            repetitions = [
                measure_latencies(
                    {arch: (candidate, shape, device) for arch, candidate in candidates.items()}, plan.rounds
                )
                for _ in range(plan.repetitions)
            ]
            for arch in candidates:
                shapes = {"arch": arch, "precision": precision, "batch_size": batch_size, **lengths}
                found = [latencies[arch] for latencies in repetitions]
                times = {"p50_ms": [each.median for each in found], "p95_ms": [each.p95 for each in found]}
                records.append({**shapes, "rounds": plan.rounds, **times})
    return records


def describe(record: Mapping[str, Any], interleaved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table: medians over repetitions, and the ratio to the interleaved network."""
    named = {key: record[key] for key in ("precision", "batch_size", "arch")}
    p50, p95 = median(record["p50_ms"]), median(record["p95_ms"])
    return {**named, "p50 ms": p50, "p95 ms": p95, "times as fast as sfsfsf": median(interleaved["p50_ms"]) / p50}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--arch", help="the derived architecture, such as ssfsff (default: the recorded one)")
    parsed = parser.parse_args(arguments)
    devices = {precision: harness.choose(parsed.device, precision) for precision in harness.DTYPES}
    config = load_config(harness.PAR_CONFIG, TINY if parsed.size == "tiny" else ())
    archs = [harness.INTERLEAVED, parsed.arch or derived_architecture()]
    records = measure(config, archs, devices, PLANS[parsed.size])
    baselines = {(r["precision"], r["batch_size"]): r for r in records if r["arch"] == harness.INTERLEAVED}
    rows = [describe(record, baselines[record["precision"], record["batch_size"]]) for record in records]
    harness.print_table("Latency of a segment", rows)
    payload = {"precisions": list(devices), "archs": archs, "vocab_size": harness.VOCABULARY, "records": records}
    harness.write_result("inference", devices["fp32"], payload, parsed)


if __name__ == "__main__":
    harness.run(main)
