"""Compression of trained networks, beside trainings from scratch: `python benchmarks/compress.py`.

    python benchmarks/compress.py --profile              # the latency of each layer
    python benchmarks/compress.py --runs DIR             # train what is missing; trained parents are kept in DIR
    python benchmarks/compress.py --runs DIR --children  # heal random children for a short time, and score them
    python benchmarks/compress.py --runs DIR --times     # measure the time of a step of each training in turns
    python benchmarks/compress.py --latency              # measure the latency of all networks in turns
    python benchmarks/compress.py --report               # print and write the tables of the finished trainings

Trainings of each seed, for the targets T of benchmarks/compress.yaml; those from scratch for one of them:

parent           the interleaved network; from the first seed also for twice the steps
search           local distillation and scores in the parent
child T          the network that the search selects within T, healed with the parent as its teacher
scratch T        the same network, trained from scratch for the time of the parent's training
shallower T      an interleaved network of the same cost, trained from scratch for the time of the parent's training and
                 of all that the compression took
taught T         scratch T with its parent as its teacher, for equal steps, of the first seed
short T          scratch T for as many steps as the healing of child T
short-taught T   short T with the parent of the first seed as its teacher

Times are seconds of processor time of one thread. Trainings on different days cannot be compared by their times, since
machines differ. So steps are timed in turns: before a training, whose number of steps follows, and for the tables.
"""

import math
import shutil
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import comparison
import harness
from equal_time import predicted_shares
from scipy.stats import kendalltau
from trainings import append_rows, measure_test, read_rows, read_study, require_corpus
from typing_extensions import override
from variants import compare

from parnas.architecture import ATTENTION, CONVOLUTION, FEED_FORWARD, RECURRENCE, Architecture
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.nas.cost import find_costs
from parnas.nas.derive import Constraints, derive, read_pi
from parnas.nas.latency_table import profile as measure_layers
from parnas.nas.random_sampling import draw_networks
from parnas.nas.rerank import held_out, shared_weight_losses
from parnas.nas.search import search
from parnas.pretrained.local_distillation import run_search, score_candidates, search_parent
from parnas.pretrained.parent import cheaper_layers
from parnas.pretrained.settings import heal_settings, search_settings
from parnas.runs.files import read_json, write_json
from parnas.runs.run import Run
from parnas.studies.baselines import EQUAL_COST, hand_designed
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.progress import Loop, Reporter, Silent
from parnas.training.retrain import retrain

PARENT, LONGER, SEARCH, SUPERNET = "parent", "parent, twice the steps", "search", "SuperNet search"
SCORES = "scores"  # of the search
CHILD, TRAINED, SHALLOWER, TAUGHT, RANDOM = "child", "scratch", "shallower", "taught", "random"
SHORT, SHORT_TAUGHT = "short", "short-taught"
PACE_STEPS, PACE_WARM_UP, PACE_ROUNDS = 16, 4, 2  # of measuring the time of a training step
STRATA = 6  # ranges of latency from which random children are drawn
LEAST = 1e-38  # probability of a candidate whose pi is zero
TINY_PLAN: dict[str, Any] = {
    "seeds": [1],
    "targets": [0.8],
    "from_scratch": 0.8,
    "children": {"networks": 3, "low": 0.2, "high": 1.0, "steps": 4, "seeds": [1, 2]},
}
TINY = comparison.TINY | {
    "model": comparison.TINY["model"] | {"arch": "interleaved-4", "n_heads": 4},
    "train": {"steps": 20, "warmup_steps": 1},
}


class Row(NamedTuple):
    """A finished training: perplexities per token, and processor times in seconds."""

    name: str
    seed: int
    arch: str
    steps: int
    ppl: float = math.nan  # on the validation split, by whose beginning layers are selected
    training: float = math.nan  # the steps
    total: float = math.nan  # with everything else: loading, scores, selection, validation
    test: float = math.nan  # on the test split, only of networks that are reported
    precision: str = ""  # of matrix products, bf16 or fp32

    def retimed(self, step: float | None) -> "Row":
        """Return the row with times that follow from the seconds of a step; `None`: keep those that were recorded."""
        if step is None:
            return self
        training = self.steps * step
        return self._replace(training=training, total=training * self.total / self.training)


