"""How well searches rank networks, and what they derive: `python benchmarks/search_quality.py`.

    python benchmarks/search_quality.py --profile
    python benchmarks/search_quality.py --search [--estimators …] [--targets none 0.65 0.8] [--seeds 5]
    python benchmarks/search_quality.py

The truth is benchmarks/results/ground_truth.csv: every network of benchmarks/ground_truth.yaml, trained from scratch;
with `--config FILE.yaml` it is the table of that configuration, and the results carry its name.
`--search` runs the searches of that configuration that have no row yet: each appends its string to
search_quality.csv, and to search_scores.csv scores of every network. A later start goes on with what is missing.

pi         log-probability under the last pi, in nats
inherited  minus the loss with the SuperNet's weights on text that they have not seen, in nats per token
estimate   the sum of both, log pi times half of search.entropy_end: the score by which `derive` chooses after a search
           with `uniform`; for other estimators the inherited score alone (parnas/nas/rerank.py)

A network has several strings where they may hold identity; its scores are those of the likeliest of them. Without
`--search` the tables are written: Kendall's tau and Spearman's rho between score and perplexity (the mean over the
table's seeds; for tau also each of them by itself, which is what the table's reliability compares with), medians over
the search's seeds, beside those of parameter count and multiply-adds; and what was
derived, and what is the most probable by pi alone, beside the best of equal or lower cost.
"""

import itertools
import math
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import harness
from ground_truth import CONFIG, Row, Study, read_settings, read_table_study, table_name
from scipy.stats import kendalltau, spearmanr
from trainings import append_rows, read_rows, require_corpus, work_off

from parnas.architecture import ATTENTION, Architecture
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.estimators import ESTIMATORS
from parnas.model.supernet import SuperNet
from parnas.nas.cost import Costs, count_costs, find_costs
from parnas.nas.derive import Constraints, derive, read_pi
from parnas.nas.latency_table import profile
from parnas.nas.rerank import held_out, shared_weight_losses
from parnas.nas.search import search
from parnas.runs.resolve import read_config
from parnas.training.loaded_run import load
from parnas.training.progress import Silent

NO_TARGET = "none"
TARGETS = (NO_TARGET, "0.65", "0.8")
SEEDS = 5
SEARCHES_BY = {name: {"search__estimator": name} for name in ESTIMATORS}
"""What is compared: settings of searches by name. A penalty on the cost is no part of `uniform` by default."""
SEARCHES_BY["uniform, penalised"] = {"search__estimator": "uniform", "search__cost__weight": 2.0}
SLICES = "uniform, shared slices"  # only for spaces with candidates that are parts of others
SEARCHES_BY[SLICES] = {"search__estimator": "uniform", "search__share_slices": True}
STRATUM = 0.03  # networks whose predicted latency is within this share of each other cost the same
ESTIMATE = "estimate"
SCORE_NAMES = ("pi", "inherited", ESTIMATE)


class Search(NamedTuple):
    """A finished search and what was derived from it."""

    estimator: str
    target: str
    seed: int
    steps: int
    arch: str  # derived, within the target
    by_pi: str  # the most probable network within the target
    seconds: float


class Score(NamedTuple):
    """What a search thinks of a network."""

    estimator: str
    target: str
    seed: int
    steps: int
    network: str
    pi: float
    inherited: float

    def of(self, name: str, config: Config) -> float:
        """Return one of `SCORE_NAMES`, given the configuration of the search."""
        if name == ESTIMATE:
            return self.inherited + config.search.rerank_pi_weight * self.pi
        value: float = getattr(self, name)
        return value


class Job(NamedTuple):
    """A search, and the targets to derive for; one search serves several where none of them changes it."""

    estimator: str
    target: str  # of the search
    seed: int
    derive: tuple[str, ...]


def find_jobs(config: Config, done: Sequence[Search], parsed: Namespace) -> Iterator[Job]:
    """Return the jobs without a row; one search serves all targets where a target changes neither alpha nor weights."""
    steps = config.search.steps
    known = {(row.estimator, row.target, row.seed) for row in done if row.steps == steps}
    for seed, estimator in itertools.product(range(1, parsed.seeds + 1), parsed.estimators):
        missing = tuple(target for target in parsed.targets if (estimator, target, seed) not in known)
        settings = config.replace(**SEARCHES_BY[estimator]).search
        if settings.cost_weight or settings.alpha_end_step < steps:
            yield from (Job(estimator, target, seed, (target,)) for target in missing)
        elif missing:
            yield Job(estimator, NO_TARGET, seed, missing)


