"""Run the demo from several seeds: how long it takes, and whether its search pays: `python benchmarks/demo.py`.

Each run is that of `parnas demo`, on all cores, one after another. It counts as better if the derived network has a
lower perplexity and a lower latency than the interleaved one. Each run appends a row to results/demo.csv; a later start
does what is missing.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
from trainings import make_tiny, measure_missing

from parnas.config.loader import PRESETS, Config, load_config
from parnas.studies.baselines import DERIVED, INTERLEAVED
from parnas.studies.pipeline import demo_baselines, run_pipeline
from parnas.training.progress import Silent


class Row(NamedTuple):
    """A finished demo: perplexity per token of the validation split, latency in ms per segment."""

    seed: int
    arch: str
    ppl: float
    latency: float
    interleaved_ppl: float
    interleaved_latency: float
    seconds: float

    @property
    def better(self) -> bool:
        """Whether the derived network is better than the interleaved one, and faster."""
        return self.ppl < self.interleaved_ppl and self.latency < self.interleaved_latency


def measure(config: Config, seed: int) -> Row:
    """Run the demo, and return its row."""
    with tempfile.TemporaryDirectory(prefix="parnas-demo-") as folder:
        began = time.perf_counter()
        config = config.replace(runtime__seed=seed)
        result = run_pipeline(config, demo_baselines(config), Path(folder) / "demo", Silent(), one_run=True)
        seconds = time.perf_counter() - began
    rows = {row["run"]: row for row in result.comparison.to_dict()["rows"]}
    derived, other = rows[DERIVED], rows[INTERLEAVED]
    return Row(seed, derived["arch"], derived["ppl"], derived["latency_ms"], other["ppl"], other["latency_ms"], seconds)


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a record of the runs."""
    return {
        "seeds": len(rows),
        "better": [row.better for row in rows].count(True),
        "seconds": median(row.seconds for row in rows),
        "most_seconds": max(row.seconds for row in rows),
        "percent": median(100 * (row.ppl / row.interleaved_ppl - 1) for row in rows),
        "latency": median(row.latency / row.interleaved_latency for row in rows),
        "archs": [row.arch for row in rows],
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, or with `--report` write the result of the rows that there are."""
    parser = harness.make_parser(__doc__, ["tiny"], ["report"])
    parser.add_argument("--seeds", type=int, default=10)
    parsed: Namespace = parser.parse_args(arguments)
    path = harness.results_folder(parsed) / "demo.csv"
    with tempfile.TemporaryDirectory(prefix="parnas-demo-") as name:
        config = load_config(make_tiny(Path(name)) if parsed.size == "tiny" else PRESETS / "demo.yaml")
        config = config.replace(runtime__device=parsed.device)
        cases = [(seed,) for seed in range(1, 1 + parsed.seeds)]
        rows = measure_missing(path, Row, cases, None if parsed.report else partial(measure, config))
    record = describe(list(rows.values()))
    harness.print_table("The demo from several seeds", [row._asdict() for row in rows.values()])
    print(f"better in {record['better']} of {record['seeds']} seeds, {record['seconds']:.0f} s")
    device = harness.choose(parsed.device, config.runtime.precision)
    harness.write_result("demo", device, {"precisions": [device.precision], **record}, parsed)


if __name__ == "__main__":
    harness.run(main)
