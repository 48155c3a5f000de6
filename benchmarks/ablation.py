"""Measure the effect of each part of a training recipe, changed one at a time: `python benchmarks/ablation.py`.

    python benchmarks/ablation.py [--plan NAME] [--workers N] [--runs DIR] [--report] [--only CHANGE]

benchmarks/NAME.yaml names the recipe, the budget and the changes. All trainings have the same number of steps, those of
a search included and those of teachers not, on the same share of the training text, on one thread each. A finished
training appends a row to NAME.csv, and a later start trains only what is missing; rows of another budget or recipe are
ignored. The recipe is trained with several seeds, which shows the random variation. Plans:

ablation           an earlier recipe for configs/wikitext2-word-cpu.yaml, at small size
ablation_hybrid    a later one at the same size: embedding, pointer, layers, the search, teachers, averages
"""

import hashlib
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import harness
from trainings import cut_corpus, read_rows, read_study, require_corpus, train_missing, work_off
from tried import TRIED

from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.nas.derive import derive
from parnas.nas.one_run import split_training
from parnas.nas.search import search
from parnas.runs.files import to_json
from parnas.runs.resolve import read_config, read_overrides
from parnas.runs.run import Run
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

RECIPE = "the recipe"
TINY = {
    "data": {"batch_size": 2, "tgt_len": 4},
    "model": {"d_model": 16, "n_heads": 2, "d_inner": 32, "mem_len": 4, "cutoffs": [5, 12]},
    "train": {"steps": 8, "warmup_steps": 2, "log_every": 4, "eval_every": 8, "save_every": 8},
    "runtime": {"precision": "fp32"},
}
TINY_PLAN: dict[str, Any] = {"seeds": [1], "share": 1.0}
PLANS = "ablation", "ablation_hybrid"


class Variant(NamedTuple):
    """A change of the recipe."""

    name: str
    source: str  # the paper
    changes: dict[str, Any]  # by dotted key
    tried: Sequence[str]  # of benchmarks/tried.py
    seeds: Sequence[int] = ()  # none: those of all changes
    teachers: Sequence[int] = ()  # seeds of `base` whose networks are the teachers
    base: str = RECIPE  # the change that this one is compared with
    one_run: bool = False  # whether the first part of the training is a search; `tried` must be empty
    network_of: str = ""  # a change with a search, whose network is trained from scratch


class Row(NamedTuple):
    """A finished training; perplexity per word on the validation split."""

    name: str
    seed: int
    steps: int
    ppl: float
    seconds: float  # of this training, without those whose results it needs
    parameters: int
    settings: str  # a hash of them
    device: str  # the processor's name
    arch: str
    precision: str


class Job(NamedTuple):
    """A training to be done."""

    variant: Variant
    seed: int


def read_plan(plan: dict[str, Any]) -> list[Job]:
    """Return the recipe with its seeds, then each change with its own."""
    unchanged = Variant(RECIPE, "", {}, plan.get("tried", []))
    variants = [Variant(**{**unchanged._asdict(), **each}) for each in plan["variants"]]
    if mixed := [variant.name for variant in variants if variant.one_run and variant.tried]:
        raise ParnasError(f"The change {mixed[0]!r} has both `one_run` and `tried`, which cannot be resumed.")
    recipe = [Job(unchanged, seed) for seed in plan["recipe_seeds"]]
    return recipe + [Job(variant, seed) for variant in variants for seed in variant.seeds or plan["seeds"]]


def changed_config(config: Config, job: Job) -> Config:
    """Return the configuration of a training."""
    return read_config(config, [("runtime.seed", job.seed), *read_overrides(job.variant.changes)])


