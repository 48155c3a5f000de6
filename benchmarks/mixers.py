"""Measure what each layer costs, and what it is worth in networks of equal latency: `python benchmarks/mixers.py`.

    python benchmarks/mixers.py             # the latency of each layer, by precision and by memory length
    python benchmarks/mixers.py --train     # the networks of `NETWORKS`, from the seeds of comparison.yaml
    python benchmarks/mixers.py --report    # the table of the trained networks

Shapes and recipe are those of benchmarks/comparison.yaml. Every network but the interleaved one of 12 blocks replaces
layers of `kfkfkskfkfk` and has about its predicted latency. Each finished training appends a row to mixers.csv; a later
start trains what is missing.
"""

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import comparison
import harness
from trainings import read_rows, read_study, require_corpus, train_missing

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.nas.latency_table import profile
from parnas.runs.files import read_json
from parnas.studies.baseline_comparison import paired_difference
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

LAYERS = ("s", "s:window=64", "s:window=32", "k", "r", "f", "g")
NETWORKS = {
    "one attention layer among convolutions": "kfkfkskfkfk",
    "recurrence for convolution": "rfrfsrfrf",
    "recurrence for every second convolution": "kfrfksrfkr",
    "windows for attention": "k f k f s:window=64 k f k f s:window=64 k f k",
    "SwiGLU for feed-forward": "kgkgkskgkgk",
    "convolution alone": "kfkfkfkfkfkfkfk",
    "recurrence alone": "rfrfrfrfrfrfr",
    "convolution and recurrence": "kfrfkfrfkfrfkr",
    "attention alone": "sfsf",
    "interleaved, 12 blocks": "sfsfsfsfsfsf",
}
BASE, WHOLE = next(iter(NETWORKS)), list(NETWORKS)[-1]
MEMORIES = (1024, 4096)  # beside the configured 256


class Row(NamedTuple):
    """A finished training; perplexity per token on the validation split."""

    name: str
    arch: str
    seed: int
    steps: int
    ppl: float
    seconds: float


class Job(NamedTuple):
    """A training to be done."""

    name: str
    arch: str
    seed: int


def train(config: Config, job: Job) -> Row:
    """Train one network and return its row."""
    config = config.replace(runtime__seed=job.seed, model__arch=job.arch)
    with tempfile.TemporaryDirectory(prefix="parnas-mixers-") as folder:
        summary = retrain(config, Path(folder) / "run", Silent()).summary()
    return Row(*job, summary.steps, summary.valid.ppl, summary.seconds)


def measure_speed(config: Config, rounds: int, memories: Sequence[int]) -> list[dict[str, Any]]:
    """Return the latency of each layer relative to attention, by precision, memory length and mode."""
    settings = [(precision, config.model.mem_len) for precision in ("bf16", "fp32")]
    settings += [("bf16", mem_len) for mem_len in memories]
    records = []
    for precision, mem_len in dict.fromkeys(settings):
        changes = {"runtime__precision": precision, "model__mem_len": mem_len}
        changes |= {"search__space": LAYERS, "search__blocks": 2}
        measured = profile(config.replace(**changes), Silent(), rounds=rounds, check=0)
        for mode, table in (("inference", measured.inference), ("training step", measured.training)):
            assert table is not None
            ms = {name: table.layers[name].median_ms for name in LAYERS}
            record = {"precision": precision, "memory": mem_len, "mode": mode, "s, ms": round(ms["s"], 2)}
            records.append(record | {name: ms[name] / ms["s"] for name in LAYERS[1:]})
    return records


def describe_networks(rows: Sequence[Row], speed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each trained network: its predicted latency, and its perplexity against the first's.

    The prediction adds the latencies of the layers in inference in the precision of the trainings, from `speed`.
    """
    relative = {"s": 1.0, **{name: speed[0][name] for name in LAYERS[1:]}}

    def latency(arch: str) -> float:
        return sum(relative[name] for name in Architecture.parse(arch))

    ppl: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        ppl[row.name][row.seed] = row.ppl
    records = []
    for name in [name for name in NETWORKS if name in ppl]:
        difference = paired_difference(ppl[name], ppl[BASE])
        interval = "–" if difference.low is None else f"{difference.low:+.1f} to {difference.high:+.1f} %"
        records.append(
            {"network": name, "layers": NETWORKS[name].replace("s:window=64", "w").replace(" ", "")}
            | {"share of the interleaved latency": latency(NETWORKS[name]) / latency(NETWORKS[WHOLE])}
            | {"seeds": len(ppl[name]), "ppl": round(mean(ppl[name].values()), 2)}
            | {"against the first": "–" if name == BASE else f"{difference.mean:+.1f} %", "95 % interval": interval}
        )
    return records


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers", "report"])
    parser.add_argument("--train", action="store_true", help="train the networks that have no row yet")
    parsed = parser.parse_args(arguments)
    tiny = parsed.size == "tiny"
    config, plan = read_study(comparison.CONFIG, parsed, comparison.TINY, {"seeds": [1]})
    device, folder = harness.choose(parsed.device, config.runtime.precision), harness.results_folder(parsed)
    table = folder / "mixers.csv"
    if parsed.train:
        require_corpus(config)
        jobs = [Job(name, arch, seed) for seed in plan["seeds"] for name, arch in NETWORKS.items()]
        done = {row[:3] for row in read_rows(table, Row)}
        left = [job for job in jobs if job not in done]
        train_missing(table, config, partial(train, config), left, parsed.workers)
    elif parsed.report:
        speed = read_json(folder / f"mixers_speed-{device.device.type}.json")["layers"]
        records = describe_networks(read_rows(table, Row), speed)
        harness.print_table("Networks of about equal latency (w: s:window=64)", records)
        harness.write_result("mixers", device, {"precisions": [device.precision], "networks": records}, parsed)
    else:
        records = measure_speed(config, *((2, ()) if tiny else (20, MEMORIES)))
        harness.print_table("Latency of a layer relative to attention", records)
        harness.write_result("mixers_speed", device, {"precisions": ["bf16", "fp32"], "layers": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