def run_search(config: Config, networks: Collection[str], job: Job) -> tuple[list[Search], list[Score]]:
    """Search, derive and score the networks of the table."""
    aim = None if job.target == NO_TARGET else float(job.target)
    config = config.replace(search__cost__target=aim, runtime__seed=job.seed, **SEARCHES_BY[job.estimator])
    with tempfile.TemporaryDirectory(prefix="parnas-quality-") as folder:
        run = search(config, Path(folder) / "run", Silent())
        found, seconds = [], float(run.summary().seconds)
        for target in job.derive:
            limit = math.inf if target == NO_TARGET else float(target)
            arch, by_pi = (table_name(derive(run, Constraints(limit, rerank_top_k=n)).architecture) for n in (None, 0))
            found.append(Search(job.estimator, target, job.seed, config.search.steps, arch, by_pi, seconds))
        _, pi = read_pi(run, config)
        model = load(run.folder, supernet_weights=True).model
    assert isinstance(model, SuperNet)
    likeliest: dict[str, tuple[float, Architecture]] = {}
    for string in itertools.product(*config.search.block_spaces):
        chance = sum(math.log(max(row[name], 1e-38)) for row, name in zip(pi, string, strict=True))
        name = table_name(string)
        if name not in networks:
            continue
        if name not in likeliest or chance > likeliest[name][0]:
            likeliest[name] = chance, Architecture(string)
    streams, scores = prepare(config.data), []
    loss_of = shared_weight_losses(model, config, streams, held_out(config, streams))
    for network, (chance, architecture) in likeliest.items():
        inherited = -loss_of(architecture).per_token
        scores.append(Score(job.estimator, job.target, job.seed, config.search.steps, network, chance, inherited))
    return found, scores


class Paths(NamedTuple):
    """The files of a study."""

    truth: Path
    profile: Path
    searches: Path
    scores: Path
    result: str  # name of the result

    @classmethod
    def of(cls, config: Path, folder: Path) -> "Paths":
        """Return the paths for a configuration; those of ground_truth.yaml do not have its name."""
        name = "" if config.stem == CONFIG.stem else f"_{config.stem}"
        return cls(
            folder / f"{config.stem}.csv",
            folder / f"{config.stem}_profile.json",
            folder / f"search_quality{name}.csv",
            folder / f"search_scores{name}.csv",
            f"search_quality{name}",
        )


def search_missing(study: Study, paths: Paths, parsed: Namespace) -> None:
    """Run what has no row yet, and append its rows."""
    config, searches, scores = study.config, paths.searches, paths.scores
    prepare(config.data)  # once, not in every process
    jobs = list(find_jobs(config, read_rows(searches, Search), parsed))
    scored = {row[:4] for row in read_rows(scores, Score)}
    for found, of in work_off(partial(run_search, config, frozenset(study.networks)), jobs, parsed.workers):
        if of[0][:4] not in scored:
            append_rows(scores, of)
        append_rows(searches, found)
        for row in found:
            told = f"{row.arch}, by pi alone {row.by_pi} ({row.seconds:.0f} s)"
            print(f"{row.estimator} target {row.target} seed {row.seed}: {told}", flush=True)


# What it comes to.


class Truth(NamedTuple):
    """The table of networks: log perplexities by network, one for each seed, and the latency of each.

    All networks have the first seed; in a sample, only some have the others.
    """

    losses: Mapping[str, Sequence[float]]
    costs: Costs

    def mean(self, network: str) -> float:
        """Mean log perplexity over the seeds."""
        return mean(self.losses[network])

    def share(self, network: str) -> float:
        """Predicted latency as a share of the interleaved network's."""
        return self.costs.share(Architecture.parse(network))

    def single(self, seed: int) -> "Truth":
        """Return the table of one seed, by its index."""
        return Truth({network: [of[seed]] for network, of in self.losses.items() if len(of) > seed}, self.costs)

    @property
    def seeds(self) -> int:
        """How many there are."""
        return max(map(len, self.losses.values()))

    def repeated(self) -> list[str]:
        """Return the networks that were trained from every seed."""
        return [network for network, of in self.losses.items() if len(of) == self.seeds]

    def reliability(self, networks: Sequence[str]) -> float:
        """Mean of Kendall's tau between each two seeds: what one training says of another."""
        repeated = set(self.repeated())
        columns = list(zip(*(self.losses[network] for network in networks if network in repeated), strict=True))
        return mean(kendalltau(*pair).statistic for pair in itertools.combinations(columns, 2))

    def reliability_in_strata(self) -> float:
        """Return the mean of `agreement_in_strata` between each two seeds."""
        repeated = self.repeated()
        singles = [
            Truth({network: [self.losses[network][seed]] for network in repeated}, self.costs)
            for seed in range(self.seeds)
        ]
        return mean(
            agreement_in_strata(one, {network: -other.mean(network) for network in repeated})
            for one, other in itertools.combinations(singles, 2)
        )

    def seed_deviation(self, network: str) -> float:
        """Return the standard deviation over the seeds, in log perplexity."""
        return stdev(self.losses[network])

    def pooled_deviation(self) -> float:
        """Pooled standard deviation over all networks: with few seeds, that of a single network is too rough."""
        return math.sqrt(mean(self.seed_deviation(network) ** 2 for network in self.repeated()))