@dataclass(frozen=True)
class Ablation:
    """The trainings of a plan.

    Args:
        config: the recipe.
        share: share of the training text.
        runs: where the run folders are.
        jobs: all trainings of the plan.
    """

    config: Config
    share: float
    runs: Path
    jobs: Sequence[Job]

    def train(self, job: Job) -> Row:
        """Train one network and return its row."""
        searched, run = self.folder(job) / "search", self.train_run(job)
        parts = [part.summary() for part in ([Run(searched)] if job.variant.one_run else []) + [run]]
        summary, environment = parts[-1], run.environment()
        steps, seconds = sum(part.steps for part in parts), sum(part.seconds for part in parts)
        figures = steps, summary.valid.ppl, seconds, summary.parameters
        settings, device, precision = self.hash_settings(job), environment.device_name, environment.precision
        return Row(job.variant.name, job.seed, *figures, settings, str(device), summary.arch, str(precision))

    def needed(self, job: Job) -> list[Job]:
        """Return the jobs whose runs a job needs: its teachers, or the search of its network."""
        found = [self.find(job.variant.base, seed) for seed in job.variant.teachers]
        return found + ([self.find(job.variant.network_of, job.seed)] if job.variant.network_of else [])

    def train_run(self, job: Job) -> Run:
        """Return the run of a job, or train it if it is not finished, after the trainings whose results it needs."""
        variant, folder, config = job.variant, self.folder(job), changed_config(self.config, job)
        needed = [self.train_run(each) for each in self.needed(job)]
        if variant.teachers:
            config = config.replace(train__teachers=tuple(str(run.folder) for run in needed))
        elif variant.network_of:
            config = config.replace(model__arch=needed[0].summary().arch)
        if variant.tried and not Run(folder).finished():
            shutil.rmtree(folder, ignore_errors=True)  # what is tried, such as averages, is in no checkpoint
        with ExitStack() as stack:
            for name in variant.tried:
                stack.enter_context(TRIED[name]())
            if not variant.one_run:
                return train_once(retrain, config, folder, Silent())
            first, second = split_training(config.replace(model__arch=None), folder / "search")
            derivation = derive(train_once(search, first, folder / "search", Silent()))
            second = second.replace(model__arch=str(derivation.architecture))
            return train_once(retrain, second, self.result(job).folder, Silent())

    def find(self, name: str, seed: int) -> Job:
        """Return the job of a change and a seed; raises `ParnasError` if the plan has none."""
        for job in self.jobs:
            if (job.variant.name, job.seed) == (name, seed):
                return job
        raise ParnasError(f"The plan has no training {name!r} with seed {seed}, which another training needs.")

    def result(self, job: Job) -> Run:
        """Return the run, finished or not, that holds the trained network of a job."""
        return Run(self.folder(job) / "run" if job.variant.one_run else self.folder(job))

    def folder(self, job: Job) -> Path:
        """Return the folder of a training."""
        name = re.sub("[^a-z0-9.]+", "-", job.variant.name.lower())
        return self.runs / f"{name}-seed-{job.seed}-{self.hash_settings(job)}"

    def hash_settings(self, job: Job) -> str:
        """Return a hash of the settings that influence the result of a training and differ from the defaults.

        Thus a new setting, whose default is the earlier behaviour, leaves the hash as it was.
        """
        variant, config = job.variant, changed_config(self.config, job)
        sections = {"data", "model", "train"} | ({"search"} if variant.one_run else set())
        settings = config.model_dump(mode="json", include=sections, exclude_defaults=True)
        settings["data"]["corpus"] = self.share
        hashed: list[Any] = [settings, variant.tried]
        hashed += [[each.seed, self.hash_settings(each)] for each in self.needed(job)]
        return hashlib.sha256(to_json(hashed).encode()).hexdigest()[:8]

    def rows(self, path: Path) -> list[Row]:
        """Return the finished rows of the jobs in a table."""
        wanted = {(job.variant.name, job.seed, self.hash_settings(job)) for job in self.jobs}
        return [row for row in read_rows(path, Row) if (row.name, row.seed, row.settings) in wanted]


