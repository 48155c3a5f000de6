"""Compare a derived network with hand-designed and random ones, trained alike: `python benchmarks/comparison.py`.

    python benchmarks/comparison.py --profile     # the latency of each layer here, and the error of their sum
    python benchmarks/comparison.py --search      # one search, within the target of benchmarks/comparison.yaml
    python benchmarks/comparison.py --train       # every network from every seed; a later start trains what is missing
    python benchmarks/comparison.py --latency     # all networks in turns: the whole, and the stack of blocks
    python benchmarks/comparison.py               # the tables and the picture

Trained are the derived network, the interleaved one, the sandwich, an interleaved network with fewer blocks whose cost
is at most that of the derived one, random architectures of that cost, and, last, the interleaved network for as long as
search and retraining took together. Each finished training appends a row to comparison.csv. `--tiny` runs all stages
with tiny networks, on the corpus given with `--corpus`.
"""

import math
import tempfile
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from trainings import measure_test, read_rows, read_study, require_corpus, train_missing

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import Diverged
from parnas.figures.pareto import ParetoPoint, draw_pareto
from parnas.nas.cost import find_costs
from parnas.nas.derive import derive
from parnas.nas.latency_table import profile, share_layers
from parnas.nas.search import search
from parnas.runs.files import read_json, write_json
from parnas.studies.baseline_comparison import NetworkResult, compare_networks, compare_pair
from parnas.studies.baselines import DERIVED, INTERLEAVED, Baseline, choose_baselines
from parnas.training.device import choose_device
from parnas.training.latency import TimedNetwork, prepare_scoring, time_in_turns
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.session import resolve_cutoffs

CONFIG = Path(__file__).with_suffix(".yaml")
LONGER = "interleaved, longer"
PACE_STEPS = 60  # of the short trainings that tell how long a step takes
TINY = {
    "data": {"tokenizer": {"kind": "word", "user_symbols": ()}, "batch_size": 3, "tgt_len": 6},
    "model": {"d_model": 16, "n_heads": 2, "d_inner": 32, "mem_len": 6, "cutoffs": (), "proj_factor": None},
    "search": {"blocks": 4, "steps": 12, "warmup_steps": 2, "alpha_start_step": 4},
    "train": {"steps": 4, "warmup_steps": 1},
    "runtime": {"precision": "fp32"},
}


class Row(NamedTuple):
    """A trained network; perplexities per token at the last step, seconds of training."""

    name: str
    arch: str
    seed: int
    steps: int
    valid_ppl: float
    test_ppl: float
    seconds: float


class Job(NamedTuple):
    """A training to be done."""

    name: str
    arch: str
    seed: int
    steps: int


class Study(NamedTuple):
    """Settings of the comparison, and the paths of its results."""

    config: Config
    seeds: tuple[int, ...]
    random: int
    folder: Path  # of the results

    @property
    def profile(self) -> Path:
        return self.folder / "comparison_profile.json"

    @property
    def search(self) -> Path:
        return self.folder / "comparison_search.json"

    @property
    def rows(self) -> Path:
        return self.folder / "comparison.csv"

    @property
    def latency(self) -> Path:
        return self.folder / "comparison_latency.json"

    def networks(self) -> tuple[Baseline, ...]:
        """Return the derived network and those that it is compared with."""
        costs = find_costs(self.config, self.config.search.cost.metric, Silent())
        derived = Architecture.parse(read_json(self.search)["derivation"]["arch"])
        spaces = self.config.search.block_spaces
        return choose_baselines(derived, costs, spaces, self.random, self.seeds[0]).networks


def make_study(parsed: Namespace) -> Study:
    """Read the study from the configuration beside this file, with the costs of its profile once it is measured."""
    config, plan = read_study(CONFIG, parsed, TINY, {"seeds": [1, 2], "random": 2})
    study = Study(config, tuple(plan["seeds"]), plan["random"], harness.results_folder(parsed))
    if not study.profile.is_file():
        return study
    return study._replace(config=study.config.replace(search__cost__table=str(study.profile)))


