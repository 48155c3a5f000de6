"""How well the search of a training in one run ranks networks: `python benchmarks/short_search.py`.

    python benchmarks/short_search.py --search      # run the searches that have no row yet
    python benchmarks/short_search.py               # print and write the table

The truth is benchmarks/results/hybrid_truth.csv: 150 networks of 6 blocks, each trained from scratch. The search is the
first part of a training in one run, of `STEPS` steps within the target `TARGET`, and a variant of it that estimates
what a layer contributes in each block by itself. Each search appends its scores of all networks to short_search.csv.

The table shows Kendall's tau between score and perplexity, for all networks and for those of equal latency, and how far
the network of the best score is behind the best one, both within the target: of all networks, and of those with
attention, as `search.least_attention` demands. The scores are those of benchmarks/search_quality.py.
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
from ground_truth import Study, read_table_study
from search_quality import SCORE_NAMES, Job, Score, Truth, agreement, agreement_in_strata, read_truth, run_search
from trainings import append_rows, read_rows, require_corpus, work_off

from parnas.architecture import ATTENTION
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.nas.cost import find_costs
from parnas.studies.pipeline import split_training
from parnas.training.progress import Silent

CONFIG = Path(__file__).with_name("hybrid_truth.yaml")
STEPS, SHARE, TARGET, SEEDS = 600, 0.2, 0.5, (1, 2, 3)
VARIANTS: dict[str, dict[str, Any]] = {  # changes of the search
    "blocks share estimates": {},
    "each block by itself": {"search__block_ridge": None},
}


def short_search(config: Config, variant: str) -> Config:
    """Return the configuration of a search that is the first part of a training in one run."""
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


def report(study: Study, table: Path, parsed: Namespace) -> None:
    """Print and write the table."""
    config = study.config
    truth = read_truth(harness.RESULTS / f"{CONFIG.stem}.csv", study, find_costs(config, "latency", Silent()))
    records = summarise(truth, read_rows(table, Score), config.replace(search__estimator="uniform"))
    printed = [
        {key: f"{of:.1f} %" if key in ("behind the best", "with attention") else of for key, of in record.items()}
        for record in records
    ]
    harness.print_table("Searches of few steps", printed)
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "steps": STEPS, "target": TARGET, "ranks": records}
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
