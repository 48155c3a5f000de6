"""Trainings of equal time: one run, search included, beside networks that are known: `python benchmarks/equal_time.py`.

    python benchmarks/equal_time.py --profile   # the time of a training step of each layer, and of a search
    python benchmarks/equal_time.py             # train what is missing; call it twice: see below
    python benchmarks/equal_time.py --latency   # measure the latency of all networks in turns
    python benchmarks/equal_time.py --report    # print and write the table of the finished trainings

The plan is the section `equal_time` of benchmarks/equal_time.yaml: `minutes` of predicted training time on an idle
core, `seeds`, `networks` by name, and the cost `target` of the search. A network is trained from scratch for as many
steps as fit into the time, by the profile. `one run` searches in the share `search.share` of the time (re-ranking and
validation included) and trains the derived network in the rest, from its weights in the SuperNet. `derived, from
scratch` trains the network that the run of the same seed derived, for the whole time; it needs the row of that run, so
it is trained by a later call. Each finished training appends a row to results/equal_time.csv.
"""

import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import comparison
import harness
from trainings import read_rows, read_study, require_corpus, train_missing
from variants import compare, measured_shares

from parnas.architecture import Architecture, drop_identity
from parnas.config.loader import Config
from parnas.nas.derive import derive
from parnas.nas.latency_table import profile as measure_layers
from parnas.nas.search import search
from parnas.runs.files import read_json, write_json
from parnas.studies.pipeline import inheriting, split_training
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ONE_RUN, KNOWN = "one run", "derived, from scratch"
LAYERS = ("s", "k", "f", "i", "r", "g", "s:window=64")  # that the networks have
PROBE = 120  # steps of the search that is timed


class Row(NamedTuple):
    """A finished training; perplexity per token on the validation split, seconds with those of the search."""

    name: str
    seed: int
    arch: str
    search_steps: int  # 0: no search
    steps: int
    ppl: float
    seconds: float
    search_seconds: float
    parameters: int


class Times(NamedTuple):
    """Predicted times on an idle core, in milliseconds."""

    fixed: float  # of a training step without layers
    layers: Mapping[str, float]  # of a training step, by layer
    search_step: float
    rerank: float  # what a search takes besides its steps: re-ranking and the last validation

    @classmethod
    def read(cls, path: Path) -> "Times":
        """Read the times that `measure` wrote."""
        content = read_json(path)
        table = content["training"]
        layers = {name: timing["median_ms"] for name, timing in table["layers"].items()}
        return cls(table["fixed"]["median_ms"], layers, content["search_step_ms"], content["rerank_ms"])

    def steps(self, arch: Architecture, milliseconds: float) -> int:
        """Return the number of training steps of a network that fit into a time."""
        return round(milliseconds / (self.fixed + sum(self.layers[name] for name in drop_identity(arch))))