def run_profile(study: Study, parsed: Namespace) -> None:
    """Measure the latency of each layer, and how well their sum predicts that of random networks."""
    rounds, check = (2, 3) if parsed.size == "tiny" else (50, 20)
    profile(study.config, Silent(), rounds=rounds, check=check).write(study.profile)


def run_search(study: Study) -> None:
    """Search and derive; write the result to comparison_search.json and delete the run folder.

    The file also says for how many steps the interleaved network can train in the time of this search and of the
    training of the derived network. The speeds of both are measured right after the search, so the machine should be
    otherwise idle.
    """
    blocks = study.config.search.blocks
    with tempfile.TemporaryDirectory(prefix="parnas-comparison-") as folder:
        run = search(study.config, Path(folder) / "run", Silent())
        derivation = derive(run).to_record(run).to_dict()
        found = {"seconds": run.summary().seconds, "search": study.config.search.model_dump(mode="json")}
    found["search"]["cost"].pop("table")
    derived, interleaved = (time_step(study.config, arch) for arch in (derivation["arch"], f"interleaved-{blocks}"))
    found["longer_steps"] = round((found["seconds"] + study.config.train.steps * derived) / interleaved)
    write_json(study.search, {**found, "derivation": derivation})
    print(f"derived: {derivation['arch']}")