class Score(NamedTuple):
    """What a search says of a random network; higher is better."""

    source: str  # SEARCH or SUPERNET
    arch: str
    pi: float  # log pi
    inherited: float  # minus the loss with the weights of the search, nats per token


class _Enough(Exception):
    """The last step that is timed is done."""


class Clock(Reporter):
    """Measures the processor time of the training steps, from the step `first` on; ends a training after `last`."""

    def __init__(self, first: int = 0, last: int | None = None) -> None:
        self.first, self.last, self.started = first, last, 0.0
        self.seconds, self.before, self.steps = 0.0, 0.0, 0  # of all steps, of all but the last, and their number

    @override
    def start(self, loop: Loop) -> None:
        if loop.folder is not None and not self.first:
            self.started = time.process_time()

    @override
    def advance(self, step: int) -> None:
        now = time.process_time()
        if step == self.first:
            self.started = now
        self.seconds, self.before, self.steps = now - self.started, self.seconds, step
        if step == self.last:
            raise _Enough

    def of_steps(self) -> float:
        """Return the seconds of all steps; the last counts as a mean one, because a search scores layers after it."""
        return self.before * self.steps / (self.steps - 1) if self.steps > 1 else self.seconds


def step_times(trainings: Mapping[str, Config]) -> dict[str, float]:
    """Return the seconds of a step of each training or search, by name; they take turns."""
    times: dict[str, list[float]] = defaultdict(list)
    last = PACE_WARM_UP + PACE_STEPS
    for _ in range(PACE_ROUNDS):
        for name, config in trainings.items():
            run, section = (run_search, "search") if config.model.arch is None else (retrain, "train")
            short = config.replace(**{f"{section}__steps": last + 1, f"{section}__warmup_steps": 1})
            clock = Clock(PACE_WARM_UP, last)
            with tempfile.TemporaryDirectory(prefix="parnas-compress-") as folder:
                try:
                    run(short, Path(folder) / "run", clock)
                except _Enough:
                    times[name].append(clock.seconds / PACE_STEPS)
    return {name: min(of) for name, of in times.items()}


class Job(NamedTuple):
    """A training to be done."""

    name: str
    seed: int