def tabulate(jobs: list[Job], rows: list[Row]) -> list[dict[str, Any]]:
    """Return a row per change: its effect against its base, paired by seed, and the times of one device."""
    base = [row for row in rows if row.name == RECIPE]
    of_seed = {(row.name, row.seed): row.ppl for row in rows}
    usual = {device: mean(row.seconds for row in base if row.device == device) for device in {r.device for r in base}}
    variants = list(dict.fromkeys(job.variant.name for job in jobs))
    sources = {job.variant.name: job.variant.source for job in jobs}
    bases = {job.variant.name: job.variant.base for job in jobs}
    table = []
    for name in variants:
        found = [row for row in rows if row.name == name]
        if not found:
            continue
        ppl = mean(row.ppl for row in found)
        pairs = [(row.ppl, of_seed[bases[name], row.seed]) for row in found if (bases[name], row.seed) in of_seed]
        line = {"change": name, "source": sources[name] or "–", "seeds": len(found), "ppl": f"{ppl:.2f}"}
        line["± sd"] = f"{stdev(row.ppl for row in found):.2f}" if len(found) > 1 else "–"
        line |= {"against the recipe": "–", "time": "–"}
        if pairs and name != RECIPE:
            change = mean(100 * (ours / theirs - 1) for ours, theirs in pairs)
            line["against the recipe"] = f"{change:+.2f} %" + f" ({bases[name]})" * (bases[name] != RECIPE)
        # The seconds of a summary have one decimal, so that tiny trainings may take none.
        if times := [row.seconds / usual[row.device] for row in found if usual.get(row.device)]:
            line["time"] = f"{mean(times):.2f}"
        line["parameters"] = found[0].parameters
        table.append(line)
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"], [*harness.OF_TRAININGS], runs=Path("runs/ablation"))
    parser.add_argument("--plan", default=PLANS[0], choices=PLANS, help="name of a configuration in benchmarks/")
    parser.add_argument("--only", action="append", help="train only the change of that name; may be repeated")
    parsed = parser.parse_args(arguments)
    config, plan = read_study(Path(__file__).with_name(f"{parsed.plan}.yaml"), parsed, TINY, TINY_PLAN)
    path = harness.results_folder(parsed) / f"{parsed.plan}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    ablation = Ablation(config, plan["share"], parsed.runs, read_plan(plan))
    if unknown := set(parsed.only or ()) - {job.variant.name for job in ablation.jobs}:
        raise ParnasError(f"There is no change {min(unknown)!r} (--only) in {parsed.plan}.yaml.")
    if not parsed.report:
        require_corpus(config)
        train_all(ablation, path, parsed.only, parsed.workers)
    rows = ablation.rows(path)
    table = tabulate(ablation.jobs, rows)
    harness.print_table("Validation perplexity per word at the same budget, one change at a time", table)
    device = harness.choose(parsed.device, config.runtime.precision)
    precisions, devices = (sorted({getattr(row, key) for row in rows}) for key in ("precision", "device"))
    payload = {"precisions": precisions, "devices": devices, "changes": table}
    harness.write_result(parsed.plan, device, payload, parsed)


def train_all(ablation: Ablation, path: Path, only: Sequence[str] | None, workers: int) -> None:
    """Do the jobs that have no row, by seed, after the trainings whose results they need."""
    corpus = cut_corpus(ablation.config.data.corpus, ablation.share, ablation.runs / f"corpus-{ablation.share:g}")
    config = ablation.config.replace(data__corpus=str(corpus.resolve()))
    ablation = replace(ablation, config=config)
    done = {(row.name, row.seed) for row in ablation.rows(path)}
    missing = [job for job in ablation.jobs if (job.variant.name, job.seed) not in done]
    missing = [job for job in missing if not only or job.variant.name in only]
    missing.sort(key=lambda job: job.seed)  # a table that is not finished has all changes with its first seeds
    independent = [job for job in missing if not ablation.needed(job)]
    train_missing(path, config, ablation.train, independent, workers)
    dependent = [job for job in missing if job not in independent]
    # Run folders of rows that were copied from another machine are missing; two workers must not train the same one.
    needed = [each for job in dependent for each in ablation.needed(job)]
    lost = [each for n, each in enumerate(needed) if each not in needed[:n] and not ablation.result(each).finished()]
    for _ in work_off(ablation.train_run, lost, workers):
        pass
    train_missing(path, config, ablation.train, dependent, workers)


if __name__ == "__main__":
    harness.run(main)
