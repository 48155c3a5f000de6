"""A derived network beside guesses and chance, all trained alike: `python benchmarks/comparison.py`.

    python benchmarks/comparison.py --profile     # what each layer takes here, and how well the sum predicts
    python benchmarks/comparison.py --search      # one search, within the target of benchmarks/comparison.yaml
    python benchmarks/comparison.py --train       # every network from every seed; a later start trains what is missing
    python benchmarks/comparison.py --latency     # all networks in turns: the whole, and the stack of blocks
    python benchmarks/comparison.py               # the tables and the picture

Trained are the derived network, the interleaved one, the sandwich, the interleaved network of as many blocks as cost
no more than the derived one, random strings of its cost, and, last, the interleaved network for as long as search and
retraining of the derived one took together. Each finished training appends a row to comparison.csv. `--tiny` does all
with shapes that say nothing, on the corpus given with `--corpus`.
"""

import math
import tempfile
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import harness
import numpy as np
import torch
from rows import append_rows, read_rows, work_off
from time_to_quality import require_corpus

from parnas.architecture import Architecture
from parnas.config.loader import Config, check_config
from parnas.config.yaml_file import read_yaml
from parnas.data.streams import prepare
from parnas.errors import Diverged
from parnas.figures.pareto import ParetoPoint, draw_pareto
from parnas.nas.cost import find_costs
from parnas.nas.derive import derive
from parnas.nas.latency_table import profile, share_layers
from parnas.nas.search import search
from parnas.runs.files import read_json, write_json
from parnas.runs.run import Run
from parnas.studies.baseline_comparison import NetworkResult, compare_networks, compare_pair
from parnas.studies.baselines import DERIVED, INTERLEAVED, Baseline, choose_baselines
from parnas.training.device import choose_device
from parnas.training.latency import Candidate, Shape, prepare_scoring, time_in_turns
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

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
    """What is compared, and where its results lie."""

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


def read_study(parsed: Namespace) -> Study:
    """Read the study from the configuration beside this file, with the costs of its profile once there is one."""
    settings = read_yaml(CONFIG.read_text(encoding="utf-8"), CONFIG.name)
    plan, folder = settings.pop("comparison"), harness.results_folder(parsed)
    if parsed.size == "tiny":
        for section, changes in TINY.items():
            settings[section] |= changes
        plan = {"seeds": [1, 2], "random": 2}
    if parsed.corpus is not None:
        settings["data"]["corpus"] = str(parsed.corpus)
    study = Study(check_config(settings, CONFIG.name), tuple(plan["seeds"]), plan["random"], folder)
    if not study.profile.is_file():
        return study
    return study._replace(config=study.config.replace(search__cost__table=str(study.profile)))


def run_profile(study: Study, parsed: Namespace) -> None:
    """Measure the layers, and how well their sum predicts random networks."""
    rounds, check = (2, 3) if parsed.size == "tiny" else (50, 20)
    profile(study.config, Silent(), rounds=rounds, check=check).write(study.profile)


def run_search(study: Study) -> None:
    """Search and derive; the run folder is thrown away, what it came to is kept.

    So is for how many steps the interleaved network trains in the time of this search and of the derived network's
    training, by the speed of both right after the search: the machine should have nothing else to do.
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
    """Seconds of a training step, in the second half of a short training."""
    steps = min(PACE_STEPS, config.train.steps)
    changed = config.replace(model__arch=arch, train__steps=steps, train__warmup_steps=0, train__log_every=steps // 2)
    with tempfile.TemporaryDirectory(prefix="parnas-comparison-") as folder:
        run = retrain(changed, Path(folder) / "run", Silent())
        last = [line for line in run.metrics() if line.split == "train"][-1]
    return config.data.batch_size * config.data.tgt_len / float(last.tokens_per_s)


def wanted(study: Study) -> Iterator[Job]:
    """All networks from the first seed, then the others from the other seeds; the longer training last."""
    steps = study.config.train.steps
    for seed in study.seeds:
        for each in study.networks():
            if not each.random or seed == study.seeds[0]:
                yield Job(each.name, str(each.architecture), seed, steps)
    interleaved = next(str(each.architecture) for each in study.networks() if each.name == INTERLEAVED)
    for seed in study.seeds:
        yield Job(LONGER, interleaved, seed, read_json(study.search)["longer_steps"])


def train(config: Config, job: Job) -> Row:
    """Train one network in a run folder that is thrown away, and read the test split once."""
    with tempfile.TemporaryDirectory(prefix="parnas-comparison-") as folder:
        config = config.replace(model__arch=job.arch, runtime__seed=job.seed, train__steps=job.steps)
        try:
            run = retrain(config, Path(folder) / "run", Silent())
        except Diverged:
            return Row(*job, math.inf, math.inf, math.nan)
        summary, test = run.summary(), measure_test(run)
        return Row(*job, summary.valid.ppl, test, summary.seconds)


def measure_test(run: Run) -> float:
    """Perplexity per token of the test split."""
    config, device = run.config(), choose_device(run.config().runtime)
    model, streams = load(run.folder).model.to(device.device), prepare(config.data)
    shape = {"batch_size": config.evaluation.batch_size, "tgt_len": config.data.tgt_len}
    tokens, eos_id = streams.tokens("test"), streams.tokenizer.eos_id
    total = measure_loss(model, tokens, eos_id, device, reach=config.model.reach, **shape)
    return float(np.exp(total.per_token))


def run_trainings(study: Study, workers: int) -> None:
    """Train what has no row yet, `workers` networks at a time."""
    prepare(study.config.data)  # once, not in every process
    done = {Job(*row[:4]) for row in read_rows(study.rows, Row)}
    left = [job for job in wanted(study) if job not in done]
    for row in work_off(partial(train, study.config), left, workers):
        append_rows(study.rows, [row])
        print(f"{row.name} seed {row.seed}: {row.valid_ppl:.2f}, {row.seconds:.0f} s", flush=True)


def finished(study: Study) -> dict[str, list[Row]]:
    """Return the rows of this study's trainings by network, in the planned order of networks and seeds."""
    rows = {Job(*row[:4]): row for row in read_rows(study.rows, Row)}
    found: dict[str, list[Row]] = defaultdict(list)
    for job in wanted(study):
        if job in rows:
            found[job.name].append(rows[job])
    return found


def run_latency(study: Study, rounds: int) -> None:
    """Milliseconds of all networks in turns: whole, and the blocks, as more than the network without any."""
    config = study.config
    device, streams = choose_device(config.runtime), prepare(config.data)
    architectures = {each.architecture.layers for each in study.networks()}
    torch.manual_seed(config.runtime.seed)
    networks = share_layers([(), *sorted(architectures)], config.model, streams.header.vocab_size, device)
    shape = Shape(config.data.batch_size, config.data.tgt_len, config.model.reach)
    tokens = streams.tokens("valid")
    calls = {layers: prepare_scoring(Candidate(model, tokens), device, shape) for layers, model in networks.items()}
    times = time_in_turns(calls, device, rounds)
    found = {
        str(Architecture(layers)): {
            "whole_ms": float(np.median(of)),
            "stack_ms": float(np.median(of - times[()])),
        }
        for layers, of in times.items()
        if layers
    }
    write_json(study.latency, {"machine": harness.machine(device), "rounds": rounds, "of": found})


def standings(study: Study) -> list[NetworkResult]:
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
    """Print and write tables and picture."""
    found, latency, rows = standings(study), read_json(study.latency)["of"], finished(study)
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
    study = read_study(parsed)
    study = study._replace(config=study.config.replace(runtime__device=parsed.device))
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
