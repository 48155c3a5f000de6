"""How well the search of a training in one run ranks networks: `python benchmarks/short_search.py`.

    python benchmarks/short_search.py --search      # run the searches that have no row yet
    python benchmarks/short_search.py               # print and write the table

The truth is benchmarks/results/hybrid_truth.csv: 150 networks of 6 blocks, each trained from scratch. The search is the
first part of a training in one run, of `STEPS` steps within the target `TARGET`, and a variant of it that estimates
what a layer contributes in each block by itself. Each search appends its scores of all networks to short_search.csv.

The table shows Kendall's tau between score and perplexity, for all networks and for those of equal latency, and how far
the network of the best score is behind the best one, both within the target: of all networks, and of those with
attention, as `search.least_attention` demands. The scores are those of benchmarks/search_quality.py.

A second table shows whether networks like the best one so far are worth more evaluations than probable ones. Of the
networks with attention within a target, `EVALUATIONS` are evaluated with the shared weights: the most probable ones, or
half of them and then, one after the other, the network most similar to the best one so far. These are searches of the
above kind, and the longer ones in search_scores_hybrid_truth.csv.

A third table shows by how much a layer lowers the loss: the coefficients of a regression of the loss of all networks on
the number of layers of each kind, for the trained networks and for the shared weights at the end of the searches.
"""

import itertools
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import numpy as np
from ground_truth import Study, read_table_study
from search_quality import (
    ESTIMATE,
    SCORE_NAMES,
    Job,
    Score,
    Truth,
    agreement,
    agreement_in_strata,
    read_truth,
    run_search,
)
from trainings import append_rows, read_rows, require_corpus, work_off

from parnas.architecture import ATTENTION, IDENTITY
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.nas.cost import find_costs
from parnas.nas.one_run import split_training
from parnas.training.progress import Silent

CONFIG = Path(__file__).with_name("hybrid_truth.yaml")
STEPS, SHARE, TARGET, SEEDS = 600, 0.2, 0.5, (1, 2, 3)
EVALUATIONS, LOCAL_TARGETS = (4, 8, 16), (0.5, 0.65, 0.8)
VARIANTS: dict[str, dict[str, Any]] = {  # changes of the search
    "blocks share estimates": {},
    "each block by itself": {"search__block_ridge": None},
}


def short_search(config: Config, variant: str) -> Config:
    """Return the configuration of a search that is the first part of a one-run training."""
    whole = config.replace(train__steps=round(STEPS / SHARE), search__share=SHARE, search__cost__target=TARGET)
    first, _ = split_training(whole, Path())  # the second part, and so the folder of its search, is not used
    return first.replace(**VARIANTS[variant])


def score_networks(config: Config, networks: frozenset[str], job: tuple[str, int]) -> list[Score]:
    """Search, and return the scores of all networks of the table."""
    variant, seed = job
    _, scores = run_search(short_search(config, variant), networks, Job("uniform", str(TARGET), seed, ()))
    return [score._replace(estimator=variant) for score in scores]


def find_choice(truth: Truth, score: Mapping[str, float], attention: bool) -> float:
    """Return by how much the network of the best score is behind the best one, within the target, in per cent."""
    allowed = [
        network
        for network in truth.losses
        if truth.share(network) <= TARGET and (ATTENTION in network or not attention)
    ]
    best = min(truth.mean(network) for network in truth.losses if truth.share(network) <= TARGET)
    return 100 * (truth.mean(max(allowed, key=score.__getitem__)) - best)


