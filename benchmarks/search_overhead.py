"""A step of a search beside training steps of the networks of its space: `python benchmarks/search_overhead.py`.

The shapes are those of benchmarks/equal_time.yaml, the space is `hybrid`; token ids are drawn by Zipf's law. A step is
the trainer's own: forward, backward, clipping and AdamW; for the search also its architecture steps. The networks are
paths that the search samples for its weights, so the mean of their steps is that of the networks that it trains. The
search trains two paths in a step, each on half of the batch, which is the default, or one, as in a training in one run;
no target makes its paths cheaper. All take turns. The peak of the resident set is measured in a new process each, for
the search and for the largest network.
"""

from argparse import Namespace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import comparison
import harness
import torch
from search_step import Step, make_session
from trainings import read_study

from parnas.architecture import ATTENTION, Architecture
from parnas.config.loader import Config
from parnas.data.batching import TrainingBatches
from parnas.data.streams import Tokens
from parnas.model.estimators import UniformPath
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import SearchTask, make_arch_batches
from parnas.training.device import Device, keep_freed_memory
from parnas.training.optimizers import Schedule
from parnas.training.retrain import RetrainTask

PLAN = Path(__file__).with_name("equal_time.yaml")
SEARCH, ONE_PATH = "search", "search, one path"
SEARCHES = {SEARCH: {}, ONE_PATH: {"search__gate_samples": 1}}
HYBRID = ("s", "k", "f", "i")
VOCABULARY, CUTOFFS = 4000, (471, 2052)  # what `cutoffs: auto` finds in WikiText-2
MOST_TIME, MOST_MEMORY = 1.0, 1.5  # the goals


class Plan(NamedTuple):
    """How much is measured."""

    networks: int
    rounds: int
    warm_up: int = 10


PLANS = {"tiny": Plan(2, 2, 1), "short": Plan(8, 20), "full": Plan(24, 60)}


def make_step(config: Config, device: Device, arch: str, ids: Tokens) -> Step:
    """Return the training step of a network, or that of a search if `arch` is one of `SEARCHES`."""
    config = config.replace(**SEARCHES.get(arch, {}))
    session = make_session(config, device)
    batches = TrainingBatches(ids, config.data.batch_size, config.data.tgt_len)
    if arch in SEARCHES:
        supernet = SuperNet.from_config(config.model, config.search, VOCABULARY)
        return Step(SearchTask(session, supernet, batches, make_arch_batches(config, ids)))
    network = TransformerXL.build(config.model, Architecture.parse(arch), VOCABULARY)
    return Step(RetrainTask(session, network, batches, Schedule(config.train.steps, config.train.lr, 0)))


def sample_networks(config: Config, count: int) -> list[str]:
    """Return networks as the search samples them for its weights."""
    search, generator = config.search, torch.Generator().manual_seed(1)
    estimator = UniformPath(search.blocks, search.space)
    alpha = torch.zeros(search.blocks, len(search.candidates))
    paths = [estimator.sample_gates(alpha, 1.0, generator) for _ in range(count)]
    return [str(Architecture(tuple(search.candidates[gate.chosen] for gate in path))) for path in paths]


def measure_peak(config: Config, precision: str, arch: str, steps: int) -> int:
    """Return the bytes by which steps raise the peak of the resident set; meant for a new process."""
    keep_freed_memory()
    device, ids = Device(torch.device("cpu"), precision), draw(config, steps)
    before = harness.peak_memory()
    step = make_step(config, device, arch, ids)
    for _ in range(steps):
        step()
    return harness.peak_memory() - before


def draw(config: Config, steps: int) -> Tokens:
    """Return ids for one epoch of more than `steps` steps, so that memory stays full."""
    ids: Tokens = harness.draw_ids(VOCABULARY, (steps + 1) * config.data.batch_size * config.data.tgt_len + 1)
    return ids


def make_config(parsed: Namespace) -> Config:
    """Return the configuration of the plan, with cutoffs that no text is needed for; alpha is trained at once."""
    config, _ = read_study(PLAN, parsed, comparison.TINY, {})
    return config.replace(
        search__space=HYBRID,
        model__cutoffs=CUTOFFS,
        search__alpha_start_step=0,
        search__uniform_fraction=1.0,
        search__cost__target=None,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__, options=["corpus"]).parse_args(arguments)
    config, plan = make_config(parsed), PLANS[parsed.size]
    torch.set_num_threads(config.runtime.threads or 1)
    device = harness.choose("cpu", config.runtime.precision)
    networks = sample_networks(config, plan.networks)
    ids = draw(config, plan.warm_up + plan.rounds)
    steps = {arch: make_step(config, device, arch, ids) for arch in [*SEARCHES, *networks]}
    seconds = {name: fmean(of) for name, of in harness.take_turns(steps, plan.rounds, plan.warm_up).items()}
    mean_network = fmean(seconds[arch] for arch in networks)

    largest = str(Architecture((ATTENTION,) * config.search.blocks))
    with harness.processes(calls=1) as pool:
        peaks = {
            arch: pool.submit(measure_peak, config, device.precision, arch, plan.warm_up + 10).result()
            for arch in (SEARCH, largest)
        }
    result = {
        "search_ms": 1000 * seconds[SEARCH],
        "one_path_ms": 1000 * seconds[ONE_PATH],
        "networks_ms": {arch: 1000 * seconds[arch] for arch in networks},
        "time_over_networks": seconds[SEARCH] / mean_network,
        "one_path_over_networks": seconds[ONE_PATH] / mean_network,
        "most_time": MOST_TIME,
        "largest": largest,
        "peak_bytes": peaks,
        "memory_over_largest": peaks[SEARCH] / peaks[largest],
        "most_memory": MOST_MEMORY,
    }
    rows = [
        {"": "step of the search, two paths", "ms": result["search_ms"], "MB": peaks[SEARCH] / 1e6},
        {"": "step of the search, one path", "ms": result["one_path_ms"], "MB": "–"},
        {"": f"training step, mean of {len(networks)} networks", "ms": 1000 * mean_network, "MB": "–"},
        {"": "training step of the largest network", "ms": "–", "MB": peaks[largest] / 1e6},
        {"": "two paths, ratio", "ms": result["time_over_networks"], "MB": result["memory_over_largest"]},
        {"": "one path, ratio", "ms": result["one_path_over_networks"], "MB": "–"},
    ]
    harness.print_table("A step of the search and training steps of its networks", rows)
    harness.write_result("search_overhead", device, {"precisions": [device.precision], **result}, parsed)


if __name__ == "__main__":
    harness.run(main)