def read_truth(path: Path, study: Study, costs: Costs) -> Truth:
    """Return all networks of a study, from the seeds of which no training is missing."""
    found: dict[tuple[str, int], float] = {}
    for row in read_rows(path, Row):
        if row.steps == study.config.train.steps:
            found[row.arch, row.seed] = math.log(row.valid_ppl)
    most = max((seed for _, seed in found), default=0)
    wanted = list(study.seeds_of(most))
    whole = [seed for seed in range(1, most + 1) if all(job in found for job in wanted if job[1] == seed)]
    if len(whole) < 2:
        raise ParnasError(f"{path} has all networks from {len(whole)} seeds, of 2 at least; run ground_truth.py.")
    losses = {arch: [found[arch, seed] for seed in whole if (arch, seed) in wanted] for arch in study.networks}
    return Truth(losses, costs)


def subsets(truth: Truth) -> dict[str, list[str]]:
    """All networks, those with attention, and those of attention alone."""
    known = list(truth.losses)
    return {
        "all": known,
        "with attention": [network for network in known if ATTENTION in network],
        "attention alone": [network for network in known if set(Architecture.parse(network)) == {ATTENTION}],
    }


def agreement(truth: Truth, score: Mapping[str, float], chosen: Sequence[str]) -> tuple[float, float]:
    """Kendall's tau (b) and Spearman's rho between a score, where more is better, and the table."""
    known = [-truth.mean(network) for network in chosen]
    scores = [score[network] for network in chosen]
    return kendalltau(scores, known).statistic, spearmanr(scores, known).statistic


def agreement_in_strata(truth: Truth, score: Mapping[str, float]) -> float:
    """Share of concordant less discordant pairs among networks that cost the same; nan if no two do."""
    signs = []
    for one, other in itertools.combinations(truth.losses, 2):
        costs = sorted((truth.share(one), truth.share(other)))
        if costs[1] <= costs[0] * (1 + STRATUM):
            product = (score[one] - score[other]) * (truth.mean(other) - truth.mean(one))
            signs.append((product > 0) - (product < 0))
    return mean(signs) if signs else math.nan


