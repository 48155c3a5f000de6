"""Run the demo from several seeds: how long it takes, and whether its search pays: `python benchmarks/demo.py`.

Each run is a command that does what `parnas demo` does, with another seed: a process of its own on all cores, with an
empty cache. It counts as better if the derived network has a lower perplexity and a lower latency than the interleaved
one. Each run appends a row to results/demo.csv; a later start does what is missing.
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
from data import failed, start
from trainings import make_tiny, measure_missing

from parnas.config.loader import PRESETS, load_config
from parnas.runs.files import read_json
from parnas.studies.baselines import INTERLEAVED


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


def measure(config: Path, overrides: Sequence[str], blocks: int, seed: int) -> Row:
    """Run the demo, and return its row."""
    with tempfile.TemporaryDirectory(prefix="parnas-demo-") as name, tempfile.TemporaryFile() as output:
        folder = Path(name) / "demo"
        baselines = f"{INTERLEAVED},alternating-{blocks}"
        command = ["-m", "parnas", "pipeline", str(config), "--baselines", baselines, "--run", str(folder)]
        command += [f"runtime.seed={seed}", *overrides]
        began = time.perf_counter()
        if start(command, Path(name) / "cache", output.fileno()).wait():
            raise failed(command, output.seek(0) or output.read())
        seconds = time.perf_counter() - began
        rows = {row["run"]: row for row in read_json(folder / "comparison.json")}
    derived, other = rows["derived"], rows[INTERLEAVED]
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
        path_of_config = make_tiny(Path(name)) if parsed.size == "tiny" else PRESETS / "demo.yaml"
        overrides = [] if parsed.device == "auto" else [f"runtime.device={parsed.device}"]
        config = load_config(path_of_config, overrides)
        run = None if parsed.report else partial(measure, path_of_config, overrides, config.search.blocks)
        rows = measure_missing(path, Row, [(seed,) for seed in range(1, 1 + parsed.seeds)], run)
    record = describe(list(rows.values()))
    harness.print_table("The demo from several seeds", [row._asdict() for row in rows.values()])
    print(f"better in {record['better']} of {record['seeds']} seeds, {record['seconds']:.0f} s")
    device = harness.choose(parsed.device, config.runtime.precision)
    harness.write_result("demo", device, {"precisions": [device.precision], **record}, parsed)


if __name__ == "__main__":
    harness.run(main)