@dataclass(frozen=True)
class Bench:
    """The trainings of a seed.

    Args:
        config: the configuration of the parent's training, with the seed.
        plan: see benchmarks/compress.yaml.
        folder: where the runs are kept that others start from.
        rows: the finished trainings of this seed, by name.
    """

    config: Config
    plan: Mapping[str, Any]
    folder: Path
    rows: Mapping[str, Row]

    def train(self, name: str) -> Row:
        """Do a training by its name and return its row; runs of the folder that it starts from are made if missing."""
        kind, _, rest = name.partition(" ")
        if name == LONGER:
            return self.scratch(name, str(self.config.model.arch), 2 * self.config.train.steps)
        if name == SUPERNET:
            return self.supernet_search()
        if name in (PARENT, SEARCH) or kind in (CHILD, RANDOM):
            return self.make(name)
        child = self.rows[f"{CHILD} {rest}"]
        if kind == TAUGHT:
            return self.scratch(name, child.arch, self.rows[f"{TRAINED} {rest}"].steps)
        if kind in (SHORT, SHORT_TAUGHT):
            return self.scratch(name, child.arch, child.steps)
        return self.from_scratch(name, kind, child)

    def make(self, name: str) -> Row:
        """Train the parent, search in it, or heal a child, in a folder that is kept; return the row."""
        folder, clock, began = self.folder / name.replace(" ", "-"), Clock(), time.process_time()
        kind, _, rest = name.partition(" ")
        if folder.exists():  # left by a training that was cut off, whose time is not known
            shutil.rmtree(folder)
        if name == PARENT:
            run = retrain(self.config, folder, clock)
        elif name == SEARCH:
            run = search_parent(self.search_settings(), folder, clock)
        else:
            run = self.heal(kind, rest, folder, clock)
        summary = run.summary()
        times = clock.of_steps(), time.process_time() - began
        test = measure_test(run) if kind in (PARENT, CHILD) else math.nan
        ppl, seed = summary.valid.ppl, self.config.runtime.seed
        return Row(name, seed, summary.arch, summary.steps, ppl, *times, test, self.precision)

    @property
    def precision(self) -> str:
        """The precision of matrix products on this machine, bf16 or fp32."""
        return choose_device(self.config.runtime).precision

    def teacher(self) -> Run:
        """Return the parent of the first seed, and train it if it is missing."""
        first = self.plan["seeds"][0]
        config, folder = self.config.replace(runtime__seed=first), self.folder.with_name(f"seed-{first}")
        return replace(self, config=config, folder=folder).existing(PARENT)

    def existing(self, name: str) -> Run:
        """Return a run that is kept, and make it if it is missing."""
        run = Run(self.folder / name)
        if not run.finished():
            self.make(name)
        return run

    def search_settings(self) -> Config:
        """Return the settings of the search in the parent."""
        settings = search_settings(self.existing(PARENT))
        return settings.replace(search__cost__table=self.config.search.cost.table)  # it may have been moved

    def heal_settings(self, arch: str) -> Config:
        """Return the settings of the healing of a network."""
        return heal_settings(self.existing(SEARCH)).replace(model__arch=arch)

    def heal(self, kind: str, rest: str, folder: Path, clock: Clock) -> Run:
        """Heal the child within a target, or a random one for a short time."""
        if kind == CHILD:
            derived = derive(self.existing(SEARCH), Constraints(float(rest))).architecture
            return retrain(self.heal_settings(str(derived)), folder, clock)
        number, seed = map(int, rest.split("/"))
        arch = self.random_networks()[number]
        settings = self.heal_settings(str(Architecture(arch)))
        changes = {"train__steps": self.plan["children"]["steps"], "runtime__seed": seed}
        run = retrain(settings.replace(**changes), folder, clock)
        shutil.rmtree(run.checkpoints)  # nothing starts from it
        return run

    def from_scratch(self, name: str, kind: str, child: Row) -> Row:
        """Train a child's network, or a shallower one of its cost, from scratch for the time of the parent's training.

        The shallower one also has the time of the compression.
        """
        arch, paced = child.arch, [self.rows[PARENT]]
        if kind == SHALLOWER:
            costs = find_costs(self.search_settings(), "latency", Silent())
            derived = Architecture.parse(child.arch)
            arch = str(Architecture.parse(hand_designed([EQUAL_COST], derived, costs, len(derived))[EQUAL_COST]))
            paced += [self.rows[SEARCH], child]
        trainings = {row.name: self.settings(row) for row in paced}
        times = step_times(trainings | {name: self.config.replace(model__arch=arch)})
        parent, *compression = (row.retimed(times[row.name]) for row in paced)
        seconds = parent.training * (1 + sum(row.total for row in compression) / parent.total)
        return self.scratch(name, arch, round(seconds / times[name]))

    def settings(self, row: Row) -> Config:
        """Return the settings of the training of a row."""
        kind, _, _ = row.name.partition(" ")
        if row.name == SEARCH:
            return self.search_settings()
        if kind == CHILD:
            return self.heal_settings(row.arch)
        teachers = (str(self.teacher().folder),) if kind in (TAUGHT, SHORT_TAUGHT) else ()
        return self.config.replace(model__arch=row.arch, train__steps=row.steps, train__teachers=teachers)

    def times(self) -> dict[str, float]:
        """Return the seconds of a step of each training, by name, and of all scores of the search."""
        trainings = {
            name: self.settings(row) for name, row in self.rows.items() if not name.startswith((RANDOM, SUPERNET))
        }
        return step_times(trainings) | ({SCORES: self.score_time()} if SEARCH in self.rows else {})

    def score_time(self) -> float:
        """Return the seconds in which the search scores all candidates, each in place of the parent's layer."""
        loaded = load(self.existing(SEARCH).folder, supernet_weights=True)
        config, supernet, layers = loaded.config, loaded.model, Architecture.parse(self.rows[PARENT].arch).layers
        assert isinstance(supernet, SuperNet)
        streams, device = prepare(config.data), choose_device(config.runtime)
        began = time.process_time()
        score_candidates(supernet, layers, config, streams, device, Silent().note)
        return time.process_time() - began

    def scratch(self, name: str, arch: str, steps: int) -> Row:
        """Train a network from scratch in a folder that is not kept; return the row."""
        seed, clock, began = self.config.runtime.seed, Clock(), time.process_time()
        planned = Row(name, seed, arch, steps, precision=self.precision)
        with tempfile.TemporaryDirectory(prefix="parnas-compress-") as place:
            run = retrain(self.settings(planned), Path(place) / "run", clock)
            times, test = (clock.of_steps(), time.process_time() - began), measure_test(run)
            return planned._replace(ppl=run.summary().valid.ppl, training=times[0], total=times[1], test=test)

    def random_networks(self) -> list[tuple[str, ...]]:
        """Return random networks of the search's space, equally many from each of `STRATA` ranges of latency."""
        settings, plan = self.search_settings(), self.plan["children"]
        costs = find_costs(settings, "latency", Silent())
        low, high = (plan[key] * costs.reference for key in ("low", "high"))
        strata, networks = min(STRATA, plan["networks"]), list[tuple[str, ...]]()
        for number in range(strata):
            bounds = (low + (high - low) * place / strata for place in (number, number + 1))
            drawn = draw_networks(settings.search.block_spaces, costs.per_layer, *bounds, seed=1)
            networks += islice(drawn, plan["networks"] // strata)
        return networks

    def supernet_search(self) -> Row:
        """Train a SuperNet of the same space from scratch for the time of the search in the parent; return the row."""
        # 1. As many steps as fit into the time of the search in the parent.
        settings, searched = self.supernet_settings(), self.rows[SEARCH]
        times = step_times({SEARCH: self.search_settings(), SUPERNET: settings})
        steps = max(8, round(searched.retimed(times[SEARCH]).total / times[SUPERNET]))
        # 2. The search.
        folder, clock, began = self.folder / SUPERNET.replace(" ", "-"), Clock(), time.process_time()
        changes = {"search__warmup_steps": steps // 20, "search__alpha_start_step": steps // 2}
        if folder.exists():
            shutil.rmtree(folder)
        summary = search(settings.replace(**changes, search__steps=steps), folder, clock).summary()
        times, ppl = (clock.of_steps(), time.process_time() - began), summary.valid.ppl
        return Row(SUPERNET, self.config.runtime.seed, summary.arch, steps, ppl, *times, precision=self.precision)

    def supernet_settings(self) -> Config:
        """Return the settings of a search of the same space from scratch, in which all paths are equally probable."""
        changes = {"search__parent": None, "search__warmup_steps": 0, "search__rerank_top_k": 0}
        changes |= {"search__uniform_fraction": 1.0, "search__alpha_start_step": 1}
        return self.search_settings().replace(**changes)

    def scores(self) -> list[Score]:
        """Return the scores of the random networks by both searches."""
        networks, scores = self.random_networks(), list[Score]()
        for source in (SEARCH, SUPERNET):
            run = Run(self.folder / source.replace(" ", "-"))
            config = run.config()
            _, pi = read_pi(run, config)
            model = load(run.folder, supernet_weights=True).model
            assert isinstance(model, SuperNet)
            streams = prepare(config.data)
            loss_of = shared_weight_losses(model, config, streams, held_out(config, streams))
            for network in networks:
                chance = sum(math.log(max(row[name], LEAST)) for row, name in zip(pi, network, strict=True))
                inherited = -loss_of(Architecture(network)).per_token
                scores.append(Score(source, str(Architecture(network)), chance, inherited))
        return scores


def train(config: Config, plan: Mapping[str, Any], folder: Path, rows: Sequence[Row], job: Job) -> Row:
    """Do a job and return its row."""
    return seed_bench(config, plan, folder, rows, job.seed).train(job.name)


def seed_bench(config: Config, plan: Mapping[str, Any], folder: Path, rows: Sequence[Row], seed: int) -> Bench:
    """Return the trainings of a seed."""
    own = {row.name: row for row in rows if row.seed == seed}
    return Bench(config.replace(runtime__seed=seed), plan, folder / f"seed-{seed}", own)


def needed(name: str) -> tuple[str, ...]:
    """Return the names of the trainings that must be finished before one can begin."""
    kind, _, rest = name.partition(" ")
    if name in (PARENT, LONGER):
        return ()
    if name == SEARCH:
        return (PARENT,)
    if kind in (CHILD, RANDOM) or name == SUPERNET:
        return (SEARCH,)
    return (f"{TRAINED if kind == TAUGHT else CHILD} {rest}",)


def list_jobs(plan: Mapping[str, Any], rows: Sequence[Row], children: bool) -> list[Job]:
    """Return the trainings that have no row and can begin, all of one seed before the next.

    With `children` these are the random children, and what they start from.
    """
    done, first, jobs = {(row.seed, row.name) for row in rows}, plan["seeds"][0], list[Job]()
    for seed in plan["seeds"]:
        names = [PARENT, SEARCH, *(f"{CHILD} {target}" for target in plan["targets"])]
        names += [f"{kind} {plan['from_scratch']}" for kind in (TRAINED, SHALLOWER, SHORT, SHORT_TAUGHT)]
        jobs += [Job(name, seed) for name in names]
    jobs += [Job(f"{TAUGHT} {plan['from_scratch']}", first), Job(LONGER, first)]
    if children:
        each = plan["children"]
        jobs = [job for job in jobs if job.name in (PARENT, SEARCH) and job.seed == first]
        jobs.append(Job(SUPERNET, first))
        jobs += [
            Job(f"{RANDOM} {number}/{seed}", first) for seed in each["seeds"] for number in range(each["networks"])
        ]
    missing = [job for job in jobs if (job.seed, job.name) not in done]
    return [job for job in missing if all((job.seed, name) in done for name in needed(job.name))]


def train_all(table: Path, config: Config, plan: Mapping[str, Any], folder: Path, children: bool, workers: int) -> None:
    """Train what has no row in a table in several processes, each training as soon as those that it needs are done."""
    prepare(config.data)  # once, not in every process
    running: dict[Future[Row], Job] = {}
    with harness.processes(workers) as pool:
        while True:
            rows = read_rows(table, Row)
            left = [job for job in list_jobs(plan, rows, children) if job not in running.values()]
            for job in left[: workers - len(running)]:
                running[pool.submit(train, config, plan, folder, rows, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                append_rows(table, [future.result()])
                print(*future.result(), sep=", ", flush=True)


def summarise(
    plan: Mapping[str, Any],
    rows: Sequence[Row],
    latencies: Mapping[str, Mapping[str, float]],
    times: Mapping[str, Mapping[str, float]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a record for each name of training, and one for each comparison of two of them, paired by seed.

    Args:
        plan: see benchmarks/compress.yaml.
        rows: the finished trainings.
        latencies: of the blocks (`stack`) and the network (`whole`) by architecture, relative to the parent's; without
            `whole`, that of the blocks is predicted.
        times: seconds of a step by seed and name, and those of all scores.

    The times of a record are means, relative to that of the parent's training: `training` of the steps, `scores` of the
    scores, `total` of everything.
    """
    by_name: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if not row.name.startswith(RANDOM):
            by_name[row.name][row.seed] = row.retimed(times.get(str(row.seed), {}).get(row.name))
    parents, records = by_name[PARENT], []
    for name, of_seed in by_name.items():
        archs = list(dict.fromkeys(row.arch for row in of_seed.values()))
        record = {
            "name": name,
            "seeds": len(of_seed),
            "archs": archs,
            "steps": fmean(r.steps for r in of_seed.values()),
            "precisions": sorted({row.precision for row in of_seed.values()}),
        }
        for key in ("training", "total"):
            record[key] = fmean(getattr(row, key) / parents[seed].total for seed, row in of_seed.items())
        record["seconds"] = fmean(row.total for row in of_seed.values())
        if name == SEARCH:
            scored = {seed: times.get(str(seed), {}).get(SCORES) for seed in of_seed}
            shares = [seconds / parents[seed].total for seed, seconds in scored.items() if seconds is not None]
            record |= {"scores": fmean(shares)} if shares else {}
        if name not in (SEARCH, SUPERNET):
            record["ppl"] = fmean(row.ppl for row in of_seed.values())
            record["ppl_by_seed"] = {str(seed): of_seed[seed].ppl for seed in sorted(of_seed)}
            test = fmean(row.test for row in of_seed.values())
            record["test"] = None if math.isnan(test) else test  # the test split was not read
            record["test_by_seed"] = {str(seed): of_seed[seed].test for seed in sorted(of_seed)}
            if all(arch in latencies for arch in archs):
                slowest = max(archs, key=lambda arch: latencies[arch]["stack"])
                record["latency"] = latencies[slowest]["stack"]
                record |= {"whole": whole} if (whole := latencies[slowest].get("whole")) else {"predicted": True}
        records.append(record)
    wanted = [(LONGER, PARENT)]
    wanted += [(f"{CHILD} {target}", PARENT) for target in plan["targets"]]
    child, scratch, shallower, taught, short, short_taught = (
        f"{kind} {plan['from_scratch']}" for kind in (CHILD, TRAINED, SHALLOWER, TAUGHT, SHORT, SHORT_TAUGHT)
    )
    wanted += [(child, scratch), (child, shallower), (child, short_taught), (taught, scratch), (short_taught, short)]
    comparisons = []
    for ours, theirs in wanted:
        if by_name[ours].keys() & by_name[theirs].keys():
            ppl, test = (
                compare(*({seed: getattr(row, key) for seed, row in by_name[name].items()} for name in (ours, theirs)))
                for key in ("ppl", "test")
            )
            read = not math.isnan(test["percent"])
            comparisons.append({"network": ours, "relative_to": theirs, **ppl, "test": test if read else None})
    return records, comparisons


def rank_children(
    plan: Mapping[str, Any], rows: Sequence[Row], scores: Sequence[Score], pi_weight: float
) -> dict[str, Any]:
    """Return how well scores rank the random children: Kendall's tau with their perplexity, and the reliability of it.

    `tau` is the mean over the seeds of the healing, `reliability` the tau between the perplexities of two seeds. The
    score `both` is the inherited one plus `pi_weight` times that of pi.
    """
    ppl: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.name.startswith(RANDOM):
            ppl[int(row.name.partition("/")[2])][row.arch] = row.ppl
    seeds = plan["children"]["seeds"]
    if any(len(ppl[seed]) < plan["children"]["networks"] for seed in seeds):
        return {}
    archs = list(ppl[seeds[0]])
    columns = {seed: [ppl[seed][arch] for arch in archs] for seed in seeds}
    records = []
    for source in dict.fromkeys(score.source for score in scores):
        found = {score.arch: score for score in scores if score.source == source}
        of = [found[arch] for arch in archs]
        kinds = {"pi": [each.pi for each in of], "inherited": [each.inherited for each in of]}
        kinds["both"] = [each.inherited + pi_weight * each.pi for each in of]
        for kind, values in kinds.items():
            tau = fmean(-float(kendalltau(values, columns[seed]).statistic) for seed in seeds)
            records.append({"search": source, "score": kind, "tau": tau})
    reliability = float(kendalltau(*(columns[seed] for seed in seeds[:2])).statistic)
    return {"networks": len(archs), "steps": plan["children"]["steps"], "reliability": reliability, "scores": records}


def format_record(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the printed table."""
    return {
        "network": record["name"],
        "seeds": str(record["seeds"]),
        "latency of the layers": (
            f"{record['latency']:.2f}{' (predicted)' * record.get('predicted', False)}" if "latency" in record else "–"
        ),
        "whole network": f"{record['whole']:.2f}" if "whole" in record else "–",
        "steps": f"{record['steps']:,.0f}",
        "precision": ", ".join(record["precisions"]),
        "time": f"{record['total']:.3f}",
        "minutes": f"{record['seconds'] / 60:.1f}",
        "valid": f"{record['ppl']:.2f}" if "ppl" in record else "–",
        "test": f"{record['test']:.2f}" if record.get("test") else "–",
    }


def format_comparison(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table of comparisons."""

    def describe(difference: Mapping[str, Any] | None) -> str:
        if difference is None:
            return "–"
        text = f"{difference['percent']:+.2f} %"
        if difference["p"] is None:
            return text
        return f"{text} ({difference['low']:+.2f} to {difference['high']:+.2f} %, p = {difference['p']:.2g})"

    splits = {"valid": describe(record), "test": describe(record["test"])}
    return {"network": record["network"], "relative to": record["relative_to"], **splits}


def candidates(config: Config) -> tuple[str, ...]:
    """Return all layers of the searches, and those of the networks that they are compared with."""
    names = [
        name
        for own in (ATTENTION, FEED_FORWARD)
        for name in (own, *cheaper_layers(own, config.model, config.data.tgt_len))
    ]
    return tuple(dict.fromkeys([*names, CONVOLUTION, RECURRENCE]))


def count_alternatives(config: Config, parent: Architecture) -> int:
    """Return how many layers the search scores in place of the parent's."""
    new = {ATTENTION: 2}  # convolution and recurrence
    return sum(len(cheaper_layers(name, config.model, config.data.tgt_len)) + new.get(name, 0) for name in parent)


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers", "runs"])
    stage = parser.add_mutually_exclusive_group()
    for name in ("profile", "children", "times", "latency", "report"):
        stage.add_argument(f"--{name}", dest="stage", action="store_const", const=name, default="train")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed: Namespace = make_parser().parse_args(arguments)
    config, plan = read_study(Path(__file__).with_suffix(".yaml"), parsed, TINY, TINY_PLAN)
    folder = harness.results_folder(parsed)
    profile, latency, timed = (folder / f"compress_{name}.json" for name in ("profile", "latency", "times"))
    table, scored = folder / "compress.csv", folder / "compress_scores.csv"
    config = config.replace(search__cost__table=str(profile.resolve()))
    rows, quick = read_rows(table, Row), parsed.size == "tiny"
    if parsed.stage != "report":
        require_corpus(config)
    if parsed.stage == "profile":
        blocks = len(Architecture.parse(str(config.model.arch)))
        changes = {"search__cost__table": None, "search__space": candidates(config), "search__blocks": blocks}
        spaced = config.replace(**changes)
        measure_layers(spaced, Silent(), rounds=2 if quick else 200, check=0).write(profile)
    elif parsed.stage in ("train", "children", "times") and parsed.runs is None:
        raise ParnasError("Give a folder for the run folders (--runs).")
    elif parsed.stage in ("train", "children"):
        children = parsed.stage == "children"
        train_all(table, config, plan, parsed.runs, children, parsed.workers)
        if children and not scored.is_file():
            append_rows(scored, seed_bench(config, plan, parsed.runs, rows, plan["seeds"][0]).scores())
    elif parsed.stage == "times":
        write_json(
            timed, {str(seed): seed_bench(config, plan, parsed.runs, rows, seed).times() for seed in plan["seeds"]}
        )
    elif parsed.stage == "latency":
        archs = {row.arch for row in rows if not row.name.startswith(RANDOM)}
        measured = comparison.measure_latencies(config, map(Architecture.parse, archs), 2 if quick else 450)
        write_json(latency, measured)
    else:
        of = read_json(latency)["of"] if latency.is_file() else {}
        parent = Architecture.parse(str(config.model.arch))
        shares = {
            arch: {key: each[f"{key}_ms"] / of[str(parent)][f"{key}_ms"] for key in ("stack", "whole")}
            for arch, each in of.items()
        }
        if profile.is_file():
            archs = {row.arch for row in rows} - shares.keys()
            predicted = predicted_shares(read_json(profile), archs, str(parent))
            shares |= {arch: {"stack": share} for arch, share in predicted.items()}
        records, comparisons = summarise(plan, rows, shares, read_json(timed) if timed.is_file() else {})
        harness.print_table("Compression and trainings from scratch", [format_record(each) for each in records])
        layers = [
            {"network": each["name"], "layers": arch} for each in records if "ppl" in each for arch in each["archs"]
        ]
        harness.print_table("Layers", layers)
        harness.print_table("Differences", [format_comparison(each) for each in comparisons])
        ranking = rank_children(plan, rows, read_rows(scored, Score), config.search.entropy_end / 2)
        if ranking:
            harness.print_table("Kendall's tau of scores and random children", ranking["scores"])
        device = choose_device(config.runtime)
        payload = {
            "precisions": sorted({row.precision for row in rows}),
            "from_scratch": plan["from_scratch"],
            "blocks": len(parent),
            "alternatives": count_alternatives(config, parent),
            "networks": records,
            "comparisons": comparisons,
            "ranking": ranking,
        }
        harness.write_result("compress", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