def summarise(truth: Truth, scores: Sequence[Score], config: Config) -> list[dict[str, Any]]:
    """Return a row for each variant and score: means over the seeds."""
    by_search: dict[tuple[str, str], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in scores:
        for name in SCORE_NAMES:
            by_search[row.estimator, name][row.seed][row.network] = row.of(name, config)
    return [
        {
            "search": variant,
            "score": name,
            "seeds": len(of_seeds),
            "tau, all": fmean(agreement(truth, score, list(truth.losses))[0] for score in of_seeds.values()),
            "tau, equal latency": fmean(agreement_in_strata(truth, score) for score in of_seeds.values()),
            "behind the best": fmean(find_choice(truth, score, attention=False) for score in of_seeds.values()),
            "with attention": fmean(find_choice(truth, score, attention=True) for score in of_seeds.values()),
        }
        for (variant, name), of_seeds in by_search.items()
    ]


def choose(scores: Mapping[str, Score], evaluations: int, local: bool, config: Config) -> str:
    """Return the network of the best estimate among those that are evaluated: probable, or in part similar ones."""
    probable = sorted(scores, key=lambda network: -scores[network].pi)
    evaluated = probable[: evaluations // 2 if local else evaluations]

    def best() -> str:
        return max(evaluated, key=lambda network: scores[network].of(ESTIMATE, config))

    while len(evaluated) < min(evaluations, len(probable)):
        others = [network for network in probable if network not in evaluated]
        evaluated.append(max(others, key=lambda network: SequenceMatcher(None, network, best()).ratio()))
    return best()


def summarise_local_search(truth: Truth, scores: Sequence[Score], config: Config) -> list[dict[str, Any]]:
    """Return a row for each number of search steps, target and number of evaluations: means over the searches."""
    searches: dict[tuple[str, int, int], dict[str, Score]] = defaultdict(dict)
    for row in scores:
        if ATTENTION in row.network:
            searches[row.estimator, row.seed, row.steps][row.network] = row
    records = []
    for steps, target, evaluations in itertools.product(
        sorted({steps for _, _, steps in searches}), LOCAL_TARGETS, EVALUATIONS
    ):
        behind: dict[bool, list[float]] = {False: [], True: []}
        for key, of_search in searches.items():
            if key[-1] == steps:
                within = {network: row for network, row in of_search.items() if truth.share(network) <= target}
                best = min(map(truth.mean, within))
                for local, found in behind.items():
                    found.append(100 * (truth.mean(choose(within, evaluations, local, config)) - best))
        record = {"search steps": steps, "target": target, "evaluations": evaluations, "searches": len(behind[True])}
        records.append(record | {"most probable": fmean(behind[False]), "local search": fmean(behind[True])})
    return records


def find_contributions(losses: Mapping[str, float]) -> dict[str, float]:
    """Return by how much a layer of each kind lowers the loss in nats per token, by least squares over networks."""
    names = sorted({name for network in losses for name in network} - {IDENTITY})
    counts = np.array([[1.0, *(network.count(name) for name in names)] for network in losses])
    coefficients, *_ = np.linalg.lstsq(counts, np.array([*losses.values()]), rcond=None)
    return dict(zip(names, map(float, -coefficients[1:]), strict=True))


def summarise_contributions(truth: Truth, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return a row for the trained networks and for each number of search steps: means over the searches."""
    searches: dict[int, dict[tuple[str, int], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in scores:
        searches[row.steps][row.estimator, row.seed][row.network] = -row.inherited
    trained = {network: truth.mean(network) for network in truth.losses}
    records: list[dict[str, Any]] = [{"weights": "of each network", "searches": "–", **find_contributions(trained)}]
    for steps, of_steps in sorted(searches.items()):
        found = [find_contributions(losses) for losses in of_steps.values()]
        means = {name: fmean(each[name] for each in found) for name in found[0]}
        records.append({"weights": f"shared, after {steps:,} steps", "searches": len(found), **means})
    return records


def in_percent(records: Sequence[Mapping[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return records with the values of some keys as text with a per cent sign."""
    return [{key: f"{of:.1f} %" if key in keys else of for key, of in record.items()} for record in records]


def report(study: Study, table: Path, parsed: Namespace) -> None:
    """Print and write the tables."""
    config = study.config
    truth = read_truth(harness.RESULTS / f"{CONFIG.stem}.csv", study, find_costs(config, "latency", Silent()))
    config = config.replace(search__estimator="uniform")
    scores = read_rows(table, Score)
    records = summarise(truth, scores, config)
    harness.print_table("Searches of few steps", in_percent(records, "behind the best", "with attention"))
    longer = read_rows(harness.RESULTS / f"search_scores_{CONFIG.stem}.csv", Score)
    local = summarise_local_search(truth, [*scores, *longer], config)
    harness.print_table("Choice behind the best, by evaluations", in_percent(local, "most probable", "local search"))
    layers = summarise_contributions(truth, [*scores, *longer])
    harness.print_table("Nats per token by which a layer lowers the loss", layers)
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "steps": STEPS, "target": TARGET}
    payload |= {"ranks": records, "local": local, "layers": layers}
    harness.write_result("short_search", device, payload, parsed)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, [], ["workers"])
    parser.add_argument("--search", action="store_true", help="run the searches that have no row yet")
    parsed = parser.parse_args(arguments)
    study = read_table_study(CONFIG, parsed.device)
    require_corpus(study.config)
    table = harness.results_folder(parsed) / "short_search.csv"
    if not parsed.search:
        report(study, table, parsed)
        return
    done = {(row.estimator, row.seed) for row in read_rows(table, Score)}
    jobs = [(variant, seed) for seed in SEEDS for variant in VARIANTS if (variant, seed) not in done]
    prepare(study.config.data)  # once, not in every process
    for scores in work_off(partial(score_networks, study.config, frozenset(study.networks)), jobs, parsed.workers):
        append_rows(table, scores)
        print(f"{scores[0].estimator}, seed {scores[0].seed}", flush=True)


if __name__ == "__main__":
    harness.run(main)