def time_step(config: Config, arch: str) -> float:
    """Return the seconds of a training step, measured in the second half of a short training."""
    steps = min(PACE_STEPS, config.train.steps)
    changed = config.replace(model__arch=arch, train__steps=steps, train__warmup_steps=0, train__log_every=steps // 2)
    with tempfile.TemporaryDirectory(prefix="parnas-comparison-") as folder:
        run = retrain(changed, Path(folder) / "run", Silent())
        last = [line for line in run.metrics() if line.split == "train"][-1]
    return config.data.batch_size * config.data.tgt_len / float(last.tokens_per_s)


def wanted(study: Study) -> Iterator[Job]:
    """Yield the trainings: all networks with the first seed, then without random ones; the longer trainings last."""
    steps = study.config.train.steps
    for seed in study.seeds:
        for each in study.networks():
            if not each.random or seed == study.seeds[0]:
                yield Job(each.name, str(each.architecture), seed, steps)
    interleaved = next(str(each.architecture) for each in study.networks() if each.name == INTERLEAVED)
    for seed in study.seeds:
        yield Job(LONGER, interleaved, seed, read_json(study.search)["longer_steps"])


def train(config: Config, job: Job) -> Row:
    """Train one network in a temporary run folder, and evaluate it on the test split."""
    with tempfile.TemporaryDirectory(prefix="parnas-comparison-") as folder:
        config = config.replace(model__arch=job.arch, runtime__seed=job.seed, train__steps=job.steps)
        try:
            run = retrain(config, Path(folder) / "run", Silent())
        except Diverged:
            return Row(*job, math.inf, math.inf, math.nan)
        summary, test = run.summary(), measure_test(run)
        return Row(*job, summary.valid.ppl, test, summary.seconds)


def run_trainings(study: Study, workers: int) -> None:
    """Train the networks that have no row yet, `workers` of them at the same time."""
    done = {Job(*row[:4]) for row in read_rows(study.rows, Row)}
    left = [job for job in wanted(study) if job not in done]
    train_missing(study.rows, study.config, partial(train, study.config), left, workers)


def finished(study: Study) -> dict[str, list[Row]]:
    """Return the rows of this study's trainings by network, in the planned order of networks and seeds."""
    rows = {Job(*row[:4]): row for row in read_rows(study.rows, Row)}
    found: dict[str, list[Row]] = defaultdict(list)
    for job in wanted(study):
        if job in rows:
            found[job.name].append(rows[job])
    return found


def run_latency(study: Study, rounds: int) -> None:
    """Measure the latency of all networks and write it to comparison_latency.json."""
    write_json(study.latency, measure_latencies(study.config, [each.architecture for each in study.networks()], rounds))


def measure_latencies(config: Config, architectures: Iterable[Architecture], rounds: int) -> dict[str, Any]:
    """Measure the inference latency of networks in turns: of the whole, and of its blocks (less one without blocks).

    Returns the machine, the rounds, and under `of` by architecture the medians `whole_ms` and `stack_ms`.
    """
    device, streams = choose_device(config.runtime), prepare(config.data)
    config = resolve_cutoffs(config, streams)
    torch.manual_seed(config.runtime.seed)
    every = sorted({each.layers for each in architectures})
    networks = share_layers([(), *every], config.model, streams.header.vocab_size, device)
    shape = config.training_shape
    tokens = streams.tokens("valid")
    calls = {layers: prepare_scoring(TimedNetwork(model, tokens), device, shape) for layers, model in networks.items()}
    times = time_in_turns(calls, device, rounds)
    found = {
        str(Architecture(layers)): {
            "whole_ms": float(np.median(of)),
            "stack_ms": float(np.median(of - times[()])),
        }
        for layers, of in times.items()
        if layers
    }
    return {"machine": harness.machine(device), "rounds": rounds, "of": found}


def compare_latencies(study: Study) -> list[NetworkResult]:
    """Return each network's perplexities and its latency as a share of the interleaved network's."""
    latency, rows = read_json(study.latency)["of"], finished(study)
    interleaved = latency[rows[INTERLEAVED][0].arch]["stack_ms"]
    return [
        NetworkResult(
            name,
            of[0].arch,
            latency[of[0].arch]["stack_ms"] / interleaved,
            {row.seed: row.valid_ppl for row in of},
            name.startswith("random"),
        )
        for name, of in rows.items()
    ]


def report(study: Study, parsed: Namespace) -> None:
    """Print and write the tables, and draw the picture."""
    found, latency, rows = compare_latencies(study), read_json(study.latency)["of"], finished(study)
    table = [
        {
            "network": each.name,
            "string": each.arch,
            "steps": rows[each.name][0].steps,
            "stack, share of interleaved": each.share,
            "whole network, ms": latency[each.arch]["whole_ms"],
            "valid ppl": each.mean,
            "± sd": each.sd,
            "test ppl": mean(row.test_ppl for row in rows[each.name]),
            "seeds": len(each.ppl),
        }
        for each in found
    ]
    figures = ("valid ppl", "± sd", "test ppl")
    shown = [row | {key: "–" if row[key] is None else f"{row[key]:.2f}" for key in figures} for row in table]
    harness.print_table("Perplexity per token, and measured inference latency", shown)
    alike = [each for each in found if each.name != LONGER]
    answers = compare_networks(alike)
    derived = next(each for each in found if each.name == DERIVED)
    answers += [compare_pair(derived, each) for each in found if each.name == LONGER]
    for each in answers:
        print(f"* {each.text}")
    images = study.folder if parsed.out else harness.ROOT / "docs" / "images"
    markers = [ParetoPoint(each.name, each.share, each.mean, each.sd, each.random) for each in alike]
    draw_pareto(markers, images / "comparison.png", "measured latency of the blocks, interleaved = 1")
    payload = {"networks": table, "answers": [each.text for each in answers], "search": read_json(study.search)}
    device = harness.choose(parsed.device, study.config.runtime.precision)
    harness.write_result("comparison", device, {"precisions": [device.precision], **payload}, parsed)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser: ArgumentParser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers"])
    for stage in ("profile", "search", "train", "latency"):
        parser.add_argument(f"--{stage}", dest="stage", action="store_const", const=stage)
    parsed = parser.parse_args(arguments)
    study = make_study(parsed)
    require_corpus(study.config)
    stages = {
        "profile": partial(run_profile, study, parsed),
        "search": partial(run_search, study),
        "train": partial(run_trainings, study, parsed.workers),
        "latency": partial(run_latency, study, 2 if parsed.size == "tiny" else 100),
        None: partial(report, study, parsed),
    }
    stages[parsed.stage]()


if __name__ == "__main__":
    harness.run(main)