def rank_table(truth: Truth, scores: Sequence[Score], config: Config) -> list[dict[str, Any]]:
    """Return a row per estimator and score, and one per simple count, as medians over seeds."""
    by_search: dict[tuple[str, str, int], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in scores:
        searched = config.replace(**SEARCHES_BY[row.estimator])
        for name in SCORE_NAMES:
            by_search[row.estimator, row.target, row.seed][name][row.network] = row.of(name, searched)
    rivals = {
        "parameters": count_costs(config, "parameters").per_layer,
        "multiply-adds": count_costs(config, "macs").per_layer,
        "latency": truth.costs.per_layer,
    }
    records = []
    for title, of in rivals.items():
        score = {network: sum(of[layer] for layer in Architecture.parse(network)) for network in truth.losses}
        records.append({"ranked by": title, "target": "", "seeds": "", **describe_score(truth, [score])})
    for estimator, target in dict.fromkeys((row.estimator, row.target) for row in scores):
        of_seeds = [found for key, found in by_search.items() if key[:2] == (estimator, target)]
        names = SCORE_NAMES if config.replace(**SEARCHES_BY[estimator]).search.rerank_pi_weight else SCORE_NAMES[:-1]
        for name in names:
            figures = describe_score(truth, [found[name] for found in of_seeds])
            records.append({"ranked by": f"{estimator}: {name}", "target": target, "seeds": len(of_seeds), **figures})
    return records


def describe_score(truth: Truth, of_seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Agreement with the table in each subset, medians over seeds."""
    figures: dict[str, float] = {}
    for title, chosen in subsets(truth).items():
        pairs = [agreement(truth, score, chosen) for score in of_seeds]
        figures[f"tau, {title}"] = median(tau for tau, _ in pairs)
        if title == "all":
            figures["rho, all"] = median(rho for _, rho in pairs)
            singles = [truth.single(seed) for seed in range(truth.seeds)]
            figures["tau, one training"] = median(
                mean(agreement(single, score, list(single.losses))[0] for single in singles) for score in of_seeds
            )
    figures["tau, equal latency"] = median(agreement_in_strata(truth, score) for score in of_seeds)
    return figures


def derived_table(truth: Truth, searches: Sequence[Search]) -> list[dict[str, Any]]:
    """Return a row per estimator and target: the derived network and the best one of at most equal cost.

    A table of all networks has every derived network; a sample cannot be expected to, and has no such rows.
    """
    records = []
    cases = dict.fromkeys((row.estimator, row.target) for row in searches)
    for (estimator, target), way in itertools.product(cases, ("arch", "by_pi")):
        found = [getattr(row, way) for row in searches if (row.estimator, row.target) == (estimator, target)]
        bound = math.inf if target == NO_TARGET else float(target)
        allowed = sorted((n for n in truth.losses if truth.share(n) <= bound + 1e-9), key=truth.mean)
        best = allowed[0]
        behind = [truth.mean(arch) - truth.mean(best) for arch in found]
        beaten = [mean(truth.mean(arch) <= truth.mean(other) for other in allowed) for arch in found]
        records.append(
            {
                "estimator": estimator,
                "target": target,
                "by": "search and derive" if way == "arch" else "pi alone",
                "networks": " ".join(found),
                "share of latency": median(truth.share(arch) for arch in found),
                "best": best,
                "behind the best": f"{100 * median(behind):.2f} %",
                "seed deviation": f"{100 * truth.pooled_deviation():.2f} %",
                "of the best": f"{100 * truth.seed_deviation(best):.2f} %",
                "at least as good as": f"{100 * median(beaten):.0f} % of {len(allowed)}",
            }
        )
    return records


def report(study: Study, paths: Paths, parsed: Namespace) -> None:
    """Print and write the tables."""
    config = study.config
    costs = find_costs(config, config.search.cost.metric, Silent())
    truth = read_truth(paths.truth, study, costs)
    scores, searches = (
        [row for row in read_rows(path, kind) if row.steps == config.search.steps]
        for path, kind in ((paths.scores, Score), (paths.searches, Search))
    )
    ceiling = {title: truth.reliability(chosen) for title, chosen in subsets(truth).items() if chosen}
    ceiling["equal latency"] = truth.reliability_in_strata()
    harness.print_table(
        f"Reliability of the table: Kendall's tau between seeds, {len(truth.repeated())} networks",
        [{"networks": title, "tau": tau} for title, tau in ceiling.items()],
    )
    ranks = rank_table(truth, scores, config)
    derived = [] if study.is_sample else derived_table(truth, searches)
    harness.print_table("Agreement with the table", ranks)
    if derived:
        harness.print_table("Derived architectures", derived)
    payload = {"ceiling": ceiling, "ranks": ranks, "derived": derived, "layer_ms": dict(costs.per_layer)}
    device = harness.choose(parsed.device, config.runtime.precision)
    harness.write_result(paths.result, device, {"precisions": [device.precision], **payload}, parsed)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, [], ["workers"])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--profile", action="store_true", help="measure what the layers cost")
    parser.add_argument("--search", action="store_true", help="run the searches that have no row yet")
    parser.add_argument(
        "--estimators", nargs="+", default=[name for name in SEARCHES_BY if name != SLICES], choices=SEARCHES_BY
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="shares of the latency, or none")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parsed = parser.parse_args(arguments)
    folder = harness.results_folder(parsed)
    paths = Paths.of(parsed.config, folder)
    if parsed.profile:  # so that searches and samples anywhere work with the same costs
        config = read_config(read_settings(parsed.config)[0], [("runtime.device", parsed.device)])
        profile(config, Silent(), rounds=100).write(paths.profile)
        return
    study = read_table_study(parsed.config, parsed.device, folder)
    require_corpus(study.config)
    if parsed.search:
        search_missing(study, paths, parsed)
    else:
        report(study, paths, parsed)


if __name__ == "__main__":
    harness.run(main)
