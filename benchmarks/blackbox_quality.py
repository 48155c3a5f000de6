"""How many trainings a black-box search needs for what a search finds: `python benchmarks/blackbox_quality.py`.

`parnas blackbox`'s own search (Optuna's TPE) runs over the space of benchmarks/ground_truth.yaml. A trial's training is
looked up in benchmarks/results/ground_truth.csv instead of done again: the perplexity of that network from one seed of
the table, the next seed of the table for the next study. After so many trials the best network within the target is
taken, and is judged, as those of searches are, by its mean over all seeds.
"""

import math
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import harness
from ground_truth import CONFIG, read_table_study, table_name
from search_quality import Paths, Truth, read_truth

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.nas.cost import find_costs
from parnas.studies.blackbox import (
    BlackboxTask,
    EvaluatedNetwork,
    best_within,
    blackbox,
    evaluated_networks,
    open_study,
)
from parnas.training.progress import Silent

TRIALS = (2, 4, 8, 16, 32)
TARGETS = (0.65, 0.8)
SEEDS = 5


def run_study(truth: Truth, config: Config, seed: int, trials: int) -> list[EvaluatedNetwork]:
    """Return the networks that a study finds, in the order of its trials."""
    single = truth.single((seed - 1) % truth.seeds)

    def look_up(_: int, architecture: Architecture) -> float:
        return math.exp(single.mean(table_name(architecture)))

    config = config.replace(runtime__seed=seed)
    task = BlackboxTask(config.search.block_spaces, truth.costs, look_up, "looked up", {}, config, vocab_size=0)
    with tempfile.TemporaryDirectory(prefix="parnas-blackbox-") as folder:
        study = open_study(f"sqlite:///{folder}/study.db", "looked up", "tpe", task)
        blackbox(study, task, trials, Silent())
        return evaluated_networks(study, task.source)


def judge(truth: Truth, studies: Sequence[Sequence[EvaluatedNetwork]], target: float, trials: int) -> dict[str, Any]:
    """Return a row of results after `trials` trials; a study without a network within the target ranks last."""
    allowed = [network for network in truth.losses if truth.share(network) <= target + 1e-9]
    best, worst = min(map(truth.mean, allowed)), max(map(truth.mean, allowed))
    bound = target * truth.costs.interleaved
    chosen = [best_within([each for each in found if each.trial < trials], bound) for found in studies]
    behind = [(worst if each is None else truth.mean(each.network)) - best for each in chosen]
    return {
        "target": target,
        "trainings": trials,
        "networks": " ".join("–" if each is None else each.network for each in chosen),
        "behind the best": f"{100 * median(behind):.2f} %",
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, [])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--trials", type=int, nargs="+", default=TRIALS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parsed: Namespace = parser.parse_args(arguments)
    folder = harness.results_folder(parsed)
    table_study = read_table_study(parsed.config, parsed.device, folder)
    config, paths = table_study.config, Paths.of(parsed.config, folder)
    truth = read_truth(paths.truth, table_study, find_costs(config, config.search.cost.metric, Silent()))
    studies = [run_study(truth, config, seed, max(parsed.trials)) for seed in range(1, 1 + parsed.seeds)]
    table = [judge(truth, studies, target, trials) for target in TARGETS for trials in parsed.trials]
    equal = config.search.steps / config.train.steps
    harness.print_table(f"Black-box search; a search takes the steps of {equal:g} trainings", table)
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "records": table, "trainings_of_a_search": equal}
    harness.write_result("blackbox_quality", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