def measure(config: Config, path: Path) -> None:
    """Measure the profile of all layers, the time of a search step and that of re-ranking, and write them."""
    space = config.search.space
    measured = measure_layers(config.replace(search__space=LAYERS), Silent(), rounds=50, check=0)
    measured.write(path)
    timed = config.replace(
        search__cost__table=str(path), search__space=space, train__steps=round(PROBE / config.search.share)
    )
    with tempfile.TemporaryDirectory(prefix="parnas-equal-time-") as folder:
        first, _ = split_training(timed, Path(folder) / "run")
        first = first.replace(train__log_every=PROBE // 2)
        began = time.perf_counter()
        run = search(first, Path(folder) / "run", Silent())
        wall = 1000 * (time.perf_counter() - began)
        steps = [line.step_ms for line in run.metrics() if line.split == "train" and line.step_ms is not None]
        rest = wall - PROBE * steps[-1]
    write_json(path, read_json(path) | {"search_step_ms": steps[-1], "rerank_ms": rest})


def train(config: Config, times: Times, milliseconds: float, job: tuple[str, int, str]) -> Row:
    """Train a network from scratch, or in one run, and return its row; `job` is name, seed and architecture."""
    name, seed, arch = job
    config = config.replace(runtime__seed=seed)
    with tempfile.TemporaryDirectory(prefix="parnas-equal-time-") as folder:
        search_steps, search_seconds, began = 0, 0.0, time.perf_counter()
        if name == ONE_RUN:
            place = Path(folder) / "search"
            search_steps = max(8, round((config.search.share * milliseconds - times.rerank) / times.search_step))
            first, _ = split_training(config.replace(train__steps=round(search_steps / config.search.share)), place)
            arch = str(derive(search(first, place, Silent())).architecture)
            search_seconds = time.perf_counter() - began
            steps = times.steps(Architecture.parse(arch), (1 - config.search.share) * milliseconds)
            training = inheriting(config, place, steps)
        else:
            steps = times.steps(Architecture.parse(arch), milliseconds)
            training = config.replace(train__steps=steps)
        summary = retrain(training.replace(model__arch=arch), Path(folder) / "run", Silent()).summary()
        seconds = time.perf_counter() - began
    return Row(name, seed, arch, search_steps, steps, summary.valid.ppl, seconds, search_seconds, summary.parameters)


def list_jobs(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Return the trainings that have no row: name, seed and architecture, all of one seed before the next seed."""
    networks = {name: str(Architecture.parse(arch)) for name, arch in plan["networks"].items()}
    derived = {row.seed: row.arch for row in rows if row.name == ONE_RUN}
    jobs = []
    for seed in plan["seeds"]:
        jobs.append((ONE_RUN, seed, ""))
        jobs += [(name, seed, arch) for name, arch in networks.items()]
        jobs += [(KNOWN, seed, derived[seed])] if seed in derived else []
    done = {row[:2] for row in rows}
    return [job for job in jobs if job[:2] not in done]


def summarise(rows: Sequence[Row], shares: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a record for each name: mean perplexity and time, and the difference of the one run from it, paired."""
    by_name: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        by_name[row.name][row.seed] = row
    ours = {seed: row.ppl for seed, row in by_name[ONE_RUN].items()}
    records = []
    for name, of_seed in by_name.items():
        theirs = {seed: row.ppl for seed, row in of_seed.items()}
        archs = list(dict.fromkeys(row.arch for row in of_seed.values()))
        record = {"name": name, "archs": archs, "seeds": len(theirs), "ppl": fmean(theirs.values())}
        record |= {"ppl_by_seed": {str(seed): theirs[seed] for seed in sorted(theirs)}}
        record |= {"steps": fmean(row.steps for row in of_seed.values())}
        record |= {"seconds": fmean(row.seconds for row in of_seed.values())}
        if known := [shares[arch] for arch in archs if arch in shares]:
            record["latency"] = fmean(known)
        if name != ONE_RUN and ours.keys() & theirs.keys():
            record |= compare(ours, theirs)
        records.append(record)
    return records


def format_record(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the printed table."""
    difference = "–"
    if "percent" in record:
        difference = f"{record['percent']:+.2f} %"
        if record["p"] is not None:
            difference += f" ({record['low']:+.2f} to {record['high']:+.2f} %, p = {record['p']:.2g})"
    return {
        "network": record["name"],
        "layers": ", ".join(record["archs"]),
        "seeds": str(record["seeds"]),
        "latency share": f"{record['latency']:.2f}" if "latency" in record else "–",
        "steps": f"{record['steps']:,.0f}",
        "seconds": f"{record['seconds']:.0f}",
        "ppl": f"{record['ppl']:.2f}",
        "one run relative to it": difference,
    }


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers"])
    stage = parser.add_mutually_exclusive_group()
    for name in ("profile", "latency", "report"):
        stage.add_argument(f"--{name}", dest="stage", action="store_const", const=name, default="train")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed: Namespace = make_parser().parse_args(arguments)
    tiny = {"seeds": [1], "minutes": 0.02}
    config, plan = read_study(Path(__file__).with_suffix(".yaml"), parsed, comparison.TINY, tiny)
    config = config.replace(search__cost__target=plan["target"])
    folder = harness.results_folder(parsed)
    profile, latency, table = (folder / f"equal_time{suffix}" for suffix in ("_profile.json", "_latency.json", ".csv"))
    rows = read_rows(table, Row)
    if parsed.stage != "report":
        require_corpus(config)
    if parsed.stage == "profile":
        measure(config, profile)
        return
    if parsed.stage == "train":
        config = config.replace(search__cost__table=str(profile))
        task = partial(train, config, Times.read(profile), 60_000 * plan["minutes"])
        train_missing(table, config, task, list_jobs(plan, rows), parsed.workers)
        return
    archs = {row.arch: Architecture.parse(row.arch) for row in rows}
    if parsed.stage == "latency":
        write_json(latency, comparison.measure_latencies(config, archs.values(), 2 if parsed.size == "tiny" else 50))
        return
    records = summarise(rows, measured_shares(latency, archs))
    harness.print_table("Trainings of equal time", [format_record(record) for record in records])
    device = harness.choose(parsed.device, config.runtime.precision)
    harness.write_result("equal_time", device, {"precisions": [device.precision], "networks": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
